"""The problem as an integer program in PuLP, solved by HiGHS: the definition of truth.

Data
    nodes v with strategies S_v: price c_v[s] in µs, memory b_v[s] in bytes
    edges e = (u, v) with distinct placements: strategy s of u has placement p = out_e(s), strategy t of v has q = in_e(t);
    r_e[p, q] µs is the price of the change from p to q, `inf` if impossible

Decision variables
    x[v, s] binary             node v uses strategy s (strategies that are ruled out have no variable)
    y[e, p, q] in [0, 1]       edge e changes p into q (continuous: it is integral whenever x is; impossible pairs have none)

Formulation
    min  sum c_v[s] x[v, s] + sum r_e[p, q] y[e, p, q]
    s.t. sum_s x[v, s] = 1                                      every node uses one strategy
         sum_q y[e, p, q] = sum over s with out_e(s) = p of x[u, s]     an edge leaves what its producer makes
         sum_p y[e, p, q] = sum over t with in_e(t) = q of x[v, t]      and arrives at what its consumer needs
         sum b_v[s] x[v, s] <= budget                           memory, in bytes

The memory row is divided by the greatest common divisor of all byte counts, so that it is a row of small integers and the
feasibility tolerance of the solver (1e-6) stays far below one byte unit.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp
from highspy import cb as highs_callbacks

from planner.errors import SolverError
from planner.solving.layout import Layout


@dataclass(frozen=True, eq=False)
class IlpResult:
    """`choice` (strategy per node) and `value_us` hold only with status `optimal` or `feasible`.

    status: `optimal` | `feasible` (stopped by time or cancelled, with a plan) | `infeasible` | `time_limit`
    (stopped without a plan).
    """

    status: str
    value_us: float
    bound_us: float
    choice: np.ndarray | None


@dataclass(frozen=True)
class Watch:
    """Who looks on while the solver runs. `cancelled` is polled; `tell` gets the value (`inf` without a plan) and the bound."""

    cancelled: Callable[[], bool] | None = None
    tell: Callable[[float, float], None] | None = None

    def shifted(self, constant_us: float) -> Watch:
        """The same for a part of a problem; the rest costs a constant."""
        tell = self.tell
        if tell is None:
            return self
        return Watch(self.cancelled, lambda value, bound: tell(value + constant_us, bound + constant_us))


STOPPED = ("Time limit reached", "Interrupted by user")
"""How HiGHS says that it ended before a proof."""


def count_columns(layout: Layout, cost_us: np.ndarray) -> int:
    """Variables the integer program would have: strategies left, plus possible pairs of placements per edge."""
    alive = np.isfinite(cost_us)
    total = int(alive.sum())
    for edge in range(layout.num_edges):
        us, vs = _distinct(layout, alive, edge)
        total += int(np.isfinite(layout.table_of(edge)[np.ix_(us, vs)]).sum())
    return total


def solve_ilp(
    layout: Layout,
    cost_us: np.ndarray,
    *,
    num_bytes: np.ndarray | None = None,
    budget_bytes: int | None = None,
    time_limit_s: float = 60.0,
    gap_us: float = 1e-6,
    watch: Watch | None = None,
) -> IlpResult:
    """State and solve. `cost_us` is flat over strategies, `inf` = ruled out (that is how pins and fixings arrive).

    `gap_us` is the absolute difference of value and bound at which the solver may stop. A cancelled solve ends like one that
    runs out of time.
    """
    if any(not np.isfinite(cost_us[layout.span(node)]).any() for node in range(layout.num_nodes)):
        return IlpResult("infeasible", np.inf, np.inf, None)
    if time_limit_s <= 0.0:
        return IlpResult("time_limit", np.inf, -np.inf, None)
    program = pulp.LpProblem("plan", pulp.LpMinimize)
    x = _strategy_variables(program, layout, cost_us)
    priced = [(x[at], float(cost_us[at])) for at in sorted(x)]
    for node in range(layout.num_nodes):
        program.addConstraint(_equals([(x[at], 1.0) for at in _members(layout, x, node)], 1.0), f"one_{node}")
    for edge in range(layout.num_edges):
        priced += _state_edge(program, layout, x, edge)
    if budget_bytes is not None:
        assert num_bytes is not None, "a budget needs the bytes per strategy"
        _state_budget(program, layout, x, num_bytes, budget_bytes)
    program.setObjective(pulp.LpAffineExpression(priced))
    solver = _QuietHighs(
        msg=False, timeLimit=time_limit_s, gapRel=0.0, gapAbs=gap_us, threads=1, **({} if watch is None else _listening(watch))
    )  # fmt: skip
    try:
        program.solve(solver)
    except pulp.PulpError as error:
        raise SolverError(f"the integer program could not be solved: {error}", hint="Solve without the exact step.") from error
    return _read(program, layout, x, cost_us, num_bytes, budget_bytes)


class _QuietHighs(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS 1.16 prints a banner when its first object of a process is made, before any option can be set."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        sys.stdout.flush()
        kept = os.dup(1)
        try:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            super().createAndConfigureSolver(lp)
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _listening(watch: Watch) -> dict[str, Any]:
    """Arguments that make HiGHS report and stop."""
    kinds = highs_callbacks.HighsCallbackType
    active = [kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt, kinds.kCallbackMipLogging]

    def listen(kind: Any, message: str, out: Any, into: Any, user: Any) -> None:
        if kind == kinds.kCallbackMipLogging:
            if watch.tell is not None:
                watch.tell(float(out.mip_primal_bound), float(out.mip_dual_bound))
        elif watch.cancelled is not None and watch.cancelled():
            into.user_interrupt = True

    return {"callbackTuple": (listen, None), "callbacksToActivate": active}


def _strategy_variables(program: pulp.LpProblem, layout: Layout, cost_us: np.ndarray) -> dict[int, pulp.LpVariable]:
    return {int(at): program.add_variable(f"x_{at}", 0, 1, pulp.LpBinary) for at in np.flatnonzero(np.isfinite(cost_us))}


def _members(layout: Layout, x: dict[int, pulp.LpVariable], node: int) -> list[int]:
    span = layout.span(node)
    return [at for at in range(span.start, span.stop) if at in x]


def _equals(terms: list[tuple[pulp.LpVariable, float]], right: float) -> pulp.LpConstraint:
    return pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintEQ, rhs=right)


def _distinct(layout: Layout, alive: np.ndarray, edge: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct placements that living strategies have at the two ends."""
    port_u, port_v = layout.ports(edge)
    u, v = int(layout.edge_u[edge]), int(layout.edge_v[edge])
    return np.unique(port_u[alive[layout.span(u)]]), np.unique(port_v[alive[layout.span(v)]])


def _state_edge(
    program: pulp.LpProblem, layout: Layout, x: dict[int, pulp.LpVariable], edge: int
) -> list[tuple[pulp.LpVariable, float]]:
    """Pair variables of an edge with their two families of marginal equalities. -> objective terms"""
    port_u, port_v = layout.ports(edge)
    members_u = _members(layout, x, int(layout.edge_u[edge]))
    members_v = _members(layout, x, int(layout.edge_v[edge]))
    first_u, first_v = layout.first[layout.edge_u[edge]], layout.first[layout.edge_v[edge]]
    at_p: dict[int, list[int]] = {}
    at_q: dict[int, list[int]] = {}
    for at in members_u:
        at_p.setdefault(int(port_u[at - first_u]), []).append(at)
    for at in members_v:
        at_q.setdefault(int(port_v[at - first_v]), []).append(at)
    table = layout.table_of(edge)
    y = {
        (p, q): program.add_variable(f"y_{edge}_{p}_{q}", 0, 1)
        for p in at_p
        for q in at_q
        if math.isfinite(table[p, q])
    }  # fmt: skip
    for p, sources in at_p.items():
        terms = [(y[p, q], 1.0) for q in at_q if (p, q) in y] + [(x[at], -1.0) for at in sources]
        program.addConstraint(_equals(terms, 0.0), f"leave_{edge}_{p}")
    for q, targets in at_q.items():
        terms = [(y[p, q], 1.0) for p in at_p if (p, q) in y] + [(x[at], -1.0) for at in targets]
        program.addConstraint(_equals(terms, 0.0), f"arrive_{edge}_{q}")
    return [(variable, float(table[pair])) for pair, variable in y.items()]


def _state_budget(
    program: pulp.LpProblem, layout: Layout, x: dict[int, pulp.LpVariable], num_bytes: np.ndarray, budget_bytes: int
) -> None:
    """Bytes above each node's least, in units of their common divisor."""
    extra: dict[int, int] = {}
    least_total = 0
    for node in range(layout.num_nodes):
        members = _members(layout, x, node)
        least = min(round(num_bytes[at]) for at in members)
        least_total += least
        extra |= {at: round(num_bytes[at]) - least for at in members}
    unit = math.gcd(*extra.values()) or 1
    terms = [(x[at], float(value // unit)) for at, value in extra.items() if value]
    row = pulp.LpConstraint(
        pulp.LpAffineExpression(terms), pulp.LpConstraintLE, rhs=float((budget_bytes - least_total) // unit)
    )  # fmt: skip
    program.addConstraint(row, "memory")


def _read(
    program: pulp.LpProblem,
    layout: Layout,
    x: dict[int, pulp.LpVariable],
    cost_us: np.ndarray,
    num_bytes: np.ndarray | None,
    budget_bytes: int | None,
) -> IlpResult:
    """Look at the status first: PuLP calls a time-out without a solution `Optimal`, so HiGHS itself is asked."""
    highs = program.solverModel
    verdict = highs.modelStatusToString(highs.getModelStatus())
    info = highs.getInfo()
    if verdict in ("Infeasible", "Primal infeasible or unbounded"):
        return IlpResult("infeasible", np.inf, np.inf, None)
    if verdict not in ("Optimal", *STOPPED):
        raise SolverError(f"HiGHS stopped with status {verdict!r}", hint="Solve without the exact step.")
    bound = float(info.mip_dual_bound) if verdict in STOPPED or x else float(info.objective_function_value)
    if info.primal_solution_status != 2:  # kSolutionStatusFeasible
        return IlpResult("time_limit", np.inf, bound, None)
    choice = np.zeros(layout.num_nodes, np.int64)
    for node in range(layout.num_nodes):
        members = _members(layout, x, node)
        choice[node] = max(members, key=lambda at: x[at].varValue or 0.0) - layout.first[node]
    value = _price(layout, cost_us, choice)
    over = budget_bytes is not None and num_bytes is not None and _bytes(layout, num_bytes, choice) > budget_bytes
    if not math.isfinite(value) or over:
        raise SolverError(
            "the integer solution does not satisfy the constraints after rounding", hint="Loosen the budget a little."
        )
    return IlpResult("optimal" if verdict == "Optimal" else "feasible", value, bound, choice)


def _price(layout: Layout, cost_us: np.ndarray, choice: np.ndarray) -> float:
    total = float(cost_us[layout.first[:-1] + choice].sum())
    for edge in range(layout.num_edges):
        port_u, port_v = layout.ports(edge)
        total += float(layout.table_of(edge)[port_u[choice[layout.edge_u[edge]]], port_v[choice[layout.edge_v[edge]]]])
    return total


def _bytes(layout: Layout, num_bytes: np.ndarray, choice: np.ndarray) -> int:
    return round(float(num_bytes[layout.first[:-1] + choice].sum()))
