"""The order of a training step: which op runs when, and when each redistribution is issued and awaited.

The exporter emits this order; a simulation of the step can price it. What is carried out is the plan's alone: every op once,
every redistribution once. A schedule only says when.

A step is a sequence of *blocks* (what runs before the repeated layers, each layer, what runs after them; once per phase), and a
block has up to four parts, each one function of the exported file:

    unshard   redistributions (and the casts in front of them) that depend on parameters alone; runs one block ahead
    compute   everything else
    reduce    the last redistribution of gradients: issued as soon as the block has run
    collect   awaits those; runs one block late, so at most two blocks of gradients are on their way
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from planner.errors import ExportError
from planner.graph import JointGraph, TensorRef
from planner.plan import Plan, Redistribution, Step
from planner.wiring import Wiring


class BlockKey(NamedTuple):
    """Phase and number: -1 before the layers, 0.. the layers, `num_layers` after them."""

    phase: str
    number: int


class Part(StrEnum):
    """The functions of a block, see the module's docstring."""

    UNSHARD = "unshard"
    COMPUTE = "compute"
    REDUCE = "reduce"
    COLLECT = "collect"


class EventKind(StrEnum):
    COMPUTE = "compute"
    ISSUE = "issue"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the device is told to do. Events are in the order in which the program says them.

    Attributes:
        kind: `compute` runs op `number` of the graph (one that is kept from forward is only taken);
            `issue` and `wait` begin and end redistribution `number` of the plan.
            An issue directly followed by its wait is a synchronous redistribution.
        block, part: the function of the exported file that says it.
    """

    kind: EventKind
    number: int
    block: BlockKey
    part: Part


@dataclass(frozen=True)
class Schedule:
    """All events of a step, forward and then backward."""

    events: tuple[Event, ...]

    @cached_property
    def issued(self) -> dict[int, int]:
        """Redistribution -> position of its issue."""
        return {e.number: at for at, e in enumerate(self.events) if e.kind is EventKind.ISSUE}

    @cached_property
    def awaited(self) -> dict[int, int]:
        """Redistribution -> position of its wait."""
        return {e.number: at for at, e in enumerate(self.events) if e.kind is EventKind.WAIT}

    @cached_property
    def asynchronous(self) -> frozenset[int]:
        """Redistributions with other events between issue and wait."""
        return frozenset(number for number, at in self.issued.items() if self.awaited[number] > at + 1)

    def on_their_way(self) -> Iterator[frozenset[int]]:
        """After each event: the redistributions that are issued and not awaited."""
        open_now: frozenset[int] = frozenset()
        for event in self.events:
            if event.kind is EventKind.ISSUE:
                open_now |= {event.number}
            elif event.kind is EventKind.WAIT:
                open_now -= {event.number}
            yield open_now

    def check(self, plan: Plan, graph: JointGraph) -> None:
        """Everything happens once, and nothing is read before it is there.

        Raises:
            ExportError: naming the first op or redistribution that is missing, doubled or too early.
        """
        _Check(plan, graph).run(self)


def at_issue(redistribution: Redistribution) -> tuple[Step, ...]:
    """The steps that begin at the issue: all up to the last collective, which is the one left on its way. Earlier collectives of
    the same change are awaited there and then. A change without collectives happens at its issue."""
    return redistribution.steps[: _last_collective(redistribution) + 1]


def at_wait(redistribution: Redistribution) -> tuple[Step, ...]:
    """The local steps after the last collective."""
    return redistribution.steps[_last_collective(redistribution) + 1 :]


def _last_collective(redistribution: Redistribution) -> int:
    numbers = [at for at, step in enumerate(redistribution.steps) if step.collective is not None]
    return numbers[-1] if numbers else len(redistribution.steps) - 1


class _Check:
    def __init__(self, plan: Plan, graph: JointGraph) -> None:
        self.plan, self.graph = plan, graph
        self.computed: set[int] = set()
        self.issued: set[int] = set()
        self.awaited: set[int] = set()
        self.shared: dict[tuple[TensorRef, str], int] = {}
        self.kept = Wiring(plan, graph).kept
        self.reads: dict[tuple[int, int], int] = {}
        """(consumer, operand slot) -> the redistribution that brings it"""
        for number, r in enumerate(plan.redistributions):
            if r.shared:
                self.shared[self._ref(r), r.phase] = number
            self.reads.update({(graph.node_by_key[key], slot): number for key, slot in r.consumers})

    def _ref(self, r: Redistribution) -> TensorRef:
        return TensorRef(self.graph.node_by_key[r.tensor[0]], r.tensor[1])

    def run(self, schedule: Schedule) -> None:
        for event in schedule.events:
            {EventKind.COMPUTE: self._compute, EventKind.ISSUE: self._issue, EventKind.WAIT: self._wait}[event.kind](event.number)
        missing = [node.key for n, node in enumerate(self.graph.nodes) if node.is_op and n not in self.computed]
        missing += [r.tensor[0] for n, r in enumerate(self.plan.redistributions) if n not in self.awaited]
        self._require(not missing, missing[0] if missing else "", "is never computed, or its change of placement never awaited")

    def _compute(self, number: int) -> None:
        node = self.graph.nodes[number]
        self._require(number not in self.computed, node.key, "runs twice")
        if number in self.kept:
            ref, moved = self.kept[number]
            there = self._made(ref) if moved is None else moved in self.awaited
            self._require(there, node.key, "is taken from forward before it is there")
        wanted = self.plan.choices[node.key].operands
        for slot, ref in enumerate(node.operands):
            if slot < len(wanted) and wanted[slot] is None:
                continue
            brought = self.reads.get((number, slot))
            there = self._made(ref) if brought is None else brought in self.awaited
            self._require(there, node.key, f"runs before operand {slot} is there")
        self.computed.add(number)

    def _made(self, ref: TensorRef) -> bool:
        return not self.graph.nodes[ref.node].is_op or ref.node in self.computed

    def _issue(self, number: int) -> None:
        r = self.plan.redistributions[number]
        self._require(number not in self.issued, r.tensor[0], "is redistributed twice")
        shared = None if r.shared else self.shared.get((self._ref(r), r.phase))
        there = self._made(self._ref(r)) and (shared is None or shared in self.awaited)
        self._require(there, r.tensor[0], "is redistributed before it is there")
        self.issued.add(number)

    def _wait(self, number: int) -> None:
        tensor = self.plan.redistributions[number].tensor[0]
        self._require(number in self.issued and number not in self.awaited, tensor, "is awaited without being on its way")
        self.awaited.add(number)

    @staticmethod
    def _require(fact: bool, key: str, problem: str) -> None:
        if not fact:
            raise ExportError(
                f"the order of the step is wrong: {key} {problem}", hint="This is an error of the planner; plan again."
            )
