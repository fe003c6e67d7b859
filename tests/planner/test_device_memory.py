"""A budget is tightened until everything that is alive at once fits the device, and the plan says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import pipeline
from planner.constraint import Constraint, MemoryBudget
from planner.device_memory import ROUNDS, solve_to_fit
from planner.errors import InfeasibleError
from planner.graph import ModelRequest
from planner.mesh import Mesh
from planner.plan import Plan
from planner.units import MIB
from planner.workbench import Workbench


@pytest.fixture(scope="module")
def bench() -> Workbench:
    graph = pipeline.trace(ModelRequest(model="llama3-tiny", batch=8, layers=2))
    return Workbench.build(graph, Mesh.parse("dp=4"))


def solved(bench: Workbench, asked: list[int], constraints: tuple[Constraint, ...]) -> Plan:
    asked += [c.num_bytes for c in constraints if isinstance(c, MemoryBudget)]
    return bench.solve(constraints, exact=False)


def fitted(bench: Workbench, device_bytes: int, asked: list[int]) -> Plan:
    """On a device of which `device_bytes` are left beside what is reserved anyhow."""

    def missing(plan: Plan) -> int:
        memory = bench.forecast(plan).memory
        return max(0, memory.reserved_bytes - memory.reserve_bytes - device_bytes)

    return solve_to_fit(lambda c: solved(bench, asked, c), missing, bench.default_constraints())


def test_a_plan_that_fits_is_left_alone(bench: Workbench) -> None:
    asked: list[int] = []
    plan = fitted(bench, 10**12, asked)
    assert asked == [bench.hardware.default_budget_bytes]
    assert plan.plan_id == bench.solve(bench.default_constraints(), exact=False).plan_id
    assert "tightened" not in plan.report.method


def test_a_plan_that_does_not_fit_is_made_again_with_less(bench: Workbench) -> None:
    free = bench.solve(bench.default_constraints(), exact=False)
    memory = bench.forecast(free).memory
    room = memory.reserved_bytes - memory.reserve_bytes - MIB // 4
    asked: list[int] = []
    plan = fitted(bench, room, asked)
    now = bench.forecast(plan).memory
    assert len(asked) > 1 and asked == sorted(asked, reverse=True)
    assert now.reserved_bytes - now.reserve_bytes <= room
    assert MemoryBudget(num_bytes=asked[-1]) in plan.constraints
    assert plan.memory.peak_bytes <= asked[-1], "the bound that the plan carries is that of the budget it names"
    assert plan.objective_us >= free.objective_us
    assert "memory budget tightened from" in plan.report.method and "does not fit" not in plan.report.method


def test_what_cannot_fit_says_how_much_is_missing(bench: Workbench) -> None:
    asked: list[int] = []
    free = bench.forecast(bench.solve(bench.default_constraints(), exact=False)).memory
    plan = fitted(bench, (free.reserved_bytes - free.reserve_bytes) // 3, asked)
    assert 1 < len(asked) <= ROUNDS + 1
    assert "does not fit the device" in plan.report.method


def test_a_device_with_nothing_left_says_what_is_missing(bench: Workbench) -> None:
    assert "does not fit the device" in fitted(bench, 1, []).report.method


def test_the_last_plan_stays_if_less_memory_has_none(bench: Workbench) -> None:
    free = bench.solve(bench.default_constraints(), exact=False)

    def solve(constraints: tuple[Constraint, ...]) -> Plan:
        if bench.default_constraints() == constraints:
            return free
        raise InfeasibleError("too small", hint="", conflicts=())

    plan = solve_to_fit(solve, lambda plan: 5 * MIB, bench.default_constraints())
    assert plan.plan_id == free.plan_id and "does not fit the device: 5.00 MiB too much" in plan.report.method


def test_without_a_budget_nothing_is_tightened(bench: Workbench) -> None:
    free = bench.solve(bench.default_constraints(), exact=False)
    assert solve_to_fit(lambda c: free, lambda plan: 1, ()) is free


def test_the_pipeline_fits_plans_to_the_device(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is a little too small for the plan that its budget allows."""
    request = pipeline.PlanRequest(model=bench.graph.request, mesh=bench.mesh, checkpoint="none", time_limit_s=10)
    free = pipeline.make_plan(request, graph=bench.graph).plan
    needs = bench.forecast(free).memory.reserved_bytes
    hardware = replace(bench.hardware, usable_bytes=needs - MIB // 4, reserve_bytes=0)
    monkeypatch.setattr("planner.workbench.load_profile", lambda name: hardware)
    plan = pipeline.make_plan(request, graph=bench.graph).plan
    assert "tightened" in plan.report.method
    assert bench.forecast(plan).memory.reserved_bytes <= hardware.usable_bytes
