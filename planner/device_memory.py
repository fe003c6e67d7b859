"""A plan that fits the device with everything that is alive at once, not only in what its memory budget counts.

The budget bounds parameters, gradients, optimizer state and what is kept for backward, which are linear in the decisions.
Temporaries, other gathered parameters, communicators and the driver come on top and are known only for a finished plan
(`costing/live_memory.py`).
If a plan needs more than the device has, the budget is tightened by what is missing and the plan is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.constraint import Constraint, MemoryBudget
from planner.errors import InfeasibleError, SolverError
from planner.plan import Plan
from planner.units import format_gib

ROUNDS = 6

Solve = Callable[[tuple[Constraint, ...]], Plan]
Missing = Callable[[Plan], int]
"""Bytes that the device lacks for a plan, 0 if it fits."""


def solve_to_fit(solve: Solve, missing_bytes: Missing, constraints: tuple[Constraint, ...]) -> Plan:
    """The plan under `constraints`, whose memory budget is tightened until the plan fits the device. Its constraints have the
    budget that it was made with, for which its bound holds, and its method says what was done.

    If no tighter budget has a plan, it is the plan that lacks least, and its method says how much that is.

    Raises:
        PlannerError: as `solve` under the constraints as given.
    """
    plan = solve(constraints)
    given = next((c.num_bytes for c in constraints if isinstance(c, MemoryBudget)), None)
    if given is None:
        return plan
    best, least = plan, missing_bytes(plan)
    missing, budget = least, given
    for _ in range(ROUNDS):
        budget = min(budget, plan.memory.peak_bytes) - missing
        if not missing or budget <= 0:
            break
        try:
            plan = solve(tuple(MemoryBudget(num_bytes=budget) if isinstance(c, MemoryBudget) else c for c in constraints))
        except (InfeasibleError, SolverError):
            break  # too little memory for any plan, or for one in time: what was found stays, and says what it lacks
        missing = missing_bytes(plan)
        if missing < least:
            best, least = plan, missing
    return _told(best, given, least)


def _told(plan: Plan, given: int, missing: int) -> Plan:
    budget = next(c.num_bytes for c in plan.constraints if isinstance(c, MemoryBudget))
    notes = []
    if budget < given:
        change = f"memory budget tightened from {format_gib(given)} to {format_gib(budget)}"
        notes.append(f"{change}, because temporaries and reserve come on top")
    if missing:
        notes.append(f"does not fit the device: {format_gib(missing)} too much with temporaries and reserve")
    if not notes:
        return plan
    return replace(plan, report=replace(plan.report, method="; ".join((plan.report.method, *notes))))
