"""Both solvers against brute force on random small training steps: value, bound, pins, budgets, sharing, order of solves."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from planner.constraint import MemoryBudget, Pin
from planner.cost import CostTable
from planner.errors import InfeasibleError, InvalidConstraintError
from planner.graph import TensorRef
from planner.solving.ilp import solve_ilp
from planner.solving.least_memory import least_memory
from planner.solving.message_passing import Effort, MessagePassing
from planner.solving.problem import PairwiseProblem, build_problem
from planner.solving.solve import Solution, Solver
from tests.oracles.brute_force import BestPlan, brute_force
from tests.oracles.dual import price, prove
from tests.oracles.small_spaces import random_costs, with_pending_moves

SEEDS = range(40)
RELATIVE = 2e-6


@cache
def costs_of_seed(seed: int) -> CostTable:
    return random_costs(seed)


@cache
def truth(seed: int) -> BestPlan:
    return brute_force(costs_of_seed(seed))


@cache
def feasible_seeds() -> tuple[int, ...]:
    return tuple(seed for seed in SEEDS if math.isfinite(truth(seed).value_us))


def price_by_hand(costs: CostTable, solution: Solution) -> float:
    """Price of a solution from the cost table alone, its shared placements taken as stated."""
    space, graph = costs.space, costs.space.graph
    total = sum(float(costs.compute_us[i][s]) for i, s in enumerate(solution.strategy))
    uses: dict[tuple[TensorRef, str], list[tuple[int, int]]] = {}
    for index, node in enumerate(graph.nodes):
        for slot, ref in enumerate(node.operands):
            uses.setdefault((ref, node.phase), []).append((index, slot))
    for parameter in graph.parameters:
        if parameter.gradient is not None:
            uses.setdefault((parameter.gradient, "backward"), []).append((parameter.node, -1))
    for (ref, phase), readers in uses.items():
        lattice = space.lattice_of[ref]
        here = int(space.strategies[ref.node].output(0)[solution.strategy[ref.node]])
        if len(readers) > 1:
            shared = solution.shared[ref, phase]
            held = any(reader in costs.unreduced for reader in readers)
            routes = costs.routes_without_reduction[lattice] if held else costs.routes[lattice]
            total += float(routes.table_us[here, shared])
            here = shared
        for consumer, slot in readers:
            strategies = space.strategies[consumer]
            wanted = (strategies.output(0) if slot == -1 else strategies.operand(slot))[solution.strategy[consumer]]
            total += float(costs.routes_of_use(lattice, consumer, slot).table_us[here, int(wanted)])
    return total


def exact(problem: PairwiseProblem, *, budget: int | None = None, alive: np.ndarray | None = None) -> float:
    cost = problem.unary_us if alive is None else np.where(alive, problem.unary_us, np.inf)
    found = solve_ilp(problem.layout, cost, num_bytes=problem.num_bytes, budget_bytes=budget)
    return found.value_us


def test_enough_instances_have_a_plan() -> None:
    assert len(feasible_seeds()) >= 25


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
    assert found.report.bound_us <= best.value_us * (1 + 1e-9)
    assert price_by_hand(costs, found) == pytest.approx(found.report.objective_us, rel=1e-9)
    assert exact(solver.problem) == pytest.approx(best.value_us, rel=RELATIVE)


@pytest.mark.parametrize("seed", range(12))
def test_optimum_where_whole_tensors_may_become_pending_sums(seed: int) -> None:
    costs = with_pending_moves(costs_of_seed(seed), seed)
    best = brute_force(costs)
    assert best.value_us <= truth(seed).value_us + 1e-9
    if not math.isfinite(best.value_us):
        with pytest.raises(InfeasibleError):
            Solver(costs).solve()
        return
    found = Solver(costs).solve()
    assert found.report.status == "optimal" and found.report.objective_us == pytest.approx(best.value_us, rel=RELATIVE)
    assert price_by_hand(costs, found) == pytest.approx(best.value_us, rel=RELATIVE)


def test_becoming_pending_brings_something_somewhere() -> None:
    better = [
        seed for seed in range(12) if brute_force(with_pending_moves(costs_of_seed(seed), seed)).value_us < truth(seed).value_us
    ]
    assert better


@pytest.mark.parametrize("seed", SEEDS)
def test_bound_never_exceeds_optimum_whatever_the_messages(seed: int) -> None:
    if seed not in feasible_seeds():
        return
    problem, best = build_problem(costs_of_seed(seed)), truth(seed).value_us
    passing = MessagePassing(problem)
    rng = np.random.default_rng(seed)
    passing.messages.forward[:] = rng.uniform(-30, 30, len(passing.messages.forward))
    passing.messages.backward[:] = rng.uniform(-30, 30, len(passing.messages.backward))
    for eps, ahead in ((5.0, False), (0.5, True), (1e-9, True), (1e-9, False)):  # nor after coarse settling, nor for other shares
        found = passing.run(Effort(max_sweeps=3, eps_us=eps, ahead=ahead))
        assert found.bound_us <= best * (1 + 1e-9) + 1e-9
        assert found.value_us >= best * (1 - 1e-9)


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_bound_and_reduced_costs_are_what_the_messages_say(seed: int) -> None:
    if seed not in feasible_seeds():
        return
    problem = build_problem(costs_of_seed(seed))
    passing = MessagePassing(problem)
    for sweeps, ahead in ((1, False), (3, True), (2, False), (2, True), (30, False)):
        found = passing.run(Effort(max_sweeps=sweeps, ahead=ahead))
        proof = prove(problem.layout, passing.cost_us, passing.messages)
        assert proof.bound_us == pytest.approx(passing.bound_now(), rel=1e-9, abs=1e-9)
        assert proof.with_strategy_us == pytest.approx(passing.bound_now() + passing.reduced_costs(), rel=1e-9, abs=1e-9)
        assert price(problem.layout, passing.cost_us, found.choice) == pytest.approx(found.value_us, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_reduced_costs_never_exceed_what_a_strategy_costs(seed: int) -> None:
    if seed not in feasible_seeds():
        return
    costs = costs_of_seed(seed)
    problem = build_problem(costs)
    passing = MessagePassing(problem)
    passing.run(Effort(max_sweeps=4, ahead=seed % 2 == 0))
    reduced, low = passing.reduced_costs(), passing.bound_now()
    rng = np.random.default_rng(seed)
    for at in rng.choice(problem.num_strategies, min(12, problem.num_strategies), replace=False):
        node = int(np.searchsorted(problem.layout.first, at, side="right")) - 1
        alive = np.ones(problem.num_strategies, np.bool_)
        alive[problem.layout.span(node)] = False
        alive[at] = True
        value = exact(problem, alive=alive)
        assert low + reduced[at] <= value + 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_pins_give_the_optimum_among_pinned_plans_and_unpinning_restores(seed: int) -> None:
    if seed not in feasible_seeds():
        return
    costs = costs_of_seed(seed)
    solver, rng = Solver(costs), np.random.default_rng(seed)
    free = solver.solve()
    for _ in range(4):
        node = int(rng.integers(len(costs.space.graph.nodes)))
        ref = TensorRef(node, 0)
        number = int(rng.choice(solver.legal(ref)))
        pin = Pin(
            where=costs.space.graph.nodes[node].key.removeprefix("param:"), placements=costs.space.lattice(ref).placements(number)
        )
        best = brute_force(costs, pins={ref: number})
        if not math.isfinite(best.value_us):
            with pytest.raises(InfeasibleError):
                solver.solve((pin,))
            continue
        pinned = solver.solve((pin,))
        assert pinned.report.objective_us == pytest.approx(best.value_us, rel=RELATIVE)
        assert pinned.report.objective_us >= free.report.objective_us * (1 - 1e-9)
        made = costs.space.strategies[node].output(0)[pinned.strategy[node]]
        assert made == number
        again = solver.solve()
        assert again.report.objective_us == free.report.objective_us
        assert (again.strategy == free.strategy).all() and again.shared == free.shared


@pytest.mark.parametrize("seed", SEEDS)
def test_budgets(seed: int) -> None:
    """The least memory m is exact: m works, m - 1 is refused with both numbers; more memory never costs time."""
    if seed not in feasible_seeds():
        return
    costs = costs_of_seed(seed)
    solver, smallest = Solver(costs), brute_force(costs, minimise_bytes=True)
    least = least_memory(solver.problem, np.ones(solver.problem.num_strategies, np.bool_), Effort())
    assert least.proved and least.num_bytes == smallest.used_bytes
    low, high = int(smallest.used_bytes), int(truth(seed).used_bytes)
    before = math.inf
    for part in (0.0, 0.3, 0.6, 1.0):
        budget = low + int(part * (high - low))
        best = brute_force(costs, budget_bytes=budget)
        found = solver.solve((MemoryBudget(num_bytes=budget),))
        assert found.used_bytes is not None and found.used_bytes <= budget
        assert found.report.objective_us == pytest.approx(best.value_us, rel=RELATIVE)
        assert found.report.bound_us <= best.value_us * (1 + 1e-9)
        assert exact(solver.problem, budget=budget) == pytest.approx(best.value_us, rel=RELATIVE)
        assert found.report.objective_us <= before * (1 + RELATIVE)
        before = found.report.objective_us
    if low > 1:
        with pytest.raises(InfeasibleError) as refused:
            solver.solve((MemoryBudget(num_bytes=low - 1),))
        assert refused.value.shortfall_bytes == 1
        assert f"{low} B" in refused.value.message and f"{low - 1} B" in refused.value.message


@pytest.mark.parametrize("seed", [0, 3, 5, 8])
def test_same_input_same_plan_whatever_was_solved_before(seed: int) -> None:
    costs = costs_of_seed(seed)
    if seed not in feasible_seeds():
        return
    fresh, used = Solver(costs), Solver(costs)
    keys = [node.key.removeprefix("param:") for node in costs.space.graph.nodes]

    def pin_of(node: int) -> Pin:
        ref = TensorRef(node, 0)
        return Pin(where=keys[node], placements=costs.space.lattice(ref).placements(fresh.legal(ref)[-1]))

    for node in range(len(keys) - 1):
        try:
            used.solve((pin_of(node),))
            used.solve((pin_of(node), MemoryBudget(num_bytes=10**9)))
        except (InfeasibleError, InvalidConstraintError):
            continue
    try:
        expected = fresh.solve((pin_of(1),))
    except InfeasibleError:
        return
    found = used.solve((pin_of(1),))
    assert (found.strategy == expected.strategy).all() and found.shared == expected.shared
    assert found.report.objective_us == expected.report.objective_us
