"""The least memory that any plan needs, exactly if it can be proved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from planner.solving.core import solve_core
from planner.solving.layout import Layout
from planner.solving.message_passing import Effort, MessagePassing
from planner.solving.problem import PairwiseProblem

_MAX_COLUMNS, _EXACT_S = 60_000, 10.0


@dataclass(frozen=True, eq=False)
class Excess:
    """Bytes above each node's least living strategy, so that numbers stay small."""

    num_bytes: np.ndarray
    least_total: float

    @classmethod
    def of(cls, layout: Layout, cost_us: np.ndarray, num_bytes: np.ndarray) -> Excess:
        living = np.where(np.isfinite(cost_us), num_bytes, np.inf)
        least = np.minimum.reduceat(living, layout.first[:-1])
        return cls(num_bytes - np.repeat(least, np.diff(layout.first)), float(least.sum()))


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
    excess = Excess.of(layout, cost, problem.num_bytes)
    used = excess.num_bytes[alive & (excess.num_bytes > 0)]
    unit = float(math.gcd(*map(int, used))) if len(used) else 1.0
    in_units = np.where(alive, excess.num_bytes / unit, np.inf)
    shadow = replace(problem, layout=layout, unary_us=in_units)
    found = MessagePassing(shadow).run(replace(effort, eps_us=1e-6, tolerance=0.0, enough_us=0.5, tell=None))
    choice, value, least = found.choice, found.value_us, found.bound_us
    if value - least >= 0.5 and not effort.expired():
        exact = solve_core(
            layout, in_units, problem.num_bytes, budget_bytes=None, max_columns=_MAX_COLUMNS, time_limit_s=_EXACT_S, gap_us=0.5
        )  # fmt: skip
        if exact is not None:
            least = max(least, exact.bound_us)
            if exact.choice is not None and exact.value_us < value:
                choice, value = exact.choice, exact.value_us
    if least == -math.inf:  # out of time before the first sweep: each node needs its least
        least = 0.0
    if least == math.inf:
        return LeastMemory(math.inf, math.inf, choice)
    bound = math.ceil(least - 1e-3) * unit + excess.least_total
    return LeastMemory(round(value * unit + excess.least_total) if math.isfinite(value) else value, round(bound), choice)
