"""What to give up when constraints cannot hold together: for each member of the conflict, the best plan without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from planner.constraint import Constraint
from planner.errors import InfeasibleError, InvalidConstraintError, SolverError
from planner.reasons import IMPOSSIBLE, UNDECIDED, Relaxation

if TYPE_CHECKING:
    from planner.solving.solve import Solver


def relaxations(
    solver: Solver,
    constraints: Sequence[Constraint],
    conflicts: Sequence[str] | None = None,
    *,
    time_limit_s: float = 60.0,
    cancelled: Callable[[], bool] | None = None,
) -> tuple[Relaxation, ...]:
    """One entry per member of the conflict, cheapest first; empty if the constraints can hold.

    `conflicts` are the names in an `InfeasibleError` met before; without them the conflict is looked for.
    """
    deadline = time.monotonic() + time_limit_s
    if conflicts is None:
        try:
            solver.solve(constraints, exact=False, time_limit_s=time_limit_s, cancelled=cancelled)
        except InfeasibleError as error:
            conflicts = error.conflicts
        else:
            return ()
    members = [c for c in dict.fromkeys(constraints) if c.describe() in conflicts]
    found = [_without(solver, member, constraints, deadline, cancelled) for member in members]
    order = {UNDECIDED: 1, IMPOSSIBLE: 2}
    return tuple(sorted(found, key=lambda r: (order.get(r.status, 0), r.objective_us or 0.0)))


def _without(
    solver: Solver,
    member: Constraint,
    constraints: Sequence[Constraint],
    deadline: float,
    cancelled: Callable[[], bool] | None,
) -> Relaxation:
    name, rest = member.describe(), [c for c in constraints if c != member]
    left = deadline - time.monotonic()
    if left <= 0.0 or (cancelled is not None and cancelled()):
        return Relaxation(constraint=name, status=UNDECIDED)
    try:
        solution = solver.solve(rest, exact=False, time_limit_s=left, cancelled=cancelled)
    except InfeasibleError as error:
        return Relaxation(constraint=name, status=IMPOSSIBLE, conflicts=error.conflicts)
    except InvalidConstraintError as error:  # one of the others cannot be had by itself
        return Relaxation(constraint=name, status=IMPOSSIBLE, conflicts=(error.message,))
    except SolverError:
        return Relaxation(constraint=name, status=UNDECIDED)
    report = solution.report
    return Relaxation(
        constraint=name, status=report.status, objective_us=report.objective_us, bound_us=report.bound_us,
        peak_bytes=solution.used_bytes,
    )  # fmt: skip
