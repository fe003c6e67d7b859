"""A block as up to four functions, and the order in which these run: the schedule of the exported step.

Redistributions of parameters are begun one block ahead, with the casts in front of them, and awaited at their first read. The
last redistribution of a gradient is begun when its block has run and awaited one block later. All others are carried out where
their result is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.exporting.program import (
    Arrive,
    Block,
    Call,
    Move,
    Program,
    Statement,
    Value,
    made_by,
    read_by,
    reads_of,
)
from planner.graph import BACKWARD, FORWARD, JointGraph
from planner.placement import Partial, identifier
from planner.plan import Plan
from planner.schedule import BlockKey, Event, EventKind, Part, Schedule


@dataclass(frozen=True)
class Parts:
    unshard: tuple[Statement, ...]
    weights: tuple[Value, ...]
    statements: tuple[Statement, ...]
    reduce: tuple[Move, ...]


def split(
    plan: Plan, graph: JointGraph, statements: tuple[Statement, ...], *, stored: set[Value], elsewhere: set[Value]
) -> Parts:
    """The parts of a block with these statements.

    Args:
        stored: values that the block stores as gradients.
        elsewhere: values that other blocks or the caller read.
    """
    ahead = _ahead(plan, graph, statements)
    unshard = [statement for at, statement in enumerate(statements) if at in ahead]
    rest = [statement for at, statement in enumerate(statements) if at not in ahead]
    late = _late(plan, graph, rest, stored - elsewhere)
    body = [statement for statement in rest if statement not in late]
    handed = {*read_by(body), *elsewhere, *stored, *(move.source for move in late)}
    weights = tuple(value for value in made_by(graph, unshard) if value in handed)
    read_ahead = read_by(unshard)
    begun = {s.result for s in unshard if isinstance(s, Move) and s.result not in read_ahead and _has_collective(plan, s.number)}
    return Parts(
        unshard=tuple(replace(s, begun=True) if isinstance(s, Move) and s.result in begun else s for s in unshard),
        weights=weights,
        statements=tuple(_with_arrivals(body, begun)),
        reduce=tuple(replace(move, begun=True) for move in late),
    )


def _has_collective(plan: Plan, number: int) -> bool:
    return any(step.collective is not None for step in plan.redistributions[number].steps)


def _ahead(plan: Plan, graph: JointGraph, statements: tuple[Statement, ...]) -> set[int]:
    """Positions of the statements that depend on parameters and buffers alone and lead to a collective."""
    maker: dict[Value, int] = {}
    for at, statement in enumerate(statements):
        reads = reads_of(statement)
        movable = not isinstance(statement, Call) or graph.nodes[statement.node].op.startswith("aten.")
        if reads and movable and all(value in maker or _is_stored(graph, value) for value in reads):
            maker.update((value, at) for value in made_by(graph, [statement]))
    needed: set[int] = set()
    for at in reversed(range(len(statements))):
        statement = statements[at]
        leads = isinstance(statement, Move) and maker.get(statement.result) == at and _has_collective(plan, statement.number)
        if leads or at in needed:
            needed.add(at)
            needed.update(maker[value] for value in reads_of(statement) if value in maker)
    return needed


def _is_stored(graph: JointGraph, value: Value) -> bool:
    return value.moved is None and graph.nodes[value.ref.node].kind in ("param", "buffer")


def _late(plan: Plan, graph: JointGraph, statements: list[Statement], stored: set[Value]) -> list[Move]:
    """Redistributions of values that this block makes, whose results are stored as gradients and read by nothing else."""
    read, made = read_by(statements), made_by(graph, statements)
    return [
        s
        for s in statements
        if isinstance(s, Move) and s.result in stored and s.result not in read and s.source in made
        and _has_collective(plan, s.number) and not _has_maximum(plan, s.number)
    ]  # fmt: skip


def _has_maximum(plan: Plan, number: int) -> bool:
    r = plan.redistributions[number]
    return any(Partial("max") in placements for placements in (r.source, *(step.target for step in r.steps)))


def _with_arrivals(statements: list[Statement], begun: set[Value]) -> Iterator[Statement]:
    """Each begun value is awaited in front of its first reader, at the end if only other blocks read it."""
    waiting = dict.fromkeys(sorted(begun))
    for statement in statements:
        for value in reads_of(statement):
            if value in waiting:
                del waiting[value]
                yield Arrive(value)
        yield statement
    for value in waiting:
        yield Arrive(value)


# ---- order ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Turn:
    """One block computes; before that the next block's unshard begins, after it an earlier block's gradients are collected and
    its own begin to be reduced."""

    block: Block
    ahead: Block | None
    collected: Block | None


def turns(program: Program, phase: str) -> tuple[Turn, ...]:
    """The order of a phase. In front of it stands the first block's own unshard, behind it the last collect (`left`)."""
    blocks = [block for block in program.blocks if block.key.phase == phase]
    found: list[Turn] = []
    waiting: Block | None = None
    for at, block in enumerate(blocks):
        ahead = blocks[at + 1] if at + 1 < len(blocks) and blocks[at + 1].unshard else None
        found.append(Turn(block, ahead, waiting))
        waiting = block if block.reduce else None
    return tuple(found)


def left(phase_turns: tuple[Turn, ...]) -> Block | None:
    """The block whose gradients are collected when all have run."""
    return phase_turns[-1].block if phase_turns and phase_turns[-1].block.reduce else None


def schedule_of(program: Program) -> Schedule:
    """What the exported file does, event by event."""
    return Schedule(tuple(event for phase in (FORWARD, BACKWARD) for said in _calls(program, phase) for event in said.events()))


def said(program: Program, phase: str) -> Iterator[str]:
    """The same as the file says it: `block` where one begins to compute, and redistributions and halves with their layouts."""
    for call in _calls(program, phase):
        if call.part is Part.COMPUTE:
            yield "block"
        for statement in call.statements:
            if not isinstance(statement, Call):
                yield f"{_said(statement)} {_layouts(program.plan, statement)}"


def _said(statement: Move | Arrive) -> str:
    if isinstance(statement, Arrive):
        return "redistribute_end"
    return "redistribute_begin" if statement.begun else "redistribute"


def _layouts(plan: Plan, statement: Move | Arrive) -> str:
    number = statement.result.moved
    assert number is not None
    r = plan.redistributions[number]
    return " -> ".join(identifier(placements) for placements in (r.source, *(step.target for step in r.steps)))


@dataclass(frozen=True)
class _FunctionCall:
    """One function of a block as it runs."""

    key: BlockKey
    part: Part
    statements: tuple[Statement, ...]

    def events(self) -> Iterator[Event]:
        for statement in self.statements:
            if isinstance(statement, Call):
                yield Event(EventKind.COMPUTE, statement.node, self.key, self.part)
            elif isinstance(statement, Arrive):
                assert statement.result.moved is not None
                yield Event(EventKind.WAIT, statement.result.moved, self.key, self.part)
            else:
                yield Event(EventKind.ISSUE, statement.number, self.key, self.part)
                if not statement.begun:
                    yield Event(EventKind.WAIT, statement.number, self.key, self.part)


def _calls(program: Program, phase: str) -> Iterator[_FunctionCall]:
    """The functions of a phase, in the order in which they run."""
    order = turns(program, phase)
    if order:
        yield _FunctionCall(order[0].block.key, Part.UNSHARD, order[0].block.unshard)
    for turn in order:
        if turn.ahead is not None:
            yield _FunctionCall(turn.ahead.key, Part.UNSHARD, turn.ahead.unshard)
        yield _FunctionCall(turn.block.key, Part.COMPUTE, turn.block.statements)
        yield from _collected(turn.collected)
        yield _FunctionCall(turn.block.key, Part.REDUCE, turn.block.reduce)
    yield from _collected(left(order))


def _collected(block: Block | None) -> list[_FunctionCall]:
    if block is None:
        return []
    return [_FunctionCall(block.key, Part.COLLECT, tuple(Arrive(move.result) for move in block.reduce))]
