"""Equal private redistributions of one tensor: carried out once, priced once in the plan, told apart from the objective."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import numpy as np
import pytest

from planner.cost import CostTable
from planner.errors import InfeasibleError
from planner.plan import Plan
from planner.solving.assemble import assemble, price_redistributions, uses_by_phase
from planner.solving.replay import solution_of
from planner.solving.solve import Solution, Solver, SolveReport
from tests.oracles.small_spaces import random_costs

SEEDS = range(16)


@cache
def drawn(seed: int) -> tuple[CostTable, Plan] | None:
    """A plan whose shared placements are drawn at random, so that uses beside them often want the same."""
    costs = random_costs(seed, num_ops=7)
    try:
        best = Solver(costs).solve(exact=False)
    except InfeasibleError:
        return None
    rng, shared = np.random.default_rng(seed), dict(best.shared)
    for key in uses_by_phase(costs):
        if key in shared:
            for number in rng.permutation(len(costs.space.lattice(key[0]))):
                if np.isfinite(price_redistributions(costs, best.strategy, shared | {key: int(number)})):
                    shared[key] = int(number)
                    break
    compute = sum(float(us[s]) for us, s in zip(costs.compute_us, best.strategy, strict=True))
    objective = compute + price_redistributions(costs, best.strategy, shared)
    report = SolveReport(status="feasible", objective_us=objective, bound_us=0.0, method="drawn", seconds=0.0)
    return costs, assemble(costs, Solution(strategy=best.strategy, shared=shared, report=report), ())


def plans() -> list[tuple[CostTable, Plan]]:
    return [found for found in map(drawn, SEEDS) if found is not None]


def test_nothing_is_carried_out_twice() -> None:
    for _, plan in plans():
        made = Counter((r.tensor, r.phase, r.source, r.target, r.shared) for r in plan.redistributions)
        assert max(made.values(), default=1) == 1
        uses = list(itertools.chain.from_iterable(r.consumers for r in plan.redistributions if not r.shared))
        assert len(uses) == len(set(uses))


def test_the_plan_tells_what_is_carried_out_and_the_report_what_was_solved_for() -> None:
    merged = 0
    for costs, plan in plans():
        assert plan.objective_us == pytest.approx(plan.compute_us + plan.comm_us, rel=1e-9)
        again = sum((len(r.consumers) - 1) * r.us for r in plan.redistributions if not r.shared)
        assert plan.report.merged_us == pytest.approx(again, abs=1e-6)
        assert plan.report.objective_us == pytest.approx(plan.objective_us + again, rel=1e-9)
        merged += again > 0
        assert Plan.from_json(plan.to_json()).report == plan.report
        replayed = assemble(costs, solution_of(plan, costs), ())
        assert replayed.objective_us == pytest.approx(plan.objective_us, rel=1e-9)
        assert replayed.redistributions == plan.redistributions
    assert merged >= 3, "no plan had anything to merge"
