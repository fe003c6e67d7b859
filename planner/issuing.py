"""A plan and its graph as the actions that one device issues in a step, in the order of the exported program.

`serial` is the program as it is written: each collective is awaited where it is issued. `overlapped` moves two things:

- What depends on parameters alone and gathers them is issued when the block before starts (in backward: the block that runs
  before), and awaited where the block first reads it. Of several moves in a row those are issued ahead that need no copy between
  them; the rest is done at the first read. The first block of each phase has nobody before it.
- The last move of a gradient is issued where the gradient is made and awaited at the end of the step.

All other collectives stay where the data puts them. Tensors inside a fused group of kernels are never written to memory and take
none; whether one is inside is read off its price, which then is 0.
"""

from __future__ import annotations

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
    MATH,
    MEMORY,
    OVERLAPPED,
    SCHEDULES,
    TEMPORARY,
    Action,
    Actions,
    Storage,
)
from planner.costing.collective import MeshCollectives, mesh_collectives
from planner.errors import InputError, PlanFormatError
from planner.exporting.lower import GRADIENT_SLOT, Block, Call, Move, Program, Statement, Value, lower
from planner.graph import BACKWARD, FORWARD, VIEW_OPS, JointGraph, TensorRef
from planner.mesh import Mesh
from planner.placement import Placements, Shard, text
from planner.plan import Plan, Step
from planner.redistribution import CollectiveKind

if TYPE_CHECKING:
    from planner.hardware import HardwareProfile

OPTIMIZER, END = "optimizer update", "end of step"
_ROUNDING_US = 2e-6
"""Prices in a saved plan are rounded to 1e-6."""


def actions_of(plan: Plan, graph: JointGraph, hardware: HardwareProfile, schedule: str) -> Actions:
    """`graph` is the plan's own (`pipeline.planned_graph`).

    Raises:
        InputError: no such schedule.
        PlanFormatError: the plan was made with other hardware constants.
        ExportError: the plan does not fit the graph.
    """
    if schedule not in SCHEDULES:
        raise InputError(f"unknown schedule {schedule!r}", hint=f"Known: {', '.join(SCHEDULES)}.")
    if plan.hardware_hash != hardware.content_hash:
        raise PlanFormatError(
            f"the plan was priced with other constants of {plan.hardware_name} than this version has",
            hint="Price it anew: plan --from plan.json -o plan.json.",
        )
    program = lower(plan, graph)
    emission = _Emission(program, hardware, mesh_collectives(hardware, plan.mesh, plan.gpus_per_node), schedule)
    emission.step()
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
    """A move of which only the first `done` steps are issued; the last of them, number `awaited`, is not awaited yet."""

    move: Move
    done: int
    storage: int
    awaited: int | None


@dataclass
class _Emission:
    """Writes one list of actions; thrown away afterwards."""

    program: Program
    hardware: HardwareProfile
    collectives: MeshCollectives
    schedule: str
    actions: list[Action] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    storage_of: dict[Value, int | None] = field(default_factory=dict)
    """where a value lies; None: a leaf, or never written to memory"""
    underway: dict[Value, _Underway] = field(default_factory=dict)
    ahead: set[Statement] = field(default_factory=set)
    """statements issued before their block"""
    awaits: list[int] = field(default_factory=list)
    """collectives that the next compute, and everything before it, must not overtake"""
    block: str = ""

    def __post_init__(self) -> None:
        self.plan, self.graph = self.program.plan, self.program.graph
        self.overlapped = self.schedule == OVERLAPPED
        self.from_parameters = _from_parameters(self.graph)
        self.stored = dict(pair for block in self.program.blocks for pair in (*block.gradients, *block.updates))
        gradients = {p.node for p in self.graph.parameters}
        self.gradient_values = {value for leaf, value in self.stored.items() if leaf in gradients}
        self.read_by_moves = {m.source for block in self.program.blocks for m in block.statements if isinstance(m, Move)}
        self.saved = {value.ref for block in self.program.blocks for value in block.saved}

    # ---- the step -----------------------------------------------------------------------------------------------------
    def step(self) -> None:
        blocks = self.program.blocks
        for number, block in enumerate(blocks):
            self.block = _name(block)
            if self.overlapped:
                first = number == 0 or blocks[number - 1].key.phase != block.key.phase
                if first:
                    self._issue_ahead(block)
                if number + 1 < len(blocks) and blocks[number + 1].key.phase == block.key.phase:
                    self._issue_ahead(blocks[number + 1])
            for statement in block.statements:
                if statement not in self.ahead:
                    self._statement(statement)
        self.block = END
        for value in list(self.underway):
            self._finish(value)
        self._optimizer()

    def _statement(self, statement: Statement) -> None:
        if isinstance(statement, Call):
            self._call(statement)
        else:
            self._read(statement.source)
            self._begin(statement)
            if not (self.overlapped and self._is_late(statement)):
                self._finish(statement.result)

    def _is_late(self, move: Move) -> bool:
        """The last move of a gradient on its way to be stored."""
        r = self.plan.redistributions[move.number]
        return r.phase == BACKWARD and bool(r.consumers) and all(slot == GRADIENT_SLOT for _, slot in r.consumers)

    def _issue_ahead(self, block: Block) -> None:
        """Gather what the block needs of the parameters; stops where something would have to wait."""
        for statement in block.statements:
            if not self._is_of_parameters(statement):
                continue
            operands = [statement.source] if isinstance(statement, Move) else [v for v in statement.operands if v is not None]
            if any(value in self.underway or not self._is_there(value) for value in operands):
                continue
            self.ahead.add(statement)
            if isinstance(statement, Move):
                self._begin(statement)
            else:
                self._call(statement)

    def _is_of_parameters(self, statement: Statement) -> bool:
        node = statement.source.ref.node if isinstance(statement, Move) else statement.node
        return node in self.from_parameters

    def _is_there(self, value: Value) -> bool:
        return value in self.storage_of or (not self.graph.nodes[value.ref.node].is_op and value.moved is None)

    def _optimizer(self) -> None:
        nodes, choices = self.graph.nodes, self.plan.choices
        us = sum(choices[nodes[p.node].key].compute_us for p in self.graph.parameters)
        us += sum(choices[node.key].compute_us for node in nodes if node.kind not in ("param", "op"))
        name, launches = (OPTIMIZER, 1) if us else (END, 0)
        self._add(Action(name=name, lane=COMPUTE, us=us, bound=MEMORY, launches=launches, block=self.block))

    # ---- calls --------------------------------------------------------------------------------------------------------
    def _call(self, call: Call) -> None:
        node, choice = self.graph.nodes[call.node], self.plan.choices[self.graph.nodes[call.node].key]
        reads = [self._read(value) for value in call.operands if value is not None]
        outputs = [Value(TensorRef(call.node, n)) for n, meta in enumerate(node.outputs) if meta is not None]
        if node.op in VIEW_OPS:
            first = next((value for value in call.operands if value is not None), None)
            for value in outputs:
                self.storage_of[value] = None if first is None else self.storage_of.get(first)
            return
        writes = []
        for value in outputs:
            written = choice.compute_us > 0 or value in self.read_by_moves
            self.storage_of[value] = self._store(value, self._kept_as(value)) if written else None
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
                reads=_some(reads),
                writes=_some(writes),
                has_workspace=node.flops > 0,
            )
        )

    def _read(self, value: Value) -> int | None:
        """Where a value lies; what is underway is finished."""
        if value in self.underway:
            self._finish(value)
        return self.storage_of.get(value)

    # ---- moves --------------------------------------------------------------------------------------------------------
    def _begin(self, move: Move) -> None:
        """Issue the moves up to the first that would have to wait for a collective before it."""
        state = _Underway(move, 0, -1, None)
        self.underway[move.result] = state
        steps = self.plan.redistributions[move.number].steps
        while state.done < len(steps):
            collective, copied = steps[state.done].collective, self._split(steps[state.done])[1]
            gathers = collective is not None and collective.kind is CollectiveKind.ALL_GATHER
            copies_first = collective is None or (copied > 0 and not gathers)
            if state.awaited is not None and copies_first:
                return
            self._one_step(state)
            if gathers and copied > 0:
                return

    def _finish(self, value: Value) -> None:
        """Issue what is left of a move, and await it."""
        state = self.underway.pop(value)
        steps = self.plan.redistributions[state.move.number].steps
        self._await(state)
        while True:
            self._layout(state)
            if state.done == len(steps):
                break
            self._one_step(state)
            self._await(state)
        self.storage_of[value] = state.storage

    def _await(self, state: _Underway) -> None:
        if state.awaited is not None:
            self.awaits.append(state.awaited)
            state.awaited = None

    def _one_step(self, state: _Underway) -> None:
        """The next step without waiting for it: a copy before, then the collective or the local move."""
        move, r = state.move, self.plan.redistributions[state.move.number]
        step = r.steps[state.done]
        source = self.storage_of.get(move.source) if state.done == 0 else state.storage
        before = r.source if state.done == 0 else r.steps[state.done - 1].target
        sent, copied = self._split(step)
        if step.collective is None:
            state.storage = self._copy(move, "local move", step.us, source, step.target)
        else:
            if copied > 0 and step.collective.kind is not CollectiveKind.ALL_GATHER:
                source = self._copy(move, "pieces", copied, source, before)
            storage = self._store(move.result, self._kept_as(move.result), step.target)
            state.awaited = self._send(move, step, sent, source, storage, state.awaited)
            state.storage = storage
        state.done += 1

    def _layout(self, state: _Underway) -> None:
        """The copy after an all-gather that was just awaited."""
        step = self.plan.redistributions[state.move.number].steps[state.done - 1]
        _, copied = self._split(step)
        if step.collective is not None and step.collective.kind is CollectiveKind.ALL_GATHER and copied > 0:
            state.storage = self._copy(state.move, "layout", copied, state.storage, step.target)

    def _split(self, step: Step) -> tuple[float, float]:
        """µs of a step: the collective, and copies around it."""
        if step.collective is None:
            return 0.0, step.us
        c = step.collective
        sent = min(step.us, float(self.collectives.us(c.kind, c.axes, np.array(float(c.full_bytes)), c.dtype)))
        copied = step.us - sent
        return (sent, copied) if copied > _ROUNDING_US else (step.us, 0.0)

    def _copy(self, move: Move, what: str, us: float, source: int | None, placements: Placements) -> int:
        storage = self._store(move.result, self._kept_as(move.result), placements)
        name = f"{what} of {self.graph.nodes[move.source.ref.node].key}"
        self._add(
            Action(
                name=name, lane=COMPUTE, us=us, bound=MEMORY, launches=int(us > 0), block=self.block, reads=_some([source]),
                writes=(storage,),
            )
        )  # fmt: skip
        return storage

    def _send(self, move: Move, step: Step, us: float, source: int | None, storage: int, behind: int | None) -> int:
        c = step.collective
        assert c is not None
        axes = self.plan.axes_text(c.axes)
        across = self.collectives.curves[c.axes].shape.nodes > 1
        action = Action(
            name=f"{c.kind}@{axes} of {self.graph.nodes[move.source.ref.node].key}",
            lane=ACROSS_NODES if across else IN_NODE,
            us=us,
            bound=COMMUNICATION,
            launches=0,
            block=self.block,
            awaits=() if behind is None else (behind,),
            reads=_some([source]),
            writes=(storage,),
            collective=c,
            axes=axes,
        )
        return self._add(action)

    # ---- bookkeeping --------------------------------------------------------------------------------------------------
    def _add(self, action: Action) -> int:
        """What is awaited is awaited by the compute stream: by the next compute, and by collectives issued until then."""
        self.actions.append(replace(action, awaits=tuple(dict.fromkeys((*self.awaits, *action.awaits)))))
        if action.lane == COMPUTE:
            self.awaits.clear()
        return len(self.actions) - 1

    def _store(self, value: Value, category: str, placements: Placements | None = None) -> int:
        node, meta = self.graph.nodes[value.ref.node], self.graph.meta(value.ref)
        placements = self.program.placements(value) if placements is None else placements
        shape = local_shape(meta.shape, placements, self.plan.mesh)
        size = int(np.prod(shape, dtype=np.int64)) * meta.itemsize
        self.storages.append(
            Storage(
                key=node.key, num_bytes=size, shape=shape, dtype=meta.dtype, placements=text(placements), module=node.module,
                category=category,
            )
        )  # fmt: skip
        return len(self.storages) - 1

    def _kept_as(self, value: Value) -> str:
        if value in self.gradient_values:
            return GRADIENT
        if value.ref.node in self.from_parameters:
            return GATHERED
        saved = value.moved is None and self.graph.nodes[value.ref.node].phase == FORWARD and value.ref in self.saved
        return ACTIVATION if saved else TEMPORARY

    def result(self) -> Actions:
        held = [self.storage_of.get(value) for value in (*self.stored.values(), self.program.loss)]
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
                    value = Value(TensorRef(number, 0))
                    shape = local_shape(self.graph.meta(value.ref).shape, self.program.placements(value), self.plan.mesh)
                    size = int(np.prod(shape, dtype=np.int64)) * self.graph.meta(value.ref).itemsize
                    found[name] = found.get(name, 0) + size
        return found


def _from_parameters(graph: JointGraph) -> frozenset[int]:
    """Parameters, and ops computed from parameters alone."""
    found: set[int] = set()
    for number, node in enumerate(graph.nodes):
        computed = node.is_op and bool(node.operands) and all(ref.node in found for ref in node.operands)
        if node.kind == "param" or computed:
            found.add(number)
    return frozenset(found)


def _name(block: Block) -> str:
    return f"{block.key.phase} block {block.key.number}"


def _some(numbers: list[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(number for number in numbers if number is not None))
