"""How many layers to checkpoint under a memory budget: the outer loop around the solver.

Each number of layers is a problem of its own, with its own optimum. Repeating another layer costs about the same every time,
and a budget that is larger by what a layer keeps is worth less and less, so the optimum first falls and then rises with the
number, but for the whole numbers in placements. With few layers all numbers are tried; with many, none and all, or the least that
fits, and from there downhill. What was tried is part of the answer; numbers that were not tried are not proved worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

TRY_ALL = 8
"""With so many layers or fewer every number of them is tried."""

GUESSES = 3
"""So many steps to the least number that fits are guessed from what is lacking."""


@dataclass(frozen=True)
class Trial:
    """What some number of checkpointed layers comes to.

    Attributes:
        value_us: step time, `inf` if no plan fits.
        budget_binds: the budget makes it longer.
        short_bytes: what the budget lacks if no plan fits, 0 if that is not known.
    """

    value_us: float
    budget_binds: bool
    short_bytes: float = 0.0


@dataclass
class CountSearch:
    """One search; `tried` is its result.

    Attributes:
        most: the number of layers there are.
        solve: number of checkpointed layers -> what that comes to.
        layer_bytes: about what a layer more saves on a device; only says where to look first.
        expired: asked before every trial but the first; what was found by then stands.
    """

    most: int
    solve: Callable[[int], Trial]
    layer_bytes: float = 0.0
    expired: Callable[[], bool] = lambda: False
    tried: dict[int, Trial] = field(default_factory=dict)

    def run(self, start: int | None = None) -> int | None:
        """The best number of those tried, the smaller one of equals; None if no plan fits with any of them.

        `start` is the best number of a similar problem: if it fits here, and layers are many, the search goes on from there.
        """
        if start is not None and self.most > TRY_ALL and self._value(start) < math.inf:
            if start > 0 or self.tried[0].budget_binds:
                self._descend(start, 0)
        elif self._value(0) == math.inf or self.tried[0].budget_binds:
            self._look_everywhere()
        found = [count for count, trial in self.tried.items() if trial.value_us < math.inf]
        return min(found, key=lambda count: (self.tried[count].value_us, count), default=None)

    def _look_everywhere(self) -> None:
        if self.most <= TRY_ALL:
            for count in range(1, self.most + 1):
                self._value(count)
            return
        least = self._least_that_fits()
        if least is not None:
            self._descend(least, least)

    def _value(self, count: int) -> float:
        if count not in self.tried:
            if self.tried and self.expired():
                return math.inf
            self.tried[count] = self.solve(count)
        return self.tried[count].value_us

    def _least_that_fits(self) -> int | None:
        """The first steps follow what is lacking, the others halve what is left; None if not even all layers help."""
        if self._value(0) < math.inf:
            self._value(self.most)
            return 0
        short, fits, steps = 0, self.most + 1, 0
        while fits - short > 1:
            at = self._guess(short, fits) if steps < GUESSES else (short + fits) // 2
            short, fits = (short, at) if self._value(at) < math.inf else (at, fits)
            steps += 1
        return fits if fits <= self.most else None

    def _guess(self, short: int, fits: int) -> int:
        """The number that should save what is lacking at `short`; all layers if that is not known: they say if anything fits."""
        lacking = self.tried[short].short_bytes if short in self.tried else 0.0
        if self.layer_bytes <= 0 or lacking <= 0:
            return self.most if fits > self.most else (short + fits) // 2
        return min(short + math.ceil(min(lacking / self.layer_bytes, self.most)), fits - 1)

    def _descend(self, start: int, least: int) -> None:
        """To one side in growing steps while that is cheaper, then smaller steps to both sides."""
        best, step = start, 1
        for side in (1, -1):
            while least <= best + side * step <= self.most and self._value(best + side * step) < self._value(best):
                best, step = best + side * step, 2 * step
            if best != start:
                break
        while step > 1:
            step //= 2
            for near in (best - step, best + step):
                if least <= near <= self.most and self._value(near) < self._value(best):
                    best = near
