"""Demands that change the problem itself rather than rule out strategies: collectives that must not be used, and ties.

A forbidden collective is taken out of the moves of every placement change, so that prices and ways are those of the best way
without it. A tie adds edges that only equal placements pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.address import resolve
from planner.constraint import Constraint, ForbidCollective, SamePlacement
from planner.cost import CostTable
from planner.graph import TensorRef
from planner.mesh import Mesh
from planner.recipes import Recipe
from planner.redistribution import MoveGroup, without

Demand = ForbidCollective | SamePlacement


def demands_of(constraints: Sequence[Constraint], mesh: Mesh) -> tuple[Demand, ...]:
    """The demands among constraints and those that recipes imply, once each."""
    found: list[Demand] = []
    for constraint in constraints:
        if isinstance(constraint, Recipe):
            found += [ForbidCollective(collective=kind, axis=axis) for kind, axis in constraint.unused_collectives(mesh)]
        elif isinstance(constraint, ForbidCollective | SamePlacement):
            found.append(replace(constraint, note=""))
    return tuple(dict.fromkeys(found))


def costs_under(costs: CostTable, constraints: Sequence[Constraint]) -> CostTable:
    """Prices and ways of placement changes without the collectives that the constraints forbid."""
    mesh = costs.space.mesh
    forbidden = [demand for demand in demands_of(constraints, mesh) if isinstance(demand, ForbidCollective)]
    if not forbidden:
        return costs

    def is_forbidden(group: MoveGroup) -> bool:
        return any(demand.forbids(None if group.kind is None else str(group.kind), group.axes, mesh) for demand in forbidden)

    return replace(
        costs,
        routes=tuple(without(routes, is_forbidden) for routes in costs.routes),
        routes_without_reduction={
            lattice: without(routes, is_forbidden) for lattice, routes in costs.routes_without_reduction.items()
        },
        routes_to_pending={lattice: without(routes, is_forbidden) for lattice, routes in costs.routes_to_pending.items()},
    )


def ties_of(costs: CostTable, demands: Sequence[Demand]) -> list[tuple[TensorRef, ...]]:
    """The tensors of each tie.

    Raises:
        InvalidConstraintError: a tie that matches nothing.
    """
    return [resolve(demand.where, costs.space.graph) for demand in demands if isinstance(demand, SamePlacement)]
