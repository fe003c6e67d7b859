"""When nothing satisfies all constraints: whether that is so, and the smallest set of them that cannot hold together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from planner.constraint import Constraint
from planner.errors import InfeasibleError, PlannerError, SolverError
from planner.solving.consistency import make_consistent
from planner.solving.core import solve_core
from planner.solving.least_memory import LeastMemory, least_memory
from planner.solving.message_passing import Effort, MessagePassing
from planner.solving.problem import PairwiseProblem
from planner.solving.restrictions import Restriction, tightest_budget
from planner.units import format_gib

_EFFORT = Effort(max_sweeps=60, patience=2)
_MAX_COLUMNS = 200_000
_TRY_S = 10.0


def living(problem: PairwiseProblem, restrictions: Sequence[Restriction]) -> np.ndarray | None:
    """bool, flat: strategies that the restrictions and their neighbours leave; None if some node has none."""
    alive = np.ones(problem.num_strategies, np.bool_)
    changed = []
    for restriction in restrictions:
        for node, mask in restriction.masks.items():
            alive[problem.layout.span(node)] &= mask
            changed.append(node)
    emptied = make_consistent(problem.layout, alive, np.unique(np.array(changed, np.int64)))
    return None if emptied >= 0 else alive


def has_plan(problem: PairwiseProblem, alive: np.ndarray | None, *, time_limit_s: float) -> bool | None:
    """Whether any choice among the living strategies has a finite price; None if it could not be settled in time."""
    if alive is None:
        return False
    solver = MessagePassing(problem)
    solver.set_costs(np.where(alive, problem.unary_us, np.inf))
    if math.isfinite(solver.run(_EFFORT).value_us):
        return True
    found = solve_core(
        problem.layout,
        np.where(alive, 0.0, np.inf),
        problem.num_bytes,
        budget_bytes=None,
        max_columns=_MAX_COLUMNS,
        time_limit_s=time_limit_s,
        gap_us=1.0,
    )
    if found is None or found.status == "time_limit":
        return None
    return found.choice is not None


def smallest_conflict(
    restrictions: Sequence[Restriction], is_impossible: Callable[[Sequence[Restriction]], bool]
) -> list[Restriction]:
    """Deletion filter: leave out one after another, keep it out if the rest still cannot hold. What stays is minimal."""
    kept = list(restrictions)
    for candidate in restrictions:
        rest = [r for r in kept if r is not candidate]
        if is_impossible(rest):
            kept = rest
    return kept


def explain_placements(problem: PairwiseProblem, restrictions: Sequence[Restriction], *, time_limit_s: float) -> InfeasibleError:
    """The error for pins and boundaries that cannot hold together. The fast test narrows first, the solver finishes."""
    placed = [r for r in restrictions if r.masks]

    def no_strategies(subset: Sequence[Restriction]) -> bool:
        return living(problem, subset) is None

    def no_plan(subset: Sequence[Restriction]) -> bool:
        return has_plan(problem, living(problem, subset), time_limit_s=time_limit_s) is False

    conflict = smallest_conflict(placed, no_strategies if no_strategies(placed) else no_plan)
    names = [r.text for r in conflict]
    what = f"{names[0]} has no plan" if len(names) == 1 else f"these cannot hold together: {'; '.join(names)}"
    return InfeasibleError(what, hint="Remove or change one of them.", conflicts=names)


def is_impossible(problem: PairwiseProblem, restrictions: Sequence[Restriction]) -> bool:
    """Proved: nothing satisfies the restrictions, or nothing within the budget among them."""
    alive = living(problem, restrictions)
    if has_plan(problem, alive, time_limit_s=_TRY_S) is False:
        return True
    budget = tightest_budget(restrictions)
    if budget is None or budget.budget_bytes is None or alive is None:
        return False
    return least_memory(problem, alive, _EFFORT).bound_bytes > budget.budget_bytes


def explain_together(
    constraints: Sequence[Constraint], no_plan: Callable[[Sequence[Constraint]], bool], error: PlannerError
) -> InfeasibleError:
    """The error for constraints of which some change the problem itself: the smallest set of them, each in the user's words."""
    kept = list(constraints)
    for candidate in constraints:
        rest = [c for c in kept if c is not candidate]
        if no_plan(rest):
            kept = rest
    names = [c.describe() for c in kept]
    shortfall = error.shortfall_bytes if isinstance(error, InfeasibleError) else None
    what = f"{names[0]} has no plan" if len(names) == 1 else f"these cannot hold together: {'; '.join(names)}"
    if shortfall is not None:
        what = f"{error.message} ({what})"
    return InfeasibleError(what, hint="Remove or change one of them.", conflicts=names, shortfall_bytes=shortfall)


def least_memory_of(problem: PairwiseProblem, restrictions: Sequence[Restriction], effort: Effort) -> LeastMemory | None:
    """The least memory under the placements demanded, proved if it can be; None if there is no plan at all."""
    alive = living(problem, restrictions)
    if alive is None:
        return None
    found = least_memory(problem, alive, effort)
    return found if math.isfinite(found.num_bytes) or found.bound_bytes < math.inf else None


def explain_budget(
    problem: PairwiseProblem, restrictions: Sequence[Restriction], least: LeastMemory, effort: Effort
) -> InfeasibleError:
    """The error for a budget under the least memory, naming the pins that make it so."""
    budget = tightest_budget(restrictions)
    if budget is None or budget.budget_bytes is None:
        raise SolverError("a budget error without a budget")
    limit = budget.budget_bytes

    def too_big(subset: Sequence[Restriction]) -> bool:
        found = least_memory_of(problem, subset, effort)
        return found is None or found.bound_bytes > limit

    placed = [r for r in restrictions if r.masks]
    conflict = smallest_conflict(placed, too_big)
    shortfall = round(least.bound_bytes) - limit
    at_least = "" if least.proved else "at least "
    kept = [f"{r.text} keeps {held} B on a device" for r in conflict if (held := _held_bytes(problem, r))]
    message = (
        f"the memory budget of {limit} B ({format_gib(limit)}) is {at_least}{shortfall} B short: "
        f"the least possible {'with these constraints ' if placed else ''}is {at_least}{round(least.bound_bytes)} B "
        f"({format_gib(least.bound_bytes)}) per device" + (f"; {'; '.join(kept)}" if kept else "")
    )
    hint = f"Give at least {round(least.bound_bytes)} B, use more devices, or make the batch or sequence smaller."
    names = [budget.text, *(r.text for r in conflict)]
    if conflict:
        hint = f"Remove one of {', '.join(r.text for r in conflict)}, or give at least {round(least.bound_bytes)} B."
    return InfeasibleError(message, hint=hint, conflicts=names, shortfall_bytes=shortfall)


def _held_bytes(problem: PairwiseProblem, restriction: Restriction) -> int:
    """Least bytes that the restricted nodes keep."""
    spans = [(problem.num_bytes[problem.layout.span(node)], mask) for node, mask in restriction.masks.items()]
    return round(sum(float(num_bytes[mask].min()) for num_bytes, mask in spans))
