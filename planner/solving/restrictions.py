"""What a constraint rules out: masks over the strategies of problem nodes, and refusals that say why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.address import resolve
from planner.constraint import (
    ANY,
    Allow,
    BoundaryPlacement,
    Constraint,
    Forbid,
    ForbidCollective,
    MemoryBudget,
    Pin,
    ReshardAfterForward,
    SamePlacement,
)
from planner.cost import CostTable
from planner.dims import DimRoles
from planner.errors import InvalidConstraintError
from planner.graph import TensorRef
from planner.placement import text
from planner.recipes import Expansion, Recipe
from planner.solving.legality import outside_lattice, sample_dim
from planner.solving.problem import PairwiseProblem

_LISTED = 20
"""How many legal placements or reasons an error lists."""


@dataclass(frozen=True, eq=False)
class Restriction:
    """One constraint of the user as the solver sees it.

    Attributes:
        constraint: what the user said; its `describe()` is how errors name it.
        masks: problem node -> bool over its strategies, False = ruled out.
        budget_bytes: a bound on the sum of bytes, None for placements.
    """

    constraint: Constraint
    masks: Mapping[int, np.ndarray]
    budget_bytes: int | None = None

    @property
    def text(self) -> str:
        return self.constraint.describe()


def restrict(constraint: Constraint, costs: CostTable, problem: PairwiseProblem) -> Restriction:
    """Resolve a constraint on this problem.

    Raises:
        InvalidConstraintError: it matches nothing, asks for a placement that cannot exist, or for one that no strategy has.
    """
    if isinstance(constraint, MemoryBudget):
        if constraint.num_bytes <= 0:
            raise InvalidConstraintError(
                f"a memory budget of {constraint.num_bytes} bytes holds nothing", hint="Give a size such as 80GiB."
            )
        return Restriction(constraint, {}, constraint.num_bytes)
    if isinstance(constraint, ForbidCollective | SamePlacement):
        _check_demand(constraint, costs)
        return Restriction(constraint, {})  # it is in the prices or the edges of the problem itself
    if isinstance(constraint, Recipe):
        return _on_nodes(constraint, Expansion(constraint, DimRoles.of(costs.space)).masks(), problem)
    if isinstance(constraint, ReshardAfterForward):
        return _on_nodes(constraint, constraint.masks(costs.space), problem)
    _check_length(constraint, costs)
    masks: dict[int, np.ndarray] = {}
    for ref in resolve(constraint.where, costs.space.graph):
        node = int(problem.node_of[ref.node])
        mask = (
            _choose(constraint, ref, costs, problem)
            if isinstance(constraint, Allow | Forbid)
            else _mask(constraint, ref, costs, problem)
        )
        masks[node] = masks[node] & mask if node in masks else mask
    return Restriction(constraint, masks)


def _check_demand(demand: ForbidCollective | SamePlacement, costs: CostTable) -> None:
    if isinstance(demand, SamePlacement):
        resolve(demand.where, costs.space.graph)
    elif demand.axis != ANY:
        for name in demand.axis.split("+"):
            costs.space.mesh.axis(name)


def _check_length(constraint: Pin | BoundaryPlacement | Allow | Forbid, costs: CostTable) -> None:
    mesh = costs.space.mesh
    for placements in constraint.options if isinstance(constraint, Allow | Forbid) else (constraint.placements,):
        if len(placements) != mesh.num_axes:
            raise InvalidConstraintError(
                f"{constraint.describe()}: {len(placements)} placements for the {mesh.num_axes} axes of mesh {mesh}",
                hint="Write one placement per mesh axis, outermost first.",
            )


def _on_nodes(constraint: Constraint, of_nodes: Mapping[int, np.ndarray], problem: PairwiseProblem) -> Restriction:
    """`of_nodes`: graph node -> bool over all its strategies."""
    masks: dict[int, np.ndarray] = {}
    for node, mask in of_nodes.items():
        at = int(problem.node_of[node])
        masks[at] = mask[problem.numbers_at(at)]
    return Restriction(constraint, masks)


def _choose(constraint: Allow | Forbid, ref: TensorRef, costs: CostTable, problem: PairwiseProblem) -> np.ndarray:
    """One of several placements, or none of them. Of the options it is enough that one is possible."""
    lattice, key = costs.space.lattice(ref), costs.space.graph.nodes[ref.node].key
    wanted = [lattice.find(option) for option in constraint.options]
    made = costs.space.strategies[ref.node].output(ref.output)[problem.numbers_at(int(problem.node_of[ref.node]))]
    mask = np.isin(made, [number for number in wanted if number >= 0])
    if isinstance(constraint, Forbid):
        mask = ~mask
    if not mask.any():
        left = "none of these is among its placements" if isinstance(constraint, Allow) else "it has no other placement"
        raise InvalidConstraintError(
            f"{constraint.describe()}: {key} ({lattice.meta}): {left}", hint=_legal_hint(ref, costs, problem)
        )
    return mask


def legal_numbers(ref: TensorRef, costs: CostTable, problem: PairwiseProblem) -> np.ndarray:
    """Placement numbers that some surviving strategy of the producer gives the tensor, ascending."""
    kept = problem.numbers_at(int(problem.node_of[ref.node]))
    return np.unique(costs.space.strategies[ref.node].output(ref.output)[kept])


def _mask(constraint: Pin | BoundaryPlacement, ref: TensorRef, costs: CostTable, problem: PairwiseProblem) -> np.ndarray:
    lattice, key = costs.space.lattice(ref), costs.space.graph.nodes[ref.node].key
    number = lattice.find(constraint.placements)
    if number < 0:
        why = "; ".join(r.text for r in outside_lattice(lattice, constraint.placements, sample_dim(ref, costs.space)))
        raise InvalidConstraintError(
            f"{constraint.describe()}: {key} ({lattice.meta}) cannot be {text(constraint.placements)}: {why}",
            hint=_legal_hint(ref, costs, problem),
        )
    kept = problem.numbers_at(int(problem.node_of[ref.node]))
    mask = costs.space.strategies[ref.node].output(ref.output)[kept] == number
    if not mask.any():
        reasons = _banned(ref, costs)
        raise InvalidConstraintError(
            f"{constraint.describe()}: no strategy of {key} that its neighbours can serve gives {text(constraint.placements)}"
            + (f" (ruled out by shape or size: {'; '.join(reasons)})" if reasons else ""),
            hint=_legal_hint(ref, costs, problem),
        )
    return mask


def _legal_hint(ref: TensorRef, costs: CostTable, problem: PairwiseProblem) -> str:
    lattice, numbers = costs.space.lattice(ref), legal_numbers(ref, costs, problem)
    listed = ", ".join(lattice.text(int(number)) for number in numbers[:_LISTED])
    more = f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else ""
    return f"Legal placements on {costs.space.mesh}: {listed}{more}."


def _banned(ref: TensorRef, costs: CostTable) -> Sequence[str]:
    names = costs.space.mesh.axis_names
    rows = costs.space.strategies[ref.node].banned[:_LISTED]
    return [f"{row.row} on {names[row.axis]}: {row.reason}" for row in rows]


def tightest_budget(restrictions: Sequence[Restriction]) -> Restriction | None:
    budgets = [r for r in restrictions if r.budget_bytes is not None]
    return min(budgets, key=lambda r: r.budget_bytes if r.budget_bytes is not None else math.inf, default=None)
