"""A plan and its graph as the actions that one device issues in a step, in the order of a schedule.

The steps of a redistribution begin at its issue, up to its last collective; what is left is done when it is awaited. Copies
around a collective are what its price has beyond the collective itself: before it, but after an all-gather.

Tensors inside a fused group of kernels are never written to memory and take none; whether one is inside is read off its price,
which then is 0.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from planner.actions import (
    ACROSS_NODES,
    ACTIVATION,
    COMMUNICATION,
    COMPUTE,
    GATHERED,
    GRADIENT,
    IN_NODE,
    KEPT,
    MATH,
    MEMORY,
    SCHEDULES,
    SERIAL,
    TEMPORARY,
    Action,
    Actions,
    Storage,
)
from planner.costing.collective import MeshCollectives, mesh_collectives
from planner.errors import InputError, PlanFormatError
from planner.exporting.lower import lower
from planner.exporting.parts import schedule_of
from planner.graph import VIEW_OPS, JointGraph, Node, TensorRef
from planner.mesh import Mesh
from planner.ordering import in_series
from planner.placement import Placements, Shard, text
from planner.plan import Choice, Plan, Step
from planner.redistribution import Collective, CollectiveKind
from planner.schedule import Event, EventKind, Part, Schedule, at_issue, at_wait
from planner.wiring import Source, Wiring

if TYPE_CHECKING:
    from planner.hardware import HardwareProfile

OPTIMIZER, END = "optimizer update", "end of step"
_ROUNDING_US = 2e-6
"""Prices in a saved plan are rounded to 1e-6."""


def actions_of(plan: Plan, graph: JointGraph, hardware: HardwareProfile, schedule: str) -> Actions:
    """`graph` is the plan's own (`matching.planned_graph`).

    Raises:
        InputError: no such schedule.
        PlanFormatError: the plan was made with other hardware constants.
        ExportError: the plan does not fit the graph.
    """
    if plan.hardware_hash != hardware.content_hash:
        raise PlanFormatError(
            f"the plan was priced with other constants of {plan.hardware_name} than this version has",
            hint="Price it anew: plan --from plan.json -o plan.json.",
        )
    return issue(plan, graph, hardware, order_of(plan, graph, schedule), schedule)


def order_of(plan: Plan, graph: JointGraph, schedule: str) -> Schedule:
    """The order of the exported program, or the same in series. Raises as `actions_of`."""
    if schedule not in SCHEDULES:
        raise InputError(f"unknown schedule {schedule!r}", hint=f"Known: {', '.join(SCHEDULES)}.")
    order = schedule_of(lower(plan, graph))
    return in_series(order, Wiring(plan, graph)) if schedule == SERIAL else order


def issue(plan: Plan, graph: JointGraph, hardware: HardwareProfile, order: Schedule, name: str) -> Actions:
    """The actions of any order of the step, which is checked first; `name` is that of the schedule."""
    order.check(plan, graph)
    emission = _Emission(plan, graph, hardware, mesh_collectives(hardware, plan.mesh, plan.gpus_per_node), name)
    emission.step(order)
    return emission.result()


def local_shape(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one device's piece."""
    found = list(shape)
    for placement, size in zip(placements, mesh.axis_sizes, strict=True):
        if isinstance(placement, Shard):
            found[placement.dim] //= size
    return tuple(found)


@dataclass
class _Underway:
    """A redistribution between issue and wait: where its tensor lies, how many steps are begun, the collective to wait for."""

    number: int
    storage: int | None
    done: int = 0
    awaited: int | None = None


@dataclass
class _Emission:
    """Writes one list of actions; thrown away afterwards."""

    plan: Plan
    graph: JointGraph
    hardware: HardwareProfile
    collectives: MeshCollectives
    schedule: str
    actions: list[Action] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    storage_of: dict[Source, int | None] = field(default_factory=dict)
    """where a value lies; None: a leaf, or never written to memory"""
    underway: dict[int, _Underway] = field(default_factory=dict)
    awaits: list[int] = field(default_factory=list)
    """collectives that the next compute, and everything before it, must not overtake"""
    calls: list[tuple[int, int]] = field(default_factory=list)
    block: str = ""
    part: str = ""

    def __post_init__(self) -> None:
        graph, self.wiring = self.graph, Wiring(self.plan, self.graph)
        gradients = {p.node for p in graph.parameters}
        self.gradients = {value for leaf, value in self.wiring.stored.items() if leaf in gradients}
        self.moved = {self.wiring.start(number) for number in range(len(self.plan.redistributions))}
        self.kept = set(self.wiring.kept.values())
        self.saved = {graph.storage_root(ref) for ref in graph.saved_for_backward}

    # ---- the step -----------------------------------------------------------------------------------------------------
    def step(self, schedule: Schedule) -> None:
        for (block, part), events in itertools.groupby(schedule.events, lambda event: (event.block, event.part)):
            self.block, self.part = f"{block.phase} block {block.number}", part
            first = len(self.actions)
            for event in events:
                self._event(event)
            if part is Part.COMPUTE and len(self.actions) > first:
                self.calls.append((first, len(self.actions) - 1))
        self.block, self.part = END, ""
        self._optimizer()

    def _event(self, event: Event) -> None:
        if event.kind is EventKind.COMPUTE:
            self._call(event.number)
        elif event.kind is EventKind.ISSUE:
            self._issue(event.number)
        else:
            self._wait(event.number)

    def _optimizer(self) -> None:
        nodes, choices = self.graph.nodes, self.plan.choices
        us = sum(choices[node.key].compute_us for node in nodes if not node.is_op)
        name, launches = (OPTIMIZER, 1) if us else (END, 0)
        self._add(Action(name=name, lane=COMPUTE, us=us, bound=MEMORY, launches=launches, block=self.block))

    # ---- calls --------------------------------------------------------------------------------------------------------
    def _call(self, number: int) -> None:
        node, choice = self.graph.nodes[number], self.plan.choices[self.graph.nodes[number].key]
        operands = self.wiring.operands(number)
        outputs = [Source(TensorRef(number, n)) for n, meta in enumerate(node.outputs) if meta is not None]
        if node.op in VIEW_OPS:
            self.storage_of.update((value, self.storage_of.get(operands[0])) for value in outputs)
            return
        if choice.kept:
            self._take(node, choice, operands[0], outputs[0])
            return
        writes = []
        for value in outputs:
            written = choice.compute_us > 0 or value in self.moved or value in self.kept
            self.storage_of[value] = self._store(value, choice.outputs[value.ref.output]) if written else None
            writes.append(self.storage_of[value])
        alone = node.flops > 0 or choice.compute_us >= self.hardware.pointwise.launch_us - _ROUNDING_US
        self._add(
            Action(
                name=node.key,
                lane=COMPUTE,
                us=choice.compute_us,
                bound=MATH if node.flops > 0 else MEMORY,
                launches=int(alone),
                block=self.block,
                reads=_some([self.storage_of.get(value) for value in operands]),
                writes=_some(writes),
                has_workspace=node.flops > 0,
            )
        )

    def _take(self, node: Node, choice: Choice, kept: Source, value: Source) -> None:
        """A parameter kept from forward: nothing runs; as part of a larger kernel it is read there."""
        self.storage_of[value] = self.storage_of.get(kept)
        if choice.compute_us > 0:
            self._add(
                Action(
                    name=node.key, lane=COMPUTE, us=choice.compute_us, bound=MEMORY, launches=0, block=self.block,
                    reads=_some([self.storage_of[value]]),
                )
            )  # fmt: skip

    # ---- redistributions ----------------------------------------------------------------------------------------------
    def _issue(self, number: int) -> None:
        state = _Underway(number, self.storage_of.get(self.wiring.start(number)))
        self.underway[number] = state
        for _ in at_issue(self.plan.redistributions[number]):
            self._await(state)
            self._one_step(state)

    def _wait(self, number: int) -> None:
        state = self.underway.pop(number)
        self._await(state)
        for _ in at_wait(self.plan.redistributions[number]):
            self._one_step(state)
        self.storage_of[self.wiring.result(number)] = state.storage

    def _await(self, state: _Underway) -> None:
        """Wait for the collective, if there is one, and lay out what an all-gather brought."""
        if state.awaited is None:
            return
        self.awaits.append(state.awaited)
        state.awaited = None
        step = self.plan.redistributions[state.number].steps[state.done - 1]
        _, copied = self._split(step)
        if copied > 0 and step.collective is not None and step.collective.kind is CollectiveKind.ALL_GATHER:
            state.storage = self._copy(state.number, "layout", copied, state.storage, step.target)

    def _one_step(self, state: _Underway) -> None:
        """The next step without waiting for it: a copy before, then the collective or the local move."""
        number, r = state.number, self.plan.redistributions[state.number]
        step = r.steps[state.done]
        before = r.source if state.done == 0 else r.steps[state.done - 1].target
        sent, copied = self._split(step)
        if step.collective is None:
            state.storage = self._copy(number, "local move", step.us, state.storage, step.target)
        else:
            source = state.storage
            if copied > 0 and step.collective.kind is not CollectiveKind.ALL_GATHER:
                source = self._copy(number, "pieces", copied, source, before)
            state.storage = self._store(self.wiring.result(number), step.target)
            state.awaited = self._send(number, step.collective, sent, source, state.storage)
        state.done += 1

    def _split(self, step: Step) -> tuple[float, float]:
        """µs of a step: the collective, and copies around it."""
        if step.collective is None:
            return 0.0, step.us
        c = step.collective
        sent = min(step.us, float(self.collectives.us(c.kind, c.axes, np.array(float(c.full_bytes)), c.dtype)))
        copied = step.us - sent
        return (sent, copied) if copied > _ROUNDING_US else (step.us, 0.0)

    def _copy(self, number: int, what: str, us: float, source: int | None, placements: Placements) -> int:
        storage = self._store(self.wiring.result(number), placements)
        name = f"{what} of {self.graph.nodes[self.wiring.ref(number).node].key}"
        self._add(
            Action(
                name=name, lane=COMPUTE, us=us, bound=MEMORY, launches=int(us > 0), block=self.block, reads=_some([source]),
                writes=(storage,),
            )
        )  # fmt: skip
        return storage

    def _send(self, number: int, c: Collective, us: float, source: int | None, storage: int) -> int:
        axes = self.plan.axes_text(c.axes)
        across = self.collectives.curves[c.axes].shape.nodes > 1
        action = Action(
            name=f"{c.kind}@{axes} of {self.graph.nodes[self.wiring.ref(number).node].key}",
            lane=ACROSS_NODES if across else IN_NODE,
            us=us,
            bound=COMMUNICATION,
            launches=0,
            block=self.block,
            reads=_some([source]),
            writes=(storage,),
            collective=c,
            axes=axes,
        )
        return self._add(action)

    # ---- bookkeeping --------------------------------------------------------------------------------------------------
    def _add(self, action: Action) -> int:
        """What is awaited is awaited by the compute stream: by the next compute, and by collectives issued until then."""
        self.actions.append(replace(action, part=self.part, awaits=tuple(dict.fromkeys((*self.awaits, *action.awaits)))))
        if action.lane == COMPUTE:
            self.awaits.clear()
        return len(self.actions) - 1

    def _store(self, value: Source, placements: Placements | None) -> int:
        node, meta = self.graph.nodes[value.ref.node], self.graph.meta(value.ref)
        assert placements is not None, f"{node.key} has no output {value.ref.output}"
        shape = local_shape(meta.shape, placements, self.plan.mesh)
        self.storages.append(
            Storage(
                key=node.key,
                num_bytes=math.prod(shape) * meta.itemsize,
                shape=shape,
                dtype=meta.dtype,
                placements=text(placements),
                module=node.module,
                category=self._category(value),
            )
        )
        return len(self.storages) - 1

    def _category(self, value: Source) -> str:
        if value in self.gradients:
            return GRADIENT
        if value in self.kept:
            return KEPT
        if value.ref.node in self.wiring.from_parameters:
            return GATHERED
        return ACTIVATION if value.moved is None and value.ref in self.saved else TEMPORARY

    def result(self) -> Actions:
        loss = self.wiring.operands(self.graph.node_by_key["output:loss"])
        held = [self.storage_of.get(value) for value in (*self.wiring.stored.values(), *loss)]
        used = {step.collective.axes for r in self.plan.redistributions for step in r.steps if step.collective is not None}
        work: Counter[str] = Counter()
        for node in self.graph.nodes:
            if node.flops > 0:
                work[self.graph.meta(node.operands[0]).dtype] += round(node.flops)
        return Actions(
            schedule=self.schedule,
            actions=tuple(self.actions),
            storages=tuple(self.storages),
            held=frozenset(_some(held)),
            calls=tuple(self.calls),
            static_bytes=self._static_bytes(),
            group_sizes=tuple(sorted(self.collectives.curves[axes].shape.ranks for axes in used)),
            num_devices=self.plan.mesh.num_devices,
            model_flops=self.graph.model_flops,
            math_dtype=max(work, key=lambda dtype: work[dtype], default=""),
        )

    def _static_bytes(self) -> dict[str, int]:
        memory = self.plan.memory
        found = {"parameters": memory.parameter_bytes, "optimizer state": memory.optimizer_bytes}
        for kind, name in (("buffer", "buffers"), ("input", "inputs"), ("tangent", "inputs")):
            for number, node in enumerate(self.graph.nodes):
                if node.kind == kind:
                    meta, placements = self.graph.meta(TensorRef(number, 0)), self.plan.choices[node.key].outputs[0]
                    assert placements is not None
                    size = math.prod(local_shape(meta.shape, placements, self.plan.mesh)) * meta.itemsize
                    found[name] = found.get(name, 0) + size
        return found


def _some(numbers: list[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(number for number in numbers if number is not None))
