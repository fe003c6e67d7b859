"""A planned step as the framework of a measurement runs it, where that differs from the exported program.

Each function takes actions and gives actions; the simulation is the planner's own (`costing/timeline.py`). Only times are meant:
storages are left as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from planner.actions import COMPUTE, GATHERED, GRADIENT, MATH, Action, Actions
from planner.costing.collective import MeshCollectives
from planner.issuing import OPTIMIZER
from planner.redistribution import CollectiveKind
from planner.schedule import Part

REDUCTIONS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


def bundled(actions: Actions, collectives: MeshCollectives) -> Actions:
    """Parameters of one block are gathered in one message, and so are its gradients summed: what FSDP and DDP do."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, action in enumerate(actions.actions):
        c = action.collective
        if c is not None and action.part in (Part.UNSHARD, Part.REDUCE):
            groups.setdefault((action.block, action.part, c.kind, c.axes, c.dtype), []).append(number)
    stands_for = {number: numbers[-1] for numbers in groups.values() for number in numbers}
    changed = {}
    for numbers in groups.values():
        last = actions.actions[numbers[-1]]
        assert last.collective is not None
        whole = replace(last.collective, full_bytes=sum(_bytes(actions.actions[n]) for n in numbers))
        us = float(collectives.us(whole.kind, whole.axes, np.array(float(whole.full_bytes)), whole.dtype))
        changed[numbers[-1]] = replace(last, collective=whole, us=us)
    kept = [n for n in range(len(actions.actions)) if stands_for.get(n, n) == n]
    return _reordered(actions, kept, changed, stands_for)


def narrow_sums(actions: Actions) -> Actions:
    """Gradients are summed in two bytes per element. To be followed by `bundled`, which prices messages anew."""

    def narrowed(action: Action) -> Action:
        c = action.collective
        if c is None or action.part != Part.REDUCE or c.dtype != "float32":
            return action
        return replace(action, collective=replace(c, dtype="bfloat16", full_bytes=c.full_bytes // 2))

    return _mapped(actions, narrowed)


def pipelined(actions: Actions) -> Actions:
    """Exchanges of activations run beside the product that makes or takes them, which frameworks cut into pieces: a sum begins
    with the product before it, and a gather is awaited only after the product behind it."""
    listed = actions.actions
    order = list(range(len(listed)))
    changed: dict[int, Action] = {}
    for number, action in enumerate(listed):
        c = action.collective
        if c is None or action.part != Part.COMPUTE:
            continue
        if c.kind in REDUCTIONS:
            product = next((n for n in range(number - 1, -1, -1) if is_product(listed[n])), None)
            if product is not None and listed[product].block == action.block:
                order.remove(number)
                order.insert(order.index(product), number)
            continue
        waits = next((n for n in range(number + 1, len(listed)) if number in listed[n].awaits), None)
        product = next((n for n in range(waits or number, len(listed)) if is_product(listed[n])), None)
        if waits is None or product is None:
            continue
        later = next((n for n in range(product + 1, len(listed)) if listed[n].lane == COMPUTE), None)
        for at in range(waits, product + 1):
            mine = changed.get(at, listed[at])
            changed[at] = replace(mine, awaits=tuple(n for n in mine.awaits if n != number))
        if later is not None:
            mine = changed.get(later, listed[later])
            changed[later] = replace(mine, awaits=(*mine.awaits, number))
    return _reordered(actions, order, changed, {})


def without_gradient_sums(actions: Actions) -> Actions:
    """A micro-step whose gradients stay where they are."""
    return _mapped(actions, lambda a: _emptied(a) if a.part == Part.REDUCE and a.collective is not None else a)


def without_update(actions: Actions) -> Actions:
    """A micro-step that is not the last."""
    return _mapped(actions, lambda a: _emptied(a) if a.name == OPTIMIZER else a)


def split_update(actions: Actions, ranks: int) -> Actions:
    """Each of the ranks that hold the same parameters updates its share of them (ZeRO 1 and 2)."""
    return _mapped(actions, lambda a: replace(a, us=a.us / ranks) if a.name == OPTIMIZER else a)


def launched(actions: Actions, launches: Callable[[Action], int]) -> Actions:
    """With other numbers of kernels."""
    return _mapped(actions, lambda a: replace(a, launches=launches(a)))


def slower_products(actions: Actions, factor: float) -> Actions:
    """Products and attention at another clock."""
    return _mapped(actions, lambda a: replace(a, us=a.us * factor) if is_product(a) else a)


def with_standing_gradients(actions: Actions) -> Actions:
    """Gradients are there all the time: they are added up over micro-steps."""
    whole = {n for n in actions.held if actions.storages[n].category == GRADIENT}
    size = sum(actions.storages[n].num_bytes for n in whole)
    storages = tuple(replace(s, num_bytes=0) if n in whole else s for n, s in enumerate(actions.storages))
    return replace(actions, storages=storages, static_bytes={**actions.static_bytes, GRADIENT: size})


def with_root_gathered(actions: Actions, layers: Iterable[str]) -> Actions:
    """Parameters outside the layers are whole from their first use to the end of backward: FSDP makes one group of them, which it
    does not free in between."""
    inside = tuple(f"{layer}." for layer in layers)
    root = {
        n: storage
        for n, storage in enumerate(actions.storages)
        if storage.category == GATHERED and not f"{storage.module}.".startswith(inside)
    }
    whole: dict[tuple[str, str], int] = {}
    for storage in root.values():
        parameter = storage.module, storage.key.partition("#")[2]
        whole[parameter] = max(whole.get(parameter, 0), storage.num_bytes)
    storages = tuple(replace(s, num_bytes=0) if n in root else s for n, s in enumerate(actions.storages))
    static = {**actions.static_bytes, GATHERED: actions.static_bytes.get(GATHERED, 0) + sum(whole.values())}
    return replace(actions, storages=storages, static_bytes=static)


def _bytes(action: Action) -> int:
    assert action.collective is not None
    return action.collective.full_bytes


def is_product(action: Action) -> bool:
    """A matmul or attention."""
    return action.lane == COMPUTE and action.bound == MATH and action.us > 0


def _emptied(action: Action) -> Action:
    return replace(action, us=0.0, launches=0, collective=None)


def _mapped(actions: Actions, change: Callable[[Action], Action]) -> Actions:
    return replace(actions, actions=tuple(map(change, actions.actions)))


def _reordered(actions: Actions, order: Iterable[int], changed: Mapping[int, Action], stands_for: Mapping[int, int]) -> Actions:
    """The actions named by `order`, in that order; what is left out is awaited at the one that stands for it. Nothing awaits
    what is issued behind it."""
    order = list(order)
    position = {number: at for at, number in enumerate(order)}
    found = []
    for at, number in enumerate(order):
        action = changed.get(number, actions.actions[number])
        awaits = dict.fromkeys(position[stands_for.get(n, n)] for n in action.awaits)
        found.append(replace(action, awaits=tuple(n for n in awaits if n < at)))
    return replace(actions, actions=tuple(found))
