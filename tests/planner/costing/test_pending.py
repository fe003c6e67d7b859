"""Where a whole tensor may become a pending sum of itself, and what that saves in a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.pipeline import forecasts, trace
from planner.placement import Partial, Replicate
from planner.plan import Plan
from planner.solving.solve import Solver
from planner.workbench import Workbench

MODELS = Path(__file__).parents[1] / "bias_models.py"


@pytest.fixture(scope="module")
def graph() -> JointGraph:
    return trace(ModelRequest(model=f"{MODELS}:paths"))


@pytest.fixture(scope="module")
def bench(graph: JointGraph) -> Workbench:
    return Workbench.build(graph, Mesh.parse("tp=8"))


@pytest.fixture(scope="module")
def plan(bench: Workbench) -> Plan:
    return bench.solve(bench.default_constraints())


def offered(bench: Workbench) -> set[str]:
    return {f"{bench.graph.nodes[node].key}:{slot}" for node, slot in bench.costs.made_pending}


def test_biases_of_both_paths_are_offered_it_and_nothing_else(bench: Workbench) -> None:
    """Not the biases in front of a nonlinear op, not the residual: their sums are needed finished."""
    assert offered(bench) == {f"layers.{n}.{name}/add/fwd#0:1" for n in range(2) for name in ("down", "back")}


def test_residual_streams_are_not() -> None:
    assert not offered(Workbench.build(trace(ModelRequest(model="llama3-tiny", layers=1)), Mesh.parse("dp=2,tp=2")))


def test_the_plan_adds_biases_to_pending_sums_and_reduces_once(bench: Workbench, plan: Plan) -> None:
    without = Solver(replace(bench.costs, made_pending=frozenset(), routes_to_pending={}))
    before = without.solve(bench.default_constraints()).report
    assert plan.report.status == before.status == "optimal"
    assert plan.objective_us < 0.97 * before.objective_us
    assert plan.collective_counts["forward"] == {"all_reduce@tp": 2}
    added = [r for r in plan.redistributions if r.source == (Replicate(),) and r.target == (Partial(),)]
    assert {key for r in added for key, _ in r.consumers} == {key.partition(":")[0] for key in offered(bench)}
    for r in added:
        (step,) = r.steps
        assert step.collective is None and 0 < step.us < 5


def test_it_survives_a_file_a_replay_and_a_forecast(bench: Workbench, plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.redistributions == plan.redistributions or loaded.dumps() == plan.dumps()
    assert bench.replay(loaded).objective_us == pytest.approx(plan.objective_us, rel=1e-9)
    found = forecasts(plan, bench.graph)
    assert found.serial.timeline.step_us >= plan.objective_us * (1 - 1e-9)
