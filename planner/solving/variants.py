"""Solvers of the same prices with other demands (ties, forbidden collectives): each is a problem of its own, kept warm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.constraint import Constraint
from planner.errors import InfeasibleError, InvalidConstraintError
from planner.solving.conflicts import explain_together, is_impossible
from planner.solving.demands import Demand, demands_of

if TYPE_CHECKING:
    from planner.solving.solve import Solution, Solver

_KEPT = 3


class Variants:
    """The solvers beside `root`, which has the demands `own` (usually none)."""

    def __init__(self, root: Solver, own: tuple[Demand, ...]) -> None:
        self.root = root
        self.own = own
        self._solvers: dict[tuple[Demand, ...], Solver] = {}

    def solver(self, demands: tuple[Demand, ...]) -> Solver:
        """
        Raises:
            InfeasibleError: the demands alone leave no plan.
        """
        if demands == self.own:
            return self.root
        found = self._solvers.pop(demands, None) or type(self.root)(self.root.costs, demands)
        self._solvers[demands] = found
        while len(self._solvers) > _KEPT:
            del self._solvers[next(iter(self._solvers))]
        return found

    def solve(self, demands: tuple[Demand, ...], constraints: Sequence[Constraint], **how: object) -> Solution:
        """As `Solver.solve`; if there is no plan, the smallest conflicting set is looked for among all constraints."""
        for constraint in constraints:
            self.root.restrict(constraint)  # what is wrong by itself is said so
        try:
            return self.solver(demands).solve(constraints, **how)  # type: ignore[arg-type]
        except (InfeasibleError, InvalidConstraintError) as error:
            raise explain_together(constraints, self.is_impossible, error) from error

    def is_impossible(self, constraints: Sequence[Constraint]) -> bool:
        """Proved that no plan satisfies these constraints together."""
        try:
            solver = self.solver(demands_of(constraints, self.root.costs.space.mesh))
            restrictions = [solver.restrict(c) for c in constraints]
        except (InfeasibleError, InvalidConstraintError):
            return True
        return is_impossible(solver.problem, restrictions)
