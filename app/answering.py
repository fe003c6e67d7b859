"""What the engine answers about one tensor or one conflict: the price of every override, why (not), what to give up.

These commands end early when nobody wants their answer any more, and the process goes on with the next one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from planner import (
    BoundaryPlacement,
    Explanation,
    Override,
    Pin,
    Plan,
    Relaxation,
    Workbench,
)
from planner.constraint import Constraint
from planner.placement import Placements
from planner.reasons import LocalPrice

QUESTION_S = 30.0
"""Longest that an answer may take."""


class Exposed(NamedTuple):
    """Of a forecast: the step with communication beside compute; how long compute stands still for communication. µs."""

    step_us: float
    exposed_us: float


class Answering:
    """Part of the engine. `bench` is what is open, `checkpoint` how its layers to checkpoint are chosen."""

    bench: Workbench
    checkpoint: str

    def with_defaults(self, demands: tuple[Constraint, ...], memory_bytes: int | None) -> tuple[Constraint, ...]:
        """The model's boundaries, the budget, the demands. A pin on an input or output replaces the boundary there."""
        pinned = {demand.where for demand in demands if isinstance(demand, Pin)}
        defaults = self.bench.default_constraints(memory_bytes)
        kept = (c for c in defaults if not (isinstance(c, BoundaryPlacement) and c.where in pinned))
        return (*kept, *demands)

    def overrides(
        self, progress: Any, where: str, constraints: tuple[Constraint, ...], layers: tuple[str, ...]
    ) -> tuple[Override, ...]:
        """What pinning `where` to each legal placement would come to, row by row. `layers`: those that the plan checkpoints."""
        progress("price")
        return self.bench.overrides(
            where, 0, constraints, checkpointed=layers, exact=False, time_limit_s=QUESTION_S, row=progress.row,
            cancelled=progress.stopped,
        )  # fmt: skip

    def explain(self, progress: Any, plan: Plan, where: str, placements: Placements) -> Explanation:
        """Why the plan does not have these placements there."""
        progress("compare")
        return self.bench.explain(plan, where, placements, exact=False, time_limit_s=QUESTION_S, cancelled=progress.stopped)

    def local_prices(self, progress: Any, plan: Plan, key: str) -> tuple[LocalPrice, ...]:
        """What each legal placement costs at the op itself, all others staying as they are."""
        progress("price")
        return self.bench.local_prices(plan, key)

    def exposed(self, progress: Any, plan: Plan) -> Exposed:
        """The step with communication beside compute, and what of it is exposed."""
        progress("forecast")
        timeline = self.bench.timeline(plan)
        return Exposed(timeline.step_us, timeline.exposed_total_us)

    def give_up(
        self, progress: Any, demands: tuple[Constraint, ...], memory_bytes: int | None, conflicts: tuple[str, ...]
    ) -> tuple[Relaxation, ...]:
        """What solving again would bring without each member of a conflict, one after the other, with layers checkpointed as
        this plan is asked to."""
        progress("try without")
        return self.bench.relaxations(
            self.with_defaults(demands, memory_bytes), conflicts, checkpoint=self.checkpoint, row=progress.row,
            time_limit_s=QUESTION_S * len(conflicts), cancelled=progress.stopped,
        )  # fmt: skip
