"""The order of the exported step with nothing ahead and nothing behind: every redistribution awaited where it is issued."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from planner.graph import TensorRef
from planner.schedule import Event, EventKind, Part, Schedule
from planner.wiring import Source, Wiring


def in_series(schedule: Schedule, wiring: Wiring) -> Schedule:
    """The same step with every redistribution awaited where it is issued, and nothing ahead or behind: what gathers parameters
    runs when it is first read, what stores a gradient as soon as that is made."""
    order = _InSeries(schedule, wiring)
    for event in schedule.events:
        order.take(event)
    order.take_the_rest()
    return Schedule(tuple(order.events))


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

    def take_the_rest(self) -> None:
        """What nothing in the step reads."""
        while self.postponed:
            event = next(iter(self.postponed.values()))
            self._forget(event)
            self._run(event)

    def _forget(self, postponed: Event) -> None:
        for made in self._makes(postponed):
            del self.postponed[made]

    def _run(self, event: Event) -> None:
        is_op = event.kind is EventKind.COMPUTE
        for read in self.wiring.operands(event.number) if is_op else (self.wiring.start(event.number),):
            if read in self.postponed:
                first = self.postponed[read]
                self._forget(first)
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
