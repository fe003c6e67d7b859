"""How many layers to checkpoint under a memory budget: the outer loop around the solver.

Each number of layers is a problem of its own, with its own optimum. Repeating another layer costs about the same every time,
and a budget that is larger by what a layer keeps is worth less and less, so the optimum first falls and then rises with the
number, but for the whole numbers in placements. With few layers all numbers are tried; with many, none, all, the least that
fits, and from there downhill. What was tried is part of the answer; numbers that were not tried are not proved worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

TRY_ALL = 8
"""With so many layers or fewer every number of them is tried."""


@dataclass(frozen=True)
class Trial:
    """Step time with some number of checkpointed layers, `inf` if no plan fits, and whether the budget makes it longer."""

    value_us: float
    budget_binds: bool


@dataclass
class CountSearch:
    """One search; `tried` is its result.

    Attributes:
        most: the number of layers there are.
        solve: number of checkpointed layers -> what that comes to.
        expired: asked before every trial but the first; what was found by then stands.
    """

    most: int
    solve: Callable[[int], Trial]
    expired: Callable[[], bool] = lambda: False
    tried: dict[int, Trial] = field(default_factory=dict)

    def run(self) -> int | None:
        """The best number of those tried, the smaller one of equals; None if no plan fits with any of them."""
        if self._value(0) == math.inf or self.tried[0].budget_binds:
            if self.most <= TRY_ALL:
                for count in range(1, self.most + 1):
                    self._value(count)
            elif self._value(self.most) < math.inf:
                self._descend(self._least_that_fits())
        found = [count for count, trial in self.tried.items() if trial.value_us < math.inf]
        return min(found, key=lambda count: (self.tried[count].value_us, count), default=None)

    def _value(self, count: int) -> float:
        if count not in self.tried:
            if self.tried and self.expired():
                return math.inf
            self.tried[count] = self.solve(count)
        return self.tried[count].value_us

    def _least_that_fits(self) -> int:
        if self._value(0) < math.inf:
            return 0
        short, fits = 0, self.most
        while fits - short > 1:
            middle = (short + fits) // 2
            short, fits = (short, middle) if self._value(middle) < math.inf else (middle, fits)
        return fits

    def _descend(self, least: int) -> None:
        """More layers in growing steps while that is cheaper, then smaller steps to both sides."""
        best, step = least, 1
        while best + step <= self.most and self._value(best + step) < self._value(best):
            best, step = best + step, 2 * step
        while step > 1:
            step //= 2
            for near in (best - step, best + step):
                if least <= near <= self.most and self._value(near) < self._value(best):
                    best = near
