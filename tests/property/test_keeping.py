"""Parameters kept from forward to backward: solvers against brute force on random small training steps, and what plans say."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from planner.constraint import MemoryBudget, ReshardAfterForward, holds
from planner.cost import CostTable
from planner.errors import InfeasibleError
from planner.graph import FORWARD
from planner.solving.assemble import facts_of, kept_placements
from planner.solving.ilp import solve_ilp
from planner.solving.solve import Solution, Solver
from tests.oracles.brute_force import BestPlan, brute_force
from tests.oracles.small_spaces import keeping_costs

SEEDS = range(30)
RELATIVE = 2e-6


@cache
def costs_of_seed(seed: int) -> CostTable:
    return keeping_costs(seed)


@cache
def truth(seed: int) -> BestPlan:
    return brute_force(costs_of_seed(seed))


def is_kept(costs: CostTable, strategy: np.ndarray | tuple[int, ...]) -> bool:
    return any(costs.space.strategies[node].is_kept(int(strategy[node])) for node in costs.space.graph.kept_from)


def check_solution(costs: CostTable, found: Solution) -> None:
    """What is kept stands in the placement in which forward reads it."""
    for node, ref in costs.space.graph.kept_from.items():
        strategies, chosen = costs.space.strategies[node], int(found.strategy[node])
        if strategies.is_kept(chosen):
            readers = [
                costs.space.strategies[user].operand(slot)[found.strategy[user]]
                for user, slot in costs.space.graph.users[ref]
                if costs.space.graph.nodes[user].phase == FORWARD
            ]
            read = readers[0] if len(readers) == 1 else found.shared[ref, FORWARD]
            assert strategies.output(0)[chosen] == read
            assert list(kept_placements(costs, found.strategy, found.shared)) == [(node, read, read)]


@pytest.mark.parametrize("seed", SEEDS)
def test_optimum_is_that_of_brute_force(seed: int) -> None:
    costs, best = costs_of_seed(seed), truth(seed)
    if not math.isfinite(best.value_us):
        with pytest.raises(InfeasibleError):
            Solver(costs).solve()
        return
    solver = Solver(costs)
    found = solver.solve()
    assert found.report.status == "optimal"
    assert found.report.objective_us == pytest.approx(best.value_us, rel=RELATIVE)
    check_solution(costs, found)
    assert solve_ilp(solver.problem.layout, solver.problem.unary_us).value_us == pytest.approx(best.value_us, rel=RELATIVE)


def test_some_optima_keep_and_some_do_not() -> None:
    kept = [is_kept(costs_of_seed(seed), truth(seed).strategy) for seed in SEEDS if math.isfinite(truth(seed).value_us)]
    assert len(kept) >= 20 and 5 <= sum(kept) <= len(kept) - 5


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if math.isfinite(truth(seed).value_us)][:15])
def test_budgets_and_demands_are_those_of_brute_force(seed: int) -> None:
    """Whatever is demanded, the free optimum is not dearer; a budget that what is kept does not fit into makes it go."""
    costs, free = costs_of_seed(seed), truth(seed)
    solver = Solver(costs)
    masks = {when: ReshardAfterForward(when=when).masks(costs.space) for when in ("always", "never")}
    for when, of_nodes in masks.items():
        constraint = ReshardAfterForward(when=when)
        best = brute_force(costs, accept=lambda choice, m=of_nodes: all(mask[choice[n]] for n, mask in m.items()))  # type: ignore[misc]
        if not math.isfinite(best.value_us):
            with pytest.raises(InfeasibleError):
                solver.solve([constraint])
            continue
        found = solver.solve([constraint])
        assert found.report.objective_us == pytest.approx(best.value_us, rel=RELATIVE)
        assert best.value_us >= free.value_us * (1 - 1e-12)
        assert holds(constraint, facts_of(costs, found)) and is_kept(costs, found.strategy) == (when == "never")
    for budget in {int(free.used_bytes), int(free.used_bytes) - 1, int(0.8 * free.used_bytes)}:
        best = brute_force(costs, budget_bytes=budget)
        if math.isfinite(best.value_us):
            found = solver.solve([MemoryBudget(num_bytes=budget)], exact=True)
            assert found.report.status == "optimal"
            assert found.report.objective_us == pytest.approx(best.value_us, rel=RELATIVE)
            assert found.used_bytes is not None and found.used_bytes <= budget
        else:
            with pytest.raises(InfeasibleError):
                solver.solve([MemoryBudget(num_bytes=budget)])
