"""The timeline: tiny programs by hand, bounds on random ones, and the objective as its serial case."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.actions import (
    ACROSS_NODES,
    COMMUNICATION,
    COMPUTE,
    IN_NODE,
    MATH,
    MEMORY,
    OVERLAPPED,
    SCHEDULES,
    SERIAL,
    Action,
    Actions,
)
from planner.constraint import parse_recipe
from planner.costing.assumptions import Contention
from planner.costing.timeline import (
    DRAINS,
    WAITS_FOR_COLLECTIVE,
    WAITS_FOR_CPU,
    WAITS_IN_QUEUE,
    Timeline,
    simulate,
)
from planner.errors import InputError, PlanFormatError
from planner.graph import ModelRequest
from planner.hardware import LaunchConstants, load_profile
from planner.issuing import actions_of
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.plan import Plan
from planner.redistribution import Collective, CollectiveKind
from planner.workbench import Workbench
from tests.oracles.random_plan import random_plan

PROFILE = load_profile("h100_sxm")
NO_CPU = replace(PROFILE, launch=LaunchConstants(eager_us=0.0, compiled_us=0.0, collective_us=0.0))
ALONE = Contention(math=1.0, memory=1.0, communication=1.0)
SHARED = Contention(math=1.5, memory=1.5, communication=1.2)
GATHER = Collective(kind=CollectiveKind.ALL_GATHER, axes=(0,), full_bytes=1024, dtype="bfloat16")


def kernel(us: float, *awaits: int, launches: int = 1, bound: str = MATH) -> Action:
    return Action(name=f"kernel {us:g}", lane=COMPUTE, us=us, bound=bound, launches=launches, block="b", awaits=awaits)


def gather(us: float, *awaits: int, lane: str = IN_NODE) -> Action:
    return Action(
        name=f"gather {us:g}", lane=lane, us=us, bound=COMMUNICATION, launches=0, block="b", awaits=awaits, collective=GATHER,
        axes="dp",
    )  # fmt: skip


def run(*actions: Action, contention: Contention = ALONE, profile: object = NO_CPU) -> Timeline:
    return simulate(Actions(schedule=SERIAL, actions=actions, storages=()), profile, contention)  # type: ignore[arg-type]


def test_a_collective_hides_behind_independent_work() -> None:
    found = run(kernel(10), gather(6), kernel(10), kernel(5, 1))
    assert found.start_us == (0, 10, 10, 20) and found.step_us == 25
    assert not found.exposed_us and not found.idle_us
    assert found.busy_share == {COMPUTE: 1.0, IN_NODE: 6 / 25, ACROSS_NODES: 0.0}


def test_contention_slows_both_while_both_run() -> None:
    found = run(kernel(10), gather(6), kernel(10), kernel(5, 1), contention=SHARED)
    gather_ends = 10 + 6 * 1.2
    second_ends = gather_ends + (10 - 7.2 / 1.5)
    assert found.end_us == pytest.approx((10, gather_ends, second_ends, second_ends + 5))


def test_memory_bound_kernels_have_a_factor_of_their_own() -> None:
    contention = Contention(math=1.0, memory=2.0, communication=1.0)
    assert run(gather(4), kernel(10, bound=MEMORY), contention=contention).step_us == pytest.approx(4 + 8)
    assert run(gather(4), kernel(10, bound=MATH), contention=contention).step_us == pytest.approx(10)


def test_awaited_at_once_is_exposed() -> None:
    found = run(kernel(10), gather(6), kernel(10, 1), kernel(5))
    assert found.step_us == 31
    assert found.idle_us == {WAITS_FOR_COLLECTIVE: 6} and found.exposed_us == {"all_gather@dp": 6}
    assert [name for name, _ in found.critical_path] == ["kernel 10", "gather 6", "kernel 10", "kernel 5"]
    assert found.path == (0, 1, 2, 3)


def test_collectives_of_one_link_queue_and_those_of_two_do_not() -> None:
    one = run(gather(4), gather(3), kernel(1, 1))
    assert one.start_us == (0, 4, 7) and one.idle_us == {WAITS_IN_QUEUE: 4, WAITS_FOR_COLLECTIVE: 3}
    two = run(gather(4, lane=ACROSS_NODES), gather(3), kernel(1, 1))
    assert two.start_us == (0, 0, 3) and two.step_us == 4


def test_a_collective_starts_after_the_compute_issued_before_it() -> None:
    assert run(kernel(5), gather(2), kernel(3)).start_us == (0, 5, 5)


def test_what_is_left_of_communication_at_the_end_is_exposed() -> None:
    found = run(kernel(5), gather(7))
    assert found.step_us == 12 and found.idle_us == {DRAINS: 7} and found.exposed_us == {"all_gather@dp": 7}


def test_small_kernels_wait_for_the_cpu() -> None:
    profile = replace(PROFILE, launch=LaunchConstants(eager_us=20.0, compiled_us=4.0, collective_us=9.0))
    found = run(kernel(1), kernel(1), kernel(1), profile=profile)
    assert found.start_us == (4, 8, 12) and found.step_us == 13 and found.idle_us == {WAITS_FOR_CPU: 10}
    assert run(gather(1), kernel(1, launches=0), profile=profile).start_us == (9, 9)


def test_nothing_to_do_takes_no_time() -> None:
    found = run()
    assert found.step_us == 0 and found.path == () and found.mfu == 0


def test_model_flops_utilisation() -> None:
    actions = Actions(
        schedule=SERIAL,
        actions=(kernel(100),),
        storages=(),
        num_devices=4,
        model_flops=4 * 989.4e12 * 40e-6,
        math_dtype="bfloat16",
    )
    assert simulate(actions, NO_CPU, ALONE).mfu == pytest.approx(0.4)


@pytest.mark.parametrize("factors", [(0.9, 1, 1), (1, 1, 0.5), (3, 1, 3), (1, 4, 1.5)])
def test_contention_that_makes_no_sense_is_refused(factors: tuple[float, float, float]) -> None:
    with pytest.raises(InputError, match="make no sense"):
        Contention(math=factors[0], memory=factors[1], communication=factors[2])


@st.composite
def programs(draw: st.DrawFn) -> tuple[Action, ...]:
    made: list[Action] = []
    for number in range(draw(st.integers(1, 14))):
        sent = [n for n, action in enumerate(made) if action.collective is not None]
        awaits = draw(st.lists(st.sampled_from(sent), max_size=2, unique=True)) if sent else []
        us = float(draw(st.sampled_from([0, 1, 2, 5, 17])))
        lane = draw(st.sampled_from([COMPUTE, COMPUTE, IN_NODE, ACROSS_NODES]))
        bound = draw(st.sampled_from([MATH, MEMORY]))
        made.append(kernel(us, *awaits, bound=bound) if lane == COMPUTE else gather(us, *awaits, lane=lane))
        assert number < len(made)
    return tuple(made)


@settings(max_examples=150, deadline=None)
@given(programs())
def test_laws_of_any_program(program: tuple[Action, ...]) -> None:
    """`simulate` asserts its bounds itself; contention never helps; compute's time is busy or accounted idle."""
    alone, shared = run(*program), run(*program, contention=SHARED)
    assert shared.step_us >= alone.step_us - 1e-9
    for found in (alone, shared):
        assert found.busy_us[COMPUTE] + sum(found.idle_us.values()) == pytest.approx(found.step_us)
        assert found.exposed_total_us == pytest.approx(
            sum(us for cause, us in found.idle_us.items() if cause != WAITS_FOR_CPU), abs=1e-9
        )
        for number, action in enumerate(program):
            assert found.end_us[number] - found.start_us[number] >= action.us - 1e-6
            assert all(found.end_us[other] <= found.start_us[number] + 1e-9 for other in action.awaits)
        on_path = [found.start_us[n] for n in found.path]
        assert on_path == sorted(on_path)


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return Workbench.build(trace(ModelRequest(model="llama3-tiny", batch=8, layers=2)), Mesh.parse("dp=2,tp=2"), gpus_per_node=2)


@pytest.fixture(scope="module")
def plans(bench: Workbench) -> list[Plan]:
    return [bench.solve(bench.default_constraints(), exact=False), *(random_plan(bench.costs, seed) for seed in range(4))]


def test_the_serial_schedule_is_the_objective_and_the_cpu(bench: Workbench, plans: list[Plan]) -> None:
    """Nothing overlaps, so what the step has beyond the sum of prices is waiting for the CPU, and nothing else."""
    for plan in plans:
        found = bench.timeline(plan, SERIAL)
        assert found.step_us == pytest.approx(plan.objective_us + found.idle_us.get(WAITS_FOR_CPU, 0.0), rel=1e-9)
        assert found.exposed_total_us == pytest.approx(found.communication_us)
        free = simulate(found.actions, NO_CPU)
        assert free.step_us == pytest.approx(plan.objective_us, rel=1e-9)
        assert set(free.path) == {n for n, action in enumerate(found.actions.actions) if action.us > 0}


def test_overlap_does_the_same_work_and_never_for_free(bench: Workbench, plans: list[Plan]) -> None:
    for plan in plans:
        serial, overlapped = (actions_of(plan, bench.graph, bench.hardware, schedule) for schedule in SCHEDULES)
        assert sorted((a.name, a.us) for a in serial.actions) == sorted((a.name, a.us) for a in overlapped.actions)
        steps = [simulate(overlapped, NO_CPU, replace(SHARED, math=f, memory=f)).step_us for f in (1.0, 1.2, 1.5, 2.0)]
        assert steps == sorted(steps)
        ideal = simulate(overlapped, NO_CPU, ALONE)
        assert ideal.step_us <= plan.objective_us * (1 + 1e-9)
        assert ideal.step_us >= max(ideal.alone_us.values()) - 1e-6


def test_gathers_of_the_next_layer_run_beside_this_one(bench: Workbench) -> None:
    plan = bench.solve((*bench.default_constraints(), parse_recipe("fsdp", bench.mesh)), exact=False)
    found = bench.timeline(plan, OVERLAPPED)
    listed = found.actions.actions
    ahead = [n for n, action in enumerate(listed) if action.block == "forward block 1" and action.collective is not None]
    before = [n for n, action in enumerate(listed) if action.block == "forward block 0" and action.lane == COMPUTE]
    assert ahead and min(ahead) < max(before)
    assert found.step_us < bench.timeline(plan, SERIAL).step_us


def test_a_chrome_trace_has_every_action_once(bench: Workbench, plans: list[Plan]) -> None:
    found = bench.timeline(plans[0])
    events = json.loads(json.dumps(found.chrome_trace()))["traceEvents"]
    ran = [e for e in events if e["ph"] == "X" and e["tid"] != 0]
    assert sorted(e["name"] for e in ran) == sorted(a.name for a in found.actions.actions if a.us > 0)
    assert max(e["ts"] + e["dur"] for e in ran) == pytest.approx(found.step_us)


def test_bad_input(bench: Workbench, plans: list[Plan]) -> None:
    with pytest.raises(InputError, match="schedule"):
        bench.timeline(plans[0], "eventually")
    with pytest.raises(PlanFormatError, match="other constants"):
        bench.timeline(replace(plans[0], hardware_hash="0"))
