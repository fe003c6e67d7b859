"""Every kind of constraint against brute force on random small training steps: value, bound, what holds, conflicts, undo."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest

from planner.constraint import (
    Allow,
    BoundaryPlacement,
    Constraint,
    Forbid,
    ForbidCollective,
    MemoryBudget,
    Pin,
    SamePlacement,
    holds,
)
from planner.cost import CostTable
from planner.dims import DimRoles
from planner.errors import InfeasibleError, InvalidConstraintError
from planner.graph import TensorRef
from planner.recipes import RECIPES, Expansion, Recipe
from planner.solving.assemble import facts_of
from planner.solving.conflicts import living
from planner.solving.demands import demands_of
from planner.solving.ilp import solve_ilp
from planner.solving.restrictions import restrict
from planner.solving.solve import Solver
from tests.oracles.brute_force import BestPlan, brute_force
from tests.oracles.small_spaces import random_costs

SEEDS = tuple(range(30))
RELATIVE = 2e-6
Accept = Callable[[tuple[int, ...]], bool]


@cache
def costs_of_seed(seed: int) -> CostTable:
    return random_costs(seed, num_ops=4)


@cache
def free_of_seed(seed: int) -> BestPlan:
    return brute_force(costs_of_seed(seed))


def where_of(costs: CostTable, node: int) -> str:
    return costs.space.graph.nodes[node].key.removeprefix("param:")


def codes(costs: CostTable, node: int, choice: tuple[int, ...]) -> tuple[int, ...]:
    lattice = costs.space.lattice(TensorRef(node, 0))
    return tuple(lattice.codes[costs.space.strategies[node].output(0)[choice[node]]].tolist())


def in_masks(masks: dict[int, np.ndarray], choice: tuple[int, ...]) -> bool:
    return all(mask[choice[node]] for node, mask in masks.items())


class Random:
    """A random constraint of each kind, and what it means for brute force, in code of its own."""

    def __init__(self, costs: CostTable, rng: np.random.Generator) -> None:
        self.costs, self.rng = costs, rng
        self.nodes = [i for i, node in enumerate(costs.space.graph.nodes) if node.kind != "output"]

    def some_placements(self, node: int, count: int) -> list[int]:
        made = np.unique(self.costs.space.strategies[node].output(0))
        return [int(n) for n in self.rng.choice(made, min(count, len(made)), replace=False)]

    def options(self, count: int) -> tuple[int, list[int]]:
        node = int(self.rng.choice(self.nodes))
        return node, self.some_placements(node, count)

    def pin(self) -> tuple[Constraint, Accept]:
        node, (number,) = self.options(1)
        made = self.costs.space.strategies[node].output(0)
        lattice = self.costs.space.lattice(TensorRef(node, 0))
        return Pin(where=where_of(self.costs, node), placements=lattice.placements(number)), lambda c: made[c[node]] == number

    def boundary(self) -> tuple[Constraint, Accept]:
        node, (number,) = self.options(1)
        made = self.costs.space.strategies[node].output(0)
        lattice = self.costs.space.lattice(TensorRef(node, 0))
        found = BoundaryPlacement(where=where_of(self.costs, node), placements=lattice.placements(number))
        return found, lambda c: made[c[node]] == number

    def allow(self) -> tuple[Constraint, Accept]:
        node, numbers = self.options(2)
        made = self.costs.space.strategies[node].output(0)
        lattice = self.costs.space.lattice(TensorRef(node, 0))
        found = Allow(where=where_of(self.costs, node), options=tuple(lattice.placements(n) for n in numbers))
        return found, lambda c: made[c[node]] in numbers

    def forbid(self) -> tuple[Constraint, Accept]:
        node, numbers = self.options(1)
        made = self.costs.space.strategies[node].output(0)
        lattice = self.costs.space.lattice(TensorRef(node, 0))
        found = Forbid(where=where_of(self.costs, node), options=tuple(lattice.placements(n) for n in numbers))
        return found, lambda c: made[c[node]] not in numbers

    def tie(self) -> tuple[Constraint, Accept]:
        """All tensors whose key begins alike: parameters w*, or ops m*."""
        where, begins = [("w*", "param:w"), ("**/op/**", "m"), ("**/op/fwd#0", "m")][int(self.rng.integers(3))]
        keys = [node.key for node in self.costs.space.graph.nodes]
        tied = [i for i, key in enumerate(keys) if key.startswith(begins) and (not where.endswith("fwd#0") or "/fwd" in key)]
        return SamePlacement(where=where), lambda c: len({codes(self.costs, node, c) for node in tied}) == 1

    def recipe(self) -> tuple[Constraint, Accept]:
        """The first that this graph can have: dims have whatever roles they happen to have. Expansion is tested elsewhere."""
        names, roles = self.costs.space.mesh.axis_names, DimRoles.of(self.costs.space)
        every = [Recipe(name=name, axes=axes) for name in RECIPES for axes in dict.fromkeys([names, names[:1], names[-1:]])]
        for index in self.rng.permutation(len(every)):
            try:
                masks = Expansion(every[index], roles).masks()
            except InvalidConstraintError:
                continue
            if masks:
                return every[index], partial(in_masks, masks)
        raise InvalidConstraintError("no recipe")


def implied(constraint: Constraint, costs: CostTable) -> list[tuple[str, str]]:
    if isinstance(constraint, ForbidCollective):
        return [(constraint.collective, constraint.axis)]
    return list(constraint.unused_collectives(costs.space.mesh)) if isinstance(constraint, Recipe) else []


def exact(solver: Solver, constraints: list[Constraint]) -> float:
    """The whole integer program of the problem that the constraints make."""
    demands = demands_of(constraints, solver.costs.space.mesh)
    variant = solver._variants.solver(demands)
    restrictions = [restrict(c, variant.costs, variant.problem) for c in constraints]
    alive = living(variant.problem, restrictions)
    assert alive is not None
    budgets = [r.budget_bytes for r in restrictions if r.budget_bytes is not None]
    cost = np.where(alive, variant.problem.unary_us, np.inf)
    found = solve_ilp(
        variant.problem.layout, cost, num_bytes=variant.problem.num_bytes, budget_bytes=min(budgets) if budgets else None
    )
    return found.value_us


def check(seed: int, constraints: list[Constraint], accepts: list[Accept], *, budget: float = math.inf) -> str:
    """-> `optimal` or `infeasible`, having compared both solvers with brute force."""
    costs = costs_of_seed(seed)
    forbidden = [pair for constraint in constraints for pair in implied(constraint, costs)]
    best = brute_force(costs, accept=partial(all_accept, accepts), forbidden=forbidden, budget_bytes=budget)
    solver = Solver(costs)
    free = solver.solve()
    if not math.isfinite(best.value_us):
        with pytest.raises(InfeasibleError) as refused:
            solver.solve(constraints)
        names = {c.describe() for c in constraints}
        assert refused.value.conflicts and set(refused.value.conflicts) <= names
        return "infeasible"
    found = solver.solve(constraints)
    assert found.report.status == "optimal"
    assert found.report.objective_us == pytest.approx(best.value_us, rel=RELATIVE)
    assert found.report.bound_us <= best.value_us * (1 + 1e-9)
    assert found.report.objective_us >= free.report.objective_us * (1 - 1e-9)
    assert exact(solver, constraints) == pytest.approx(best.value_us, rel=RELATIVE)
    facts = facts_of(costs, found)
    assert all(holds(constraint, facts) for constraint in constraints)
    assert all(accept(tuple(int(s) for s in found.strategy)) for accept in accepts)
    again = solver.solve()
    assert again.report.objective_us == free.report.objective_us and (again.strategy == free.strategy).all()
    return "optimal"


def all_accept(accepts: list[Accept], choice: tuple[int, ...]) -> bool:
    return all(accept(choice) for accept in accepts)


KINDS = ("pin", "boundary", "allow", "forbid", "tie", "recipe")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(kind: str) -> None:
    outcomes = []
    for seed in SEEDS:
        if not math.isfinite(free_of_seed(seed).value_us):
            continue
        try:
            constraint, accept = getattr(Random(costs_of_seed(seed), np.random.default_rng(seed)), kind)()
            outcomes.append(check(seed, [constraint], [accept]))
        except InvalidConstraintError:  # this graph cannot have it: the message is tested elsewhere
            outcomes.append("invalid")
    assert outcomes.count("optimal") >= 4, outcomes


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "*"])
def test_forbidden_collectives(collective: str) -> None:
    outcomes = []
    for seed in SEEDS:
        if math.isfinite(free_of_seed(seed).value_us):
            names = costs_of_seed(seed).space.mesh.axis_names
            axis = ("*", names[-1], "+".join(names))[seed % 3]
            outcomes.append(check(seed, [ForbidCollective(collective=collective, axis=axis)], []))
    assert outcomes.count("optimal") >= 6, outcomes


@pytest.mark.parametrize("seed", SEEDS)
def test_several_kinds_at_once_within_a_budget(seed: int) -> None:
    if not math.isfinite(free_of_seed(seed).value_us):
        return
    costs, rng = costs_of_seed(seed), np.random.default_rng(1000 + seed)
    made = Random(costs, rng)
    least, most = brute_force(costs, minimise_bytes=True).used_bytes, free_of_seed(seed).used_bytes
    budget = int(least + 0.7 * (most - least))
    constraints: list[Constraint] = [MemoryBudget(num_bytes=budget)]
    accepts: list[Accept] = []
    for kind in rng.choice(["pin", "allow", "forbid", "tie"], 2, replace=False):
        constraint, accept = getattr(made, kind)()
        constraints.append(constraint)
        accepts.append(accept)
    constraints.append(ForbidCollective(collective="all_to_all", axis="*"))
    try:
        check(seed, constraints, accepts, budget=budget)
    except InvalidConstraintError as refused:
        assert refused.hint  # a placement that no neighbour can serve


@pytest.mark.parametrize("seed", SEEDS[:16])
def test_conflicts_are_minimal(seed: int) -> None:
    """Leaving any one of the named constraints out gives a plan; with all of them there is none."""
    costs, rng = costs_of_seed(seed), np.random.default_rng(seed)
    if not math.isfinite(free_of_seed(seed).value_us):
        return
    made, solver = Random(costs, rng), Solver(costs)
    tried = 0
    for _ in range(12):
        pairs = [getattr(made, kind)() for kind in ("pin", "pin", "allow", "tie")]
        constraints = [constraint for constraint, _ in pairs] + [ForbidCollective(collective="*", axis="*")]
        accepts = {constraint.describe(): accept for constraint, accept in pairs}
        try:
            solver.solve(constraints)
        except InfeasibleError as refused:
            named = refused.conflicts
        except InvalidConstraintError:
            continue
        else:
            continue
        tried += 1
        for left_out in (None, *named):
            kept = [name for name in named if name != left_out]
            best = brute_force(
                costs,
                accept=partial(all_accept, [accepts[name] for name in kept if name in accepts]),
                forbidden=[("*", "*")] if "forbid *@*" in kept else [],
            )
            assert math.isfinite(best.value_us) == (left_out is not None), (named, left_out)
        if tried == 2:
            break
