"""The memory budget: a price per byte (Lagrange multiplier) inside message passing, and the least memory possible.

For any price L >= 0 per byte, (bound of the problem with cost + L * bytes) - L * budget is a bound for every plan within the
budget. The best L lies where the cheapest plan changes from too big to fitting; it is found by secants between such plans.
Two plans are then mixed: where they differ in places that do not touch, each place can be switched by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.solving.core import solve_core
from planner.solving.layout import Layout
from planner.solving.message_passing import TOLERANCE, Effort, MessagePassing, Outcome
from planner.solving.problem import PairwiseProblem

CLOSE_ENOUGH = 1e-4
"""Relative gap at which the search for a better price per byte ends."""

_FIRST_STEP = 1.03
_MAX_PRICES = 14
_MAX_COLUMNS, _EXACT_S = 60_000, 10.0


@dataclass(frozen=True, eq=False)
class BudgetOutcome:
    """The best plan within the budget (`outcome.value_us` is `inf` if none was found), and where the search stood.

    Attributes:
        price: µs per byte with the best bound; 0 if the budget does not bind.
        too_big: a cheaper plan that does not fit (None if the budget does not bind), for a later start.
        offset_us: what the solver's own bound is above a bound for plans within the budget, at the solver's present prices.
    """

    outcome: Outcome
    price: float = 0.0
    too_big: np.ndarray | None = None
    offset_us: float = 0.0


@dataclass(frozen=True, eq=False)
class _Excess:
    """Bytes above each node's least living strategy, so that numbers stay small."""

    num_bytes: np.ndarray
    least_total: float

    @classmethod
    def of(cls, layout: Layout, cost_us: np.ndarray, num_bytes: np.ndarray) -> _Excess:
        living = np.where(np.isfinite(cost_us), num_bytes, np.inf)
        least = np.minimum.reduceat(living, layout.first[:-1])
        return cls(num_bytes - np.repeat(least, np.diff(layout.first)), float(least.sum()))


class BudgetSearch:
    """One search for the price per byte. `cost_us` are prices without memory, `inf` = ruled out."""

    def __init__(
        self, solver: MessagePassing, cost_us: np.ndarray, budget_bytes: int, effort: Effort, window: np.ndarray | None = None
    ) -> None:
        self.solver = solver
        self.window = window
        self.problem = solver.problem
        self.cost_us = cost_us
        self.budget_bytes = budget_bytes
        self.effort = effort
        self.excess = _Excess.of(solver.layout, cost_us, solver.problem.num_bytes)
        self.bound = -np.inf
        self.best_price = 0.0
        self.sweeps = 0
        self.fits: tuple[float, np.ndarray] | None = None
        self.too_big: tuple[float, np.ndarray] | None = None
        self.low, self.high = 0.0, math.inf

    def offer(self, choice: np.ndarray) -> bool:
        """Remember a plan if it is the best of its kind. -> it fits the budget"""
        value = self.value(choice)
        fits = self.problem.used_bytes(choice) <= self.budget_bytes
        if math.isfinite(value):
            if fits and (self.fits is None or value < self.fits[0]):
                self.fits = value, choice.copy()
            if not fits:
                self.too_big = value, choice.copy()
        return fits

    def value(self, choice: np.ndarray) -> float:
        lay = self.solver.layout
        return float(self.cost_us[lay.first[:-1] + choice].sum() + self.problem.edge_us(choice).sum())

    @property
    def gap(self) -> float:
        return math.inf if self.fits is None else (self.fits[0] - self.bound) / abs(self.fits[0] or 1.0)

    def evaluate(self, price: float) -> None:
        """Solve with this price per byte: a bound, a plan, and a narrower bracket."""
        self.solver.set_costs(self.cost_us + price * self.excess.num_bytes)
        starts = [plan[1] for plan in (self.fits, self.too_big) if plan is not None]
        values = [self.value(s) + price * self._excess_of(s) for s in starts]
        start = starts[int(np.argmin(values))] if starts else None
        found = self.solver.run(self.effort, start, self.window)
        self.sweeps += found.sweeps
        bound = found.bound_us - self.offset(price)
        if bound > self.bound:
            self.bound, self.best_price = bound, price
        if math.isfinite(found.value_us):
            if self.offer(found.choice):
                self.high = min(self.high, price)
            else:
                self.low = max(self.low, price)
        self.mix()

    def offset(self, price: float) -> float:
        return price * (self.budget_bytes - self.excess.least_total)

    def _excess_of(self, choice: np.ndarray) -> float:
        return float(self.excess.num_bytes[self.solver.layout.first[:-1] + choice].sum())

    def mix(self) -> None:
        """Switch the fitting plan to the cheaper, too big one wherever that pays and still fits."""
        if self.fits is None or self.too_big is None:
            return
        mixed = mix_plans(self.problem, self.cost_us, self.fits[1], self.too_big[1], self.budget_bytes)
        self.offer(mixed)

    def next_price(self, price: float) -> float | None:
        """The price at which the two best plans cost the same; None when nothing is left to try."""
        if math.isinf(self.high):
            return max(price * 4.0, 1e-12) if price > 0 else self._first_guess()
        if self.fits is not None and self.too_big is not None:
            saved = self.problem.used_bytes(self.too_big[1]) - self.problem.used_bytes(self.fits[1])
            secant = (self.fits[0] - self.too_big[0]) / max(saved, 1)
            width = self.high - self.low
            if self.low + 0.05 * width < secant < self.high - 0.05 * width:
                return secant
        middle = 0.5 * (self.low + self.high)
        return middle if self.high - self.low > 1e-6 * self.high else None

    def _first_guess(self) -> float:
        total = abs(self.bound) if math.isfinite(self.bound) else 1.0
        return total / max(self.budget_bytes, 1) * 0.1

    def result(self) -> BudgetOutcome:
        if self.fits is None:
            nothing = np.zeros(self.solver.layout.num_nodes, np.int64)
            return BudgetOutcome(Outcome(nothing, math.inf, self.bound, self.sweeps), self.best_price)
        value, choice = self.fits
        too_big = None if self.too_big is None else self.too_big[1]
        outcome = Outcome(choice, value, min(self.bound, value), self.sweeps)
        return BudgetOutcome(outcome, self.best_price, too_big, self.offset(self.best_price))


def solve_within_budget(
    solver: MessagePassing,
    cost_us: np.ndarray,
    budget_bytes: int,
    effort: Effort,
    *,
    price: float = 0.0,
    plans: tuple[np.ndarray, ...] = (),
    window: np.ndarray | None = None,
    smallest: Callable[[], np.ndarray | None] = lambda: None,
    close_enough: float = CLOSE_ENOUGH,
    max_prices: int = _MAX_PRICES,
) -> BudgetOutcome:
    """The cheapest plan found that keeps at most `budget_bytes`, with a proven bound.

    `price` and `plans` come from a similar search: start there. `smallest` makes a plan with the least memory; it is called
    when no plan that fits has been seen. The solver is left at the price with the best bound.
    """
    rough = replace(effort, tolerance=max(effort.tolerance, 0.1 * close_enough))  # the price itself is off by more
    search = BudgetSearch(solver, cost_us, budget_bytes, rough, window)
    for plan in plans:
        search.offer(plan)
    current: float | None = price
    last = price
    for tried in range(max_prices):
        if current is None:
            break
        search.evaluate(current)
        if current == 0.0 and search.high == 0.0:  # the free optimum fits: what is left is no matter of memory
            break
        if search.fits is None and tried == 0 and (plan_that_fits := smallest()) is not None:
            search.offer(plan_that_fits)
            search.mix()
        if search.gap <= (TOLERANCE if current == 0.0 else close_enough) or effort.expired():
            break
        last, current = current, _step(search, current, price)
    if search.best_price != (last if current is None else current):
        solver.set_costs(cost_us + search.best_price * search.excess.num_bytes)
        refreshed = solver.run(replace(effort, max_sweeps=2))
        search.bound = max(search.bound, refreshed.bound_us - search.offset(search.best_price))
    return search.result()


def _step(search: BudgetSearch, current: float, start: float) -> float | None:
    """Near a known price take small steps until it is bracketed, then secants."""
    if start > 0.0 and (math.isinf(search.high) or search.low == 0.0):
        factor = _FIRST_STEP ** (1 if 1 / 1.2 < current / start < 1.2 else 8)
        return current * factor if math.isinf(search.high) else current / factor
    return search.next_price(current)


def mix_plans(
    problem: PairwiseProblem, cost_us: np.ndarray, fits: np.ndarray, other: np.ndarray, budget_bytes: int
) -> np.ndarray:
    """`fits` with some of the places where `other` differs switched to it: the places that save most per byte, while the
    budget holds. Places are connected sets of differing nodes, so their effects add up exactly."""
    lay = problem.layout
    differs = fits != other
    if not differs.any():
        return fits
    label = np.where(differs, np.arange(lay.num_nodes), lay.num_nodes)
    inner = np.flatnonzero(differs[lay.edge_u] & differs[lay.edge_v])
    u, v = lay.edge_u[inner], lay.edge_v[inner]
    changed = True
    while changed:
        least = label.copy()
        np.minimum.at(least, u, label[v])
        np.minimum.at(least, v, label[u])
        padded = np.append(least, lay.num_nodes)
        least = np.minimum(least, padded[least])
        changed = bool((least != label).any())
        label = least
    at_fits, at_other = lay.first[:-1] + fits, lay.first[:-1] + other
    count = lay.num_nodes + 1
    us = np.bincount(label, cost_us[at_other] - cost_us[at_fits], count)
    edge_change = problem.edge_us(other) - problem.edge_us(fits)
    us += np.bincount(np.minimum(label[lay.edge_u], label[lay.edge_v]), edge_change, count)
    more_bytes = np.bincount(label, problem.num_bytes[at_other] - problem.num_bytes[at_fits], count)
    free = budget_bytes - problem.used_bytes(fits)
    take = np.zeros(count, np.bool_)
    per_byte = us / np.maximum(more_bytes, 1e-9)
    for place in np.argsort(per_byte, kind="stable"):
        if us[place] < 0 and more_bytes[place] <= free:
            take[place] = True
            free -= more_bytes[place]
    return np.where(take[label], other, fits)


@dataclass(frozen=True, eq=False)
class LeastMemory:
    """`num_bytes`: memory of the smallest plan found. `bound_bytes`: no plan has less; equal = proved."""

    num_bytes: float
    bound_bytes: float
    choice: np.ndarray

    @property
    def proved(self) -> bool:
        return self.num_bytes == self.bound_bytes


def least_memory(problem: PairwiseProblem, alive: np.ndarray, effort: Effort) -> LeastMemory:
    """The plan with the least bytes: message passing where a strategy costs its bytes and edges only say what is possible."""
    feasibility = np.where(np.isfinite(problem.layout.table), 0.0, np.inf)
    transposed = np.where(np.isfinite(problem.layout.table_transposed), 0.0, np.inf)
    layout = problem.layout._replace(table=feasibility, table_transposed=transposed)
    cost = np.where(alive, problem.num_bytes, np.inf)
    excess = _Excess.of(layout, cost, problem.num_bytes)
    used = excess.num_bytes[alive & (excess.num_bytes > 0)]
    unit = float(math.gcd(*map(int, used))) if len(used) else 1.0
    in_units = np.where(alive, excess.num_bytes / unit, np.inf)
    shadow = replace(problem, layout=layout, unary_us=in_units)
    found = MessagePassing(shadow).run(replace(effort, eps_us=1e-6, tolerance=0.0, enough_us=0.5))
    choice, value, least = found.choice, found.value_us, found.bound_us
    if value - least >= 0.5 and not effort.expired():
        exact = solve_core(
            layout, in_units, problem.num_bytes, budget_bytes=None, max_columns=_MAX_COLUMNS, time_limit_s=_EXACT_S, gap_us=0.5
        )  # fmt: skip
        if exact is not None:
            least = max(least, exact.bound_us)
            if exact.choice is not None and exact.value_us < value:
                choice, value = exact.choice, exact.value_us
    if math.isinf(least):
        return LeastMemory(math.inf, math.inf, choice)
    bound = math.ceil(least - 1e-3) * unit + excess.least_total
    return LeastMemory(round(value * unit + excess.least_total) if math.isfinite(value) else value, round(bound), choice)
