"""Order and shape of the joint graph: dead code, one cast per parameter and phase, parameter-only chains beside their users.

All functions work on drafts and change only the `JointDraft` given to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from planner.graph import BACKWARD
from planner.tracing.convert import Draft, JointDraft, Use
from planner.tracing.recompute import recompute_cheap_activations, repeat_in_backward


def arrange(draft: JointDraft, repeated: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Takes and returns what `recompute_cheap_activations` does."""
    merge_parameter_chains(draft)
    drop_dead(draft)
    places = recompute_cheap_activations(draft, repeated)
    recompute_parameter_chains(draft)
    drop_dead(draft)
    place_parameter_chains(draft)
    place_gradient_tails(draft)
    fill_modules(draft)
    return places


def drop_dead(draft: JointDraft) -> None:
    """Keep what the loss, the gradients of parameters and the updates of buffers are computed from; leaves stay."""
    assert draft.loss is not None
    alive: set[Draft] = set()
    stack = [draft.loss[0], *(producer for producer, _ in (*draft.gradients.values(), *draft.updates.values()))]
    while stack:
        node = stack.pop()
        if node not in alive:
            alive.add(node)
            stack.extend(producer for producer, _ in node.operands)
    draft.forward = [node for node in draft.forward if node in alive]
    draft.backward = [node for node in draft.backward if node in alive]


def _parameter_only(draft: JointDraft) -> set[Draft]:
    """Forward ops computed from parameters and buffers alone."""
    stored = {*draft.parameters.values(), *draft.buffers.values()}
    found: set[Draft] = set()
    for node in draft.forward:
        if node.operands and all(producer in stored or producer in found for producer, _ in node.operands):
            found.add(node)
    return found


def merge_parameter_chains(draft: JointDraft) -> None:
    """Of equal parameter-only ops one is kept: a parameter is cast once."""
    chains = _parameter_only(draft)
    first: dict[Any, Draft] = {}
    merged: dict[Draft, Draft] = {}
    kept: list[Draft] = []
    for node in draft.forward:
        node.operands = _redirect(node.operands, merged)
        if node in chains:
            twin = first.setdefault((node.op, node.args, node.kwargs, node.operands), node)
            if twin is not node:
                merged[node] = twin
                continue
        kept.append(node)
    draft.forward = kept
    for node in draft.backward:
        node.operands = _redirect(node.operands, merged)
    assert draft.loss is not None
    (draft.loss,) = _redirect((draft.loss,), merged)
    draft.updates = dict(zip(draft.updates, _redirect(draft.updates.values(), merged), strict=True))


def _redirect(uses: Iterable[Use], changed: dict[Draft, Draft]) -> tuple[Use, ...]:
    return tuple((changed.get(producer, producer), output) for producer, output in uses)


def recompute_parameter_chains(draft: JointDraft) -> None:
    """What backward reads of a parameter-only chain is computed again there, just before its first user: nothing that depends on
    parameters alone (a gathered, cast or transposed weight) is held from forward to backward."""
    repeat_in_backward(draft, _parameter_only(draft))


def place_parameter_chains(draft: JointDraft) -> None:
    """Forward casts of parameters move from the top of the graph to just before their first user."""
    chains = _parameter_only(draft)
    placed: set[Draft] = set()
    ordered: list[Draft] = []

    def place(node: Draft) -> None:
        for producer, _ in node.operands:
            if producer in chains and producer not in placed:
                place(producer)
        placed.add(node)
        ordered.append(node)

    for node in draft.forward:
        if node not in chains:
            place(node)
    ordered.extend(node for node in draft.forward if node not in placed)
    draft.forward = ordered


def place_gradient_tails(draft: JointDraft) -> None:
    """Ops with one operand that only finish a parameter's gradient (sum, view, cast) move to just after what they finish."""
    users: dict[Draft, list[Draft]] = {}
    for node in draft.backward:
        for producer, _ in node.operands:
            users.setdefault(producer, []).append(node)
    ends = {producer for producer, _ in draft.gradients.values()}
    tails: set[Draft] = set()
    followers: dict[Draft, list[Draft]] = {}
    for node in reversed(draft.backward):
        finishes = (node in ends or node in users) and all(user in tails for user in users.get(node, ()))
        source = node.operands[0][0] if len(node.operands) == 1 else None
        if finishes and source is not None and source.kind == "op" and source.phase == BACKWARD:
            tails.add(node)
            followers.setdefault(source, []).insert(0, node)
    ordered: list[Draft] = []

    def emit(node: Draft) -> None:
        ordered.append(node)
        for follower in followers.get(node, ()):
            emit(follower)

    for node in draft.backward:
        if node not in tails:
            emit(node)
    draft.backward = ordered


def fill_modules(draft: JointDraft) -> None:
    """Give ops without a module of their own one that is the same in every layer.

    A cast of a parameter belongs to the parameter's module, a gradient's last cast to that of its producer, a sum of gradients
    to the module of its operands if they agree, else to the parent of the latest one.
    """
    for name, leaf in draft.parameters.items():
        leaf.module = name.rpartition(".")[0]
    for name, leaf in draft.buffers.items():
        leaf.module = name.rpartition(".")[0]
    order = {node: number for number, node in enumerate(draft.op_drafts())}
    for node in draft.op_drafts():
        if node.module or not node.operands:
            continue
        producers = [producer for producer, _ in node.operands]
        if node.homeless:
            ops = [producer for producer in producers if producer in order]
            latest = max(ops, key=order.__getitem__, default=producers[-1])
            agree = len({producer.module for producer in producers}) == 1
            node.module = latest.module if agree else latest.module.rpartition(".")[0]
