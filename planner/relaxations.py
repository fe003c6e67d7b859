"""What to give up when constraints cannot hold together: for each member of the conflict, the best plan without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from planner.constraint import Constraint
from planner.errors import InfeasibleError, InvalidConstraintError, SolverError
from planner.reasons import IMPOSSIBLE, UNDECIDED, Relaxation

if TYPE_CHECKING:
    from planner.plan import Plan
    from planner.workbench import Workbench

Solve = Callable[[Sequence[Constraint], float], "Plan"]
"""The best plan under constraints, within so many seconds."""


def relaxations(
    bench: Workbench,
    constraints: Sequence[Constraint],
    conflicts: Sequence[str] | None = None,
    *,
    checkpoint: str = "none",
    time_limit_s: float = 60.0,
    cancelled: Callable[[], bool] | None = None,
    row: Callable[[Relaxation], None] | None = None,
) -> tuple[Relaxation, ...]:
    """One entry per member of the conflict, cheapest first; empty if the constraints can hold.

    `conflicts` are the names in an `InfeasibleError` met before; without them the conflict is looked for. `checkpoint` as in
    `Workbench.solve`; `row` is told each entry as it is found.
    """

    def solve(under: Sequence[Constraint], seconds: float) -> Plan:
        return bench.solve(under, exact=False, time_limit_s=seconds, checkpoint=checkpoint, cancelled=cancelled)

    deadline = time.monotonic() + time_limit_s
    if conflicts is None:
        try:
            solve(constraints, time_limit_s)
        except InfeasibleError as error:
            conflicts = error.conflicts
        else:
            return ()
    found: list[Relaxation] = []
    for member in dict.fromkeys(constraints):
        if member.describe() in conflicts:
            left = 0.0 if cancelled is not None and cancelled() else deadline - time.monotonic()
            found.append(_without(solve, member, [c for c in constraints if c != member], left))
            if row is not None:
                row(found[-1])
    order = {UNDECIDED: 1, IMPOSSIBLE: 2}
    return tuple(sorted(found, key=lambda r: (order.get(r.status, 0), r.objective_us or 0.0)))


def _without(solve: Solve, member: Constraint, rest: Sequence[Constraint], seconds: float) -> Relaxation:
    name = member.describe()
    if seconds <= 0.0:
        return Relaxation(constraint=name, status=UNDECIDED)
    try:
        plan = solve(rest, seconds)
    except InfeasibleError as error:
        return Relaxation(constraint=name, status=IMPOSSIBLE, conflicts=error.conflicts)
    except InvalidConstraintError as error:  # one of the others cannot be had by itself
        return Relaxation(constraint=name, status=IMPOSSIBLE, conflicts=(error.message,))
    except SolverError:
        return Relaxation(constraint=name, status=UNDECIDED)
    return Relaxation(
        constraint=name, status=plan.report.status, objective_us=plan.objective_us, bound_us=plan.report.bound_us,
        peak_bytes=plan.memory.peak_bytes,
    )  # fmt: skip
