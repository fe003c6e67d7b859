"""What a program is made of: values, statements, blocks. Made by `lower.py`, written by `blocks.py` and `driver.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.graph import JointGraph, TensorRef
from planner.placement import Placements
from planner.plan import Plan
from planner.schedule import BlockKey

GRADIENT_SLOT = -1
"""Operand slot under which a plan lists `stored as the gradient of this parameter` or `stored as the update of this buffer`."""


class Value(NamedTuple):
    """A tensor in one layout: as its producer made it, or as redistribution number `moved` of the plan left it."""

    ref: TensorRef
    moved: int | None = None


@dataclass(frozen=True)
class Call:
    """Run one op of the graph on these values (None: an operand that the op does not read).

    An op that is kept from forward (`Choice.kept`) has one operand, the forward value, and that is its result: nothing runs.
    """

    node: int
    operands: tuple[Value | None, ...]


@dataclass(frozen=True)
class Move:
    """Carry out redistribution number `number` of the plan on `source`; the result is `Value(source.ref, number)`.

    `begun`: only begin it; another function holds the `Arrive` that ends it.
    """

    number: int
    source: Value
    begun: bool = False

    @property
    def result(self) -> Value:
        return Value(self.source.ref, self.number)


@dataclass(frozen=True)
class Arrive:
    """Await a redistribution that another function began; the result is the same value, from now on readable."""

    result: Value


Statement = Call | Move | Arrive


@dataclass(frozen=True, kw_only=True)
class Block:
    """One stretch of the program, as up to four functions (see `planner/schedule.py`).

    Attributes:
        statements: of the function that computes.
        inputs: what that function reads from outside the block.
        unshard: statements that depend on parameters alone and lead to a collective; they read `unshard_inputs`.
        weights: what `unshard` hands to the function that computes, begun redistributions among it.
        reduce: the last redistributions of gradients, begun when the function that computes has handed out their sources.
        live: values that later blocks of the same phase read (forward: or the caller, as the loss).
        saved: what the backward pass reads (forward blocks only): tensors as produced, and kept parameters as they were read.
        gradients: parameter node -> the value stored as its gradient (backward blocks only).
        updates: buffer node -> the value that the step leaves in it (forward blocks only).
        private: inputs made in another block than the same layer's, which no other block of this phase reads.
    """

    key: BlockKey
    statements: tuple[Statement, ...]
    inputs: tuple[Value, ...]
    live: tuple[Value, ...]
    saved: tuple[Value, ...]
    gradients: tuple[tuple[int, Value], ...]
    updates: tuple[tuple[int, Value], ...]
    private: frozenset[Value]
    unshard: tuple[Statement, ...] = ()
    unshard_inputs: tuple[Value, ...] = ()
    weights: tuple[Value, ...] = ()
    reduce: tuple[Move, ...] = ()

    @property
    def handed(self) -> tuple[Value, ...]:
        """Gradients as the computing function returns them: those that `reduce` redistributes before that."""
        sources = {move.result: move.source for move in self.reduce}
        return tuple(sources.get(value, value) for _, value in self.gradients)


@dataclass(frozen=True, kw_only=True)
class Program:
    plan: Plan
    graph: JointGraph
    num_layers: int
    blocks: tuple[Block, ...]
    loss: Value

    def placements(self, value: Value) -> Placements:
        return placements_of(self.plan, self.graph, value)


def placements_of(plan: Plan, graph: JointGraph, value: Value) -> Placements:
    if value.moved is not None:
        return plan.redistributions[value.moved].target
    found = plan.choices[graph.nodes[value.ref.node].key].outputs[value.ref.output]
    assert found is not None, f"{graph.nodes[value.ref.node].key} has no output {value.ref.output}"
    return found


def made_by(graph: JointGraph, statements: Sequence[Statement]) -> dict[Value, None]:
    made: dict[Value, None] = {}
    for statement in statements:
        if isinstance(statement, Call):
            for output, meta in enumerate(graph.nodes[statement.node].outputs):
                if meta is not None:
                    made[Value(TensorRef(statement.node, output))] = None
        elif isinstance(statement, Move):
            made[statement.result] = None
    return made


def reads_of(statement: Statement) -> tuple[Value, ...]:
    if isinstance(statement, Move):
        return (statement.source,)
    if isinstance(statement, Arrive):
        return (statement.result,)
    return tuple(value for value in statement.operands if value is not None)


def read_by(statements: Sequence[Statement]) -> dict[Value, None]:
    return {value: None for statement in statements for value in reads_of(statement)}
