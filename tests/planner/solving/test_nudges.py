"""Tiny prices that make equally cheap plans differ: they help, and they never show."""

from functools import cache

import numpy as np
import pytest

from planner.errors import InfeasibleError
from planner.graph import ModelRequest, TensorRef, layer_of
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.plan import Plan
from planner.solving.folding import OUTSIDE, Places
from planner.solving.ilp import solve_ilp
from planner.solving.message_passing import Effort, MessagePassing
from planner.solving.nudges import NUDGE_PART, nudge_prices
from planner.solving.problem import build_problem
from planner.workbench import Workbench, boundaries
from tests.oracles.small_spaces import random_costs


@cache
def tiny(mesh: str) -> Workbench:
    return Workbench.build(trace(ModelRequest(model="llama3-tiny", batch=8, layers=2)), Mesh.parse(mesh))


@cache
def optimum(mesh: str) -> Plan:
    return tiny(mesh).solve(boundaries(tiny(mesh).graph, tiny(mesh).mesh), exact=False)


MESHES = ("dp=2,cp=2,tp=2", "dp=2,tp=4", "dp=8")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_model_full_of_equal_prices_is_proved_at_once(mesh: str) -> None:
    report = optimum(mesh).report
    assert report.status == "optimal" and report.gap <= 1e-6


@pytest.mark.parametrize("mesh", MESHES)
def test_optimal_plans_emit_no_redistribution_twice(mesh: str) -> None:
    made = [(r.tensor, r.phase, r.source, r.steps[-1].target) for r in optimum(mesh).redistributions]
    assert len(made) > 3 and len(made) == len(set(made))


def test_nudges_are_tiny_and_alike_in_all_layers() -> None:
    bench = tiny("dp=2,tp=4")
    problem, places = bench.solver.problem, Places.of(bench.costs, bench.solver.problem)
    nudges, first = nudge_prices(problem, places.address), problem.layout.first
    least = np.minimum.reduceat(problem.unary_us, first[:-1]).sum()
    assert 0 < np.maximum.reduceat(nudges, first[:-1]).sum() <= NUDGE_PART * least
    of = {}
    compared = 0
    for node in np.flatnonzero(places.layer != OUTSIDE):
        span = problem.layout.span(int(node))
        key = int(places.address[node])
        mine = dict(zip(problem.strategy_numbers[span].tolist(), nudges[span].tolist(), strict=True))
        for number, nudge in mine.items():
            compared += (key, number) in of
            assert of.setdefault((key, number), nudge) == nudge
    assert compared > 1000
    graph = bench.graph
    keys = [n.key for n in graph.nodes]
    one, other = (keys.index(f"layers.{layer}.feed_forward.w1/linear/fwd#0") for layer in (0, 1))
    assert places.address[problem.node_of[one]] == places.address[problem.node_of[other]]
    assert graph.meta(TensorRef(one, 0)) == graph.meta(TensorRef(other, 0))


@pytest.mark.parametrize("seed", range(12))
def test_outcomes_are_without_nudges(seed: int) -> None:
    """Value and bound are those of the true prices, even if the nudges are large."""
    try:
        problem = build_problem(random_costs(seed))
    except InfeasibleError:
        return
    best = solve_ilp(problem.layout, problem.unary_us)
    large = np.random.default_rng(seed).uniform(0, 5, problem.num_strategies)
    passing = MessagePassing(problem, large)
    found = passing.run(Effort())
    assert found.bound_us <= best.value_us + 1e-6
    if np.isfinite(found.value_us):
        assert found.value_us == pytest.approx(problem.value_us(found.choice))
        assert found.value_us >= best.value_us - 1e-6
    reduced = passing.reduced_costs()
    if best.choice is not None:
        chosen = problem.layout.first[:-1] + best.choice
        assert (passing.bound_now() + reduced[chosen] <= best.value_us + 1e-6).all()


@pytest.mark.parametrize("mesh", MESHES)
def test_equally_cheap_layers_come_out_alike(mesh: str) -> None:
    plan = optimum(mesh)
    compared = 0
    for node in tiny(mesh).graph.nodes:
        if layer_of(node.module) == 1:
            other = node.key.replace("layers.1.", "layers.0.")
            assert (plan.choices[node.key].operands, plan.choices[node.key].outputs) == (
                plan.choices[other].operands,
                plan.choices[other].outputs,
            )
            compared += 1
    assert compared > 50
