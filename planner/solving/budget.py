"""The memory budget: a price per byte (Lagrange multiplier) inside message passing, and the least memory possible.

For any price L >= 0 per byte, (bound of the problem with cost + L * bytes) - L * budget is a bound for every plan within the
budget. The best L lies where the cheapest plan changes from too big to fitting; it is found by secants between such plans.
Two such plans are then mixed: places that do not touch are switched one by one, and layers are switched one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.solving import kernels
from planner.solving.least_memory import Excess
from planner.solving.message_passing import TOLERANCE, Effort, MessagePassing, Outcome
from planner.solving.mixing import cross_over, mix_plans

CLOSE_ENOUGH = 1e-4
"""Relative gap at which the search for a better price per byte ends."""

_FIRST_STEP = 1.03
_ACCEPTABLE = 5e-3
_MAX_PRICES = 14
_MEND_ORDERS = 3


@dataclass(frozen=True, eq=False)
class BudgetOutcome:
    """The best plan within the budget (`outcome.value_us` is `inf` if none was found), and where the search stood.

    Attributes:
        price: µs per byte with the best bound; 0 if the budget does not bind.
        corners: plans that were cheapest at some price per byte, one that fits and one that does not; for a later start.
        offset_us: what the solver's own bound is above a bound for plans within the budget, at the solver's present prices.
    """

    outcome: Outcome
    price: float = 0.0
    corners: tuple[np.ndarray, ...] = ()
    offset_us: float = 0.0


@dataclass(frozen=True, eq=False)
class _Corner:
    """A plan that was the cheapest found at some price per byte."""

    value_us: float
    used_bytes: int
    choice: np.ndarray


class BudgetSearch:
    """One search for the price per byte. `cost_us` are prices without memory, `inf` = ruled out."""

    def __init__(
        self,
        solver: MessagePassing,
        cost_us: np.ndarray,
        budget_bytes: int,
        effort: Effort,
        *,
        windows: Sequence[np.ndarray],
        layers: np.ndarray,
    ) -> None:
        self.solver = solver
        self.windows = windows
        self.layers = layers
        self.problem = solver.problem
        self.cost_us = cost_us
        self.budget_bytes = budget_bytes
        self.effort = replace(effort, tell=None)  # what it could tell are prices with memory in them
        self.tell = effort.tell
        self.excess = Excess.of(solver.layout, cost_us, solver.problem.num_bytes)
        self.bound = -np.inf
        self.best_price = self.price = 0.0
        self.sweeps = 0
        self.best: tuple[float, np.ndarray] | None = None
        self.fitting: _Corner | None = None
        self.too_big: _Corner | None = None
        self.low, self.high = 0.0, math.inf

    # ---- plans ----------------------------------------------------------------------------------------------------
    def offer(self, choice: np.ndarray) -> bool:
        """Remember a plan that fits if it is the best so far. -> it fits the budget"""
        fits = self.problem.used_bytes(choice) <= self.budget_bytes
        if fits:
            value = self.value(choice)
            if math.isfinite(value) and (self.best is None or value < self.best[0]):
                self.best = value, choice.copy()
        return fits

    def add_corner(self, choice: np.ndarray) -> bool:
        """Remember a plan that is (nearly) the cheapest at some price. -> it fits the budget"""
        value = self.value(choice)
        fits = self.offer(choice)
        if math.isfinite(value):
            corner = _Corner(value, self.problem.used_bytes(choice), choice.copy())
            if fits:
                self.fitting = corner
            else:
                self.too_big = corner
        return fits

    def value(self, choice: np.ndarray) -> float:
        lay = self.solver.layout
        return float(self.cost_us[lay.first[:-1] + choice].sum() + self.problem.edge_us(choice).sum())

    def offer_small(self, choice: np.ndarray) -> None:
        """Offer a plan with the least memory, whose time may be anything, and what mending makes of it at rising prices."""
        self.offer(choice)
        rng = np.random.default_rng(0)
        everyone = np.arange(self.solver.layout.num_nodes)
        orders = np.array([rng.permutation(everyone) for _ in range(_MEND_ORDERS)])
        price, penalty = max(self.price, self._first_guess()), self.solver.penalty_us()
        for factor in (64.0, 8.0, 1.0):
            mended = choice.copy()
            kernels.mend(
                self.solver.layout, self.cost_us + factor * price * self.excess.num_bytes, orders, penalty, mended
            )  # fmt: skip
            self.offer(mended)

    @property
    def gap(self) -> float:
        return math.inf if self.best is None else (self.best[0] - self.bound) / abs(self.best[0] or 1.0)

    def mix(self) -> None:
        """Make plans that fit out of the corner that fits and the cheaper one that does not."""
        if self.best is None or self.too_big is None:
            return
        starts = [self.best[1]] if self.fitting is None else [self.fitting.choice, self.best[1]]
        for start in starts:
            self.offer(mix_plans(self.problem, self.cost_us, start, self.too_big.choice, self.budget_bytes))

    def cross(self) -> None:
        """Let some layers follow one corner and the others the other."""
        if self.fitting is None or self.too_big is None or (self.layers < 0).all():
            return
        rng = np.random.default_rng(0)
        priced = self.cost_us + self._secant() * self.excess.num_bytes
        penalty = self.solver.penalty_us()

        def mend(plan: np.ndarray, cut: int) -> np.ndarray:
            near = np.flatnonzero((self.layers < 0) | (np.abs(self.layers - cut) <= 1))
            orders = np.array([rng.permutation(near) for _ in range(_MEND_ORDERS)])
            kernels.mend(self.solver.layout, priced, orders, penalty, plan)
            return plan

        cross_over(self.layers, self.fitting.choice, self.too_big.choice, mend, self.offer)
        self.mix()

    # ---- prices ---------------------------------------------------------------------------------------------------
    def evaluate(self, price: float) -> None:
        """Solve with this price per byte: a bound, a corner, and a narrower bracket."""
        self.price = price
        self.solver.set_costs(self.cost_us + price * self.excess.num_bytes)
        starts = [corner.choice for corner in (self.fitting, self.too_big) if corner is not None]
        starts += [] if self.best is None else [self.best[1]]
        values = [self.value(start) + price * self._excess_of(start) for start in starts]
        found = self.solver.run(self.effort, starts[int(np.argmin(values))] if starts else None, self.windows)
        self.sweeps += found.sweeps
        bound = found.bound_us - self.offset(price)
        if bound > self.bound:
            self.bound, self.best_price = bound, price
        if math.isfinite(found.value_us):
            if self.add_corner(found.choice):
                self.high = min(self.high, price)
            else:
                self.low = max(self.low, price)
        self.mix()
        if self.tell is not None:
            self.tell(math.inf if self.best is None else self.best[0], self.bound)

    def offset(self, price: float) -> float:
        return price * (self.budget_bytes - self.excess.least_total)

    def _excess_of(self, choice: np.ndarray) -> float:
        return float(self.excess.num_bytes[self.solver.layout.first[:-1] + choice].sum())

    def _secant(self) -> float:
        """The price at which both corners cost the same."""
        assert self.fitting is not None and self.too_big is not None
        saved = self.too_big.used_bytes - self.fitting.used_bytes
        return max(0.0, (self.fitting.value_us - self.too_big.value_us) / max(saved, 1))

    def next_price(self, price: float) -> float | None:
        """The price to try next; None when the bracket is closed."""
        if math.isinf(self.high):
            return price * 4.0 if price > 0 else self._first_guess()
        if self.high - self.low <= 0.02 * self.high:
            return None
        if self.fitting is not None and self.too_big is not None:
            width = self.high - self.low
            if self.low + 0.02 * width < (secant := self._secant()) < self.high - 0.02 * width:
                return secant
        return 0.5 * (self.low + self.high)

    def _first_guess(self) -> float:
        total = abs(self.bound) if math.isfinite(self.bound) else 1.0
        return max(total / max(self.budget_bytes, 1) * 0.1, 1e-12)

    def result(self) -> BudgetOutcome:
        offset = self.offset(self.best_price)
        if self.best is None:
            nothing = np.zeros(self.solver.layout.num_nodes, np.int64)
            return BudgetOutcome(Outcome(nothing, math.inf, self.bound, self.sweeps), self.best_price, (), offset)
        value, choice = self.best
        corners = tuple(corner.choice for corner in (self.fitting, self.too_big) if corner is not None)
        outcome = Outcome(choice, value, min(self.bound, value), self.sweeps)
        return BudgetOutcome(outcome, self.best_price, corners, offset)


def solve_within_budget(
    solver: MessagePassing,
    cost_us: np.ndarray,
    budget_bytes: int,
    effort: Effort,
    *,
    layers: np.ndarray,
    price: float = 0.0,
    plans: tuple[np.ndarray, ...] = (),
    corners: tuple[np.ndarray, ...] = (),
    windows: Sequence[np.ndarray] = (),
    smallest: Callable[[], np.ndarray | None] = lambda: None,
    close_enough: float = CLOSE_ENOUGH,
    few_prices: int = _MAX_PRICES,
) -> BudgetOutcome:
    """The cheapest plan found that keeps at most `budget_bytes`, with a proven bound.

    `price`, `plans` and `corners` come from a similar search: start there. `smallest` makes a plan with the least memory; it is
    called when no plan that fits has been seen. `layers` is the number of the repeated layer of each node, -1 outside.
    After `few_prices` an acceptable gap is enough. The solver is left at the price with the best bound.
    """
    rough = replace(effort, tolerance=max(effort.tolerance, 0.1 * close_enough))  # the price itself is off by more
    search = BudgetSearch(solver, cost_us, budget_bytes, rough, windows=windows, layers=layers)
    for corner in corners:
        search.add_corner(corner)
    for plan in plans:
        search.offer(plan)
    current: float | None = price
    gaps: list[float] = []
    for tried in range(_MAX_PRICES):
        assert current is not None
        search.evaluate(current)
        if current == 0.0 and search.high == 0.0:  # the free optimum fits: what is left is no matter of memory
            break
        if search.best is None and tried == 0 and (small := smallest()) is not None:
            search.offer_small(small)
        if search.gap > close_enough and search.high < math.inf and tried % 2 == 1:
            search.cross()
        gaps.append(search.gap)
        if search.gap <= (TOLERANCE if current == 0.0 else close_enough) or effort.expired() or _is_stuck(gaps, few_prices):
            break
        current = _step(search, current, price)
        if current is None:
            break
    if search.gap > close_enough:
        search.cross()
    if search.best_price != search.price:
        solver.set_costs(cost_us + search.best_price * search.excess.num_bytes)
        refreshed = solver.run(replace(effort, max_sweeps=2, tell=None))
        search.bound = max(search.bound, refreshed.bound_us - search.offset(search.best_price))
    return search.result()


def _is_stuck(gaps: list[float], few_prices: int) -> bool:
    """The gap is acceptable, and either enough prices were tried or two more have brought nearly nothing."""
    if gaps[-1] > _ACCEPTABLE:
        return False
    return len(gaps) >= few_prices or (len(gaps) > 3 and gaps[-1] > 0.85 * gaps[-3])


def _step(search: BudgetSearch, current: float, start: float) -> float | None:
    """Near a known price take small steps until it is bracketed, then secants."""
    if start > 0.0 and (math.isinf(search.high) or search.low == 0.0):
        factor = _FIRST_STEP if 1 / 1.1 < current / start < 1.1 else 2.0
        return current * factor if math.isinf(search.high) else current / factor
    return search.next_price(current)
