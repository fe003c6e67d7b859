"""One shared placement per tensor and phase is enough: making each wanted placement once brings nothing more."""

import math

import pytest

from planner.workbench import Workbench, boundaries
from tests.oracles.brute_force import brute_force
from tests.oracles.small_spaces import random_costs
from tests.planner.solving.test_nudges import tiny


@pytest.mark.parametrize("seed", range(14))
def test_paying_each_target_once_makes_no_optimum_cheaper(seed: int) -> None:
    costs = random_costs(seed)
    best = brute_force(costs).value_us
    if math.isfinite(best):
        assert brute_force(costs, once_per_target=True).value_us == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "dp=2,tp=4", "dp=8"])
def test_optimal_plans_emit_no_redistribution_twice(mesh: str) -> None:
    bench: Workbench = tiny(mesh)
    plan = bench.solve(boundaries(bench.graph, bench.mesh), exact=False)
    made = [(r.tensor, r.phase, r.source, r.steps[-1].target) for r in plan.redistributions]
    assert len(made) > 3 and len(made) == len(set(made))
