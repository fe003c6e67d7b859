from dataclasses import replace

import pytest

from planner.errors import ExportError
from planner.exporting.lower import lower
from planner.exporting.parts import schedule_of
from planner.graph import BACKWARD, FORWARD
from planner.plan import Plan
from planner.schedule import Event, EventKind, Part, Schedule, at_issue, at_wait
from tests.planner.exporting.small_plan import S0, P, R, small_graph, small_plan


def made(layers: int = 4) -> tuple[Schedule, Plan]:
    graph = small_graph(layers=layers)
    plan = small_plan(graph)
    return schedule_of(lower(plan, graph)), plan


def test_every_op_and_redistribution_happens_once_and_in_time() -> None:
    graph = small_graph(layers=4)
    schedule, plan = made(4)
    schedule.check(plan, graph)
    assert sorted(e.number for e in schedule.events if e.kind is EventKind.COMPUTE) == [
        n for n, node in enumerate(graph.nodes) if node.is_op
    ]
    assert sorted(schedule.issued) == sorted(schedule.awaited) == list(range(len(plan.redistributions)))


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
def test_parameters_are_on_their_way_while_the_block_before_computes(phase: str) -> None:
    schedule, _ = made(4)
    way = list(schedule.on_their_way())
    for at, event in enumerate(schedule.events):
        if event.kind is EventKind.ISSUE and event.part is Part.UNSHARD:
            between = schedule.events[at : schedule.awaited[event.number]]
            computed = {e.block for e in between if e.kind is EventKind.COMPUTE and e.part is Part.COMPUTE}
            first = event.block == next(e.block for e in schedule.events if e.block.phase == event.block.phase)
            assert first or len(computed - {event.block}) == 1
    assert all(len(open_now) <= 4 for open_now in way) and not way[-1]


def test_at_most_one_block_of_gradients_is_on_its_way_when_the_next_issues() -> None:
    schedule, plan = made(6)
    for event, open_now in zip(schedule.events, schedule.on_their_way(), strict=True):
        gradients = [n for n in open_now if plan.redistributions[n].consumers[0][1] == -1]
        assert len(gradients) <= 1, event


def test_what_happens_at_the_issue_and_at_the_wait() -> None:
    _, plan = made()
    r = plan.redistributions[0]
    (gather,) = r.steps
    cut = replace(gather, target=S0, collective=None)
    assert (at_issue(r), at_wait(r)) == ((gather,), ())
    assert (at_issue(replace(r, steps=(gather, cut))), at_wait(replace(r, steps=(gather, cut)))) == ((gather,), (cut,))
    assert (at_issue(replace(r, steps=(cut, gather))), at_wait(replace(r, steps=(cut, gather)))) == ((cut, gather), ())
    assert (at_issue(replace(r, steps=(cut,))), at_wait(replace(r, steps=(cut,)))) == ((cut,), ())
    assert R != S0 != P


def test_a_schedule_that_leaves_out_or_swaps_any_event_is_noticed() -> None:
    graph = small_graph(layers=3)
    schedule, plan = made(3)
    for at in range(len(schedule.events)):
        without = Schedule((*schedule.events[:at], *schedule.events[at + 1 :]))
        with pytest.raises(ExportError):
            without.check(plan, graph)
        doubled = Schedule((*schedule.events[: at + 1], *schedule.events[at:]))
        with pytest.raises(ExportError):
            doubled.check(plan, graph)


def test_a_read_before_the_wait_is_noticed() -> None:
    graph = small_graph(layers=3)
    schedule, plan = made(3)
    late: list[Event] = [e for e in schedule.events if not (e.kind is EventKind.WAIT and e.part is Part.COMPUTE)]
    late += [e for e in schedule.events if e.kind is EventKind.WAIT and e.part is Part.COMPUTE]
    with pytest.raises(ExportError, match="before operand"):
        Schedule(tuple(late)).check(plan, graph)
