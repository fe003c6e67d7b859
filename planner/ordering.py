"""Two orders of a lowered program: as it is written, and with communication ahead of and behind the compute that needs it.

Both carry out the same ops and redistributions. In the overlapped order what gathers parameters for a block (and the casts in
front of it) is issued when the block before starts, in backward likewise, and awaited where the block first reads it. The
redistributions that bring gradients to where they are stored are issued when their block has run and awaited when the block
after it has run. Everything else stays where the data puts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from planner.exporting.lower import GRADIENT_SLOT, Block, Call, Move, Program, Statement, Value
from planner.graph import BACKWARD, TensorRef
from planner.schedule import Event, EventKind, Part, Schedule
from planner.wiring import Source, Wiring


def in_series(schedule: Schedule, wiring: Wiring) -> Schedule:
    """The same step with every redistribution awaited where it is issued, and nothing ahead or behind: what gathers parameters
    runs when it is first read, what stores a gradient as soon as that is made."""
    order = _InSeries(schedule, wiring)
    for event in schedule.events:
        order.take(event)
    return Schedule(tuple(order.events))


def overlapped_order(program: Program) -> Schedule:
    """See the module's docstring."""
    order = _Overlapped(program)
    order.step()
    return Schedule(tuple(order.events))


def reads(statement: Statement) -> tuple[Value, ...]:
    if isinstance(statement, Move):
        return (statement.source,)
    return tuple(value for value in statement.operands if value is not None)


def _at_once(block: Block, statement: Statement) -> Iterator[Event]:
    if isinstance(statement, Call):
        yield Event(EventKind.COMPUTE, statement.node, block.key, Part.COMPUTE)
    else:
        yield Event(EventKind.ISSUE, statement.number, block.key, Part.COMPUTE)
        yield Event(EventKind.WAIT, statement.number, block.key, Part.COMPUTE)


@dataclass
class _Overlapped:
    """Writes one order; thrown away afterwards."""

    program: Program
    events: list[Event] = field(default_factory=list)
    underway: set[int] = field(default_factory=set)
    """redistributions that are issued and not awaited"""

    def step(self) -> None:
        blocks = self.program.blocks
        self.of_parameters = Wiring(self.program.plan, self.program.graph).from_parameters
        unshards = {block.key: self._unshard(block) for block in blocks}
        late: list[tuple[Block, int]] = []
        for number, block in enumerate(blocks):
            follows = number > 0 and blocks[number - 1].key.phase == block.key.phase
            if not follows:
                self._issue_ahead(block, unshards[block.key])
            if number + 1 < len(blocks) and blocks[number + 1].key.phase == block.key.phase:
                self._issue_ahead(blocks[number + 1], unshards[blocks[number + 1].key])
            reduce = [s for s in block.statements if isinstance(s, Move) and self._is_late(s)]
            for statement in block.statements:
                if statement not in unshards[block.key] and statement not in reduce:
                    self._compute(block, statement)
            self._collect(late)
            for move in reduce:
                self._wait_for(block, move)
                self._say(EventKind.ISSUE, move.number, block, Part.REDUCE)
            late = [(block, move.number) for move in reduce]
        self._collect(late)
        self._collect([(blocks[-1], number) for number in sorted(self.underway)])

    def _unshard(self, block: Block) -> frozenset[Statement]:
        """Redistributions of parameters that start from nothing but casts, and these casts."""
        makes = {s.node: s for s in block.statements if isinstance(s, Call) and s.node in self.of_parameters}
        found: set[Statement] = set()

        def casts_before(value: Value, chain: list[Call]) -> bool:
            if value.moved is not None:
                return False
            call = makes.get(value.ref.node)
            if call is None:
                return not self.program.graph.nodes[value.ref.node].is_op
            chain.append(call)
            return all(casts_before(operand, chain) for operand in reads(call))

        for statement in block.statements:
            if isinstance(statement, Move) and statement.source.ref.node in self.of_parameters:
                chain: list[Call] = []
                if casts_before(statement.source, chain):
                    found.update([statement, *chain])
        return frozenset(found)

    def _is_late(self, move: Move) -> bool:
        """On its way to be stored as a gradient, and read by nobody else."""
        r = self.program.plan.redistributions[move.number]
        return r.phase == BACKWARD and bool(r.consumers) and all(slot == GRADIENT_SLOT for _, slot in r.consumers)

    def _issue_ahead(self, block: Block, unshard: frozenset[Statement]) -> None:
        for statement in block.statements:
            if statement in unshard:
                if isinstance(statement, Move):
                    self._say(EventKind.ISSUE, statement.number, block, Part.UNSHARD)
                else:
                    self._say(EventKind.COMPUTE, statement.node, block, Part.UNSHARD)

    def _compute(self, block: Block, statement: Statement) -> None:
        self._wait_for(block, statement)
        self.events += _at_once(block, statement)

    def _wait_for(self, block: Block, statement: Statement) -> None:
        for value in reads(statement):
            if value.moved in self.underway:
                assert value.moved is not None
                self._say(EventKind.WAIT, value.moved, block, Part.COMPUTE)

    def _collect(self, late: Sequence[tuple[Block, int]]) -> None:
        for block, number in late:
            if number in self.underway:
                self._say(EventKind.WAIT, number, block, Part.COLLECT)

    def _say(self, kind: EventKind, number: int, block: Block, part: Part) -> None:
        self.events.append(Event(kind, number, block.key, part))
        if kind is EventKind.ISSUE:
            self.underway.add(number)
        elif kind is EventKind.WAIT:
            self.underway.remove(number)


@dataclass
class _InSeries:
    """Writes one order; thrown away afterwards."""

    schedule: Schedule
    wiring: Wiring
    events: list[Event] = field(default_factory=list)
    postponed: dict[Source, Event] = field(default_factory=dict)
    """what an unshard part would make -> the event that makes it"""

    def __post_init__(self) -> None:
        self.behind: dict[Source, list[Event]] = {}
        for event in self.schedule.events:
            if event.part is Part.REDUCE and event.kind is EventKind.ISSUE:
                self.behind.setdefault(self.wiring.start(event.number), []).append(event)

    def take(self, event: Event) -> None:
        if event.kind is EventKind.WAIT or event.part is Part.REDUCE:
            return
        if event.part is Part.UNSHARD:
            self.postponed.update((made, event) for made in self._makes(event))
        else:
            self._run(event)

    def _run(self, event: Event) -> None:
        is_op = event.kind is EventKind.COMPUTE
        for read in self.wiring.operands(event.number) if is_op else (self.wiring.start(event.number),):
            if read in self.postponed:
                first = self.postponed[read]
                for made in self._makes(first):
                    del self.postponed[made]
                self._run(first)
        place = replace(event, part=Part.COMPUTE)
        self.events += [place] if is_op else [place, replace(place, kind=EventKind.WAIT)]
        for made in self._makes(event):
            for late in self.behind.get(made, ()):
                self._run(late)

    def _makes(self, event: Event) -> list[Source]:
        if event.kind is EventKind.ISSUE:
            return [self.wiring.result(event.number)]
        outputs = self.wiring.graph.nodes[event.number].outputs
        return [Source(TensorRef(event.number, n)) for n, meta in enumerate(outputs) if meta is not None]
