"""The same model with different layers checkpointed: one workbench each, made when it is needed and kept."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from planner.checkpointing import Checkpoint, checkpoint_order, checkpointed, first_layers
from planner.constraint import Constraint
from planner.errors import InfeasibleError, InvalidConstraintError, PlannerError, SolverError
from planner.plan import Plan

if TYPE_CHECKING:
    from planner.solving.checkpoints import Trial
    from planner.workbench import Workbench


MOST_KEPT = 12
"""Workbenches beside that of the graph as traced; of Llama-3-8B on two axes one takes about 40 MB."""


@dataclass(eq=False)
class Variants:
    """`base` is the workbench of the graph as traced. Those used last are kept. Not thread-safe."""

    base: Workbench
    made: dict[tuple[str, ...], Workbench] = field(default_factory=dict)
    counts: dict[tuple[Constraint, ...], int] = field(default_factory=dict)
    """Constraints without overrides -> the best number of checkpointed layers, where searches with overrides start."""

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Layers in the order in which they are worth checkpointing."""
        return checkpoint_order(self.base.graph)

    @cached_property
    def layer_bytes(self) -> float:
        """What a layer more saves on a device, about: as if all that is kept were split over all devices."""
        graph = self.base.graph
        kept, least = (
            sum(g.meta(ref).num_bytes for ref in g.saved_for_backward) for g in (graph, checkpointed(graph, self.order))
        )
        return (kept - least) / max(len(self.order), 1) / self.base.mesh.num_devices

    def bench(self, layers: tuple[str, ...]) -> Workbench:
        """Raises InputError for a layer that the model does not have."""
        if not layers:
            return self.base
        found = self.made.pop(layers, None) or self.base.like(checkpointed(self.base.graph, layers))
        self.made[layers] = found
        if len(self.made) > MOST_KEPT:
            del self.made[next(iter(self.made))]
        return found

    def holding(self, key: str) -> Workbench:
        """A workbench whose graph has this op: that of the model, else one made so far."""
        return next((bench for bench in (self.base, *self.made.values()) if key in bench.graph.node_by_key), self.base)

    def solve(
        self, checkpoint: Checkpoint, constraints: Sequence[Constraint], *, time_limit_s: float, exact: bool | None
    ) -> Plan:
        """Raises as `Workbench.solve`, and InputError if the model has fewer layers than are to be checkpointed."""
        if checkpoint.policy == "auto" and self.order:
            return replace(_Auto(self, tuple(constraints), time_limit_s, exact).plan(), checkpoint=str(checkpoint))
        layers = () if checkpoint.policy == "auto" else checkpoint.layers(self.base.graph)
        plan, _ = self.bench(layers).solve_here(constraints, time_limit_s=time_limit_s, exact=exact)
        return replace(plan, checkpoint=str(checkpoint))


@dataclass(eq=False)
class _Auto:
    """One solve in which the number of checkpointed layers is open; thrown away afterwards."""

    variants: Variants
    constraints: tuple[Constraint, ...]
    time_limit_s: float
    exact: bool | None
    plans: dict[int, Plan] = field(default_factory=dict)
    errors: dict[int, PlannerError] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def plan(self) -> Plan:
        from planner.solving.checkpoints import CountSearch

        variants = self.variants
        search = CountSearch(len(variants.order), self._trial, variants.layer_bytes, lambda: self._seconds_left <= 0)
        best = search.run(self._start())
        if best is None:
            raise self._error()
        if self._seconds_left > 0:
            variants.counts[self.constraints] = best
        found = self._finished(best)
        if len(search.tried) == 1:
            return found
        tried = f"{best} of {search.most} layers checkpointed, the best of {len(search.tried)} numbers of layers tried"
        seconds = time.monotonic() - self.began
        return replace(found, report=replace(found.report, method=f"{found.report.method}; {tried}", seconds=seconds))

    def _start(self) -> int | None:
        """With overrides: the best number without them, so that the answer does not depend on what was asked before."""
        from planner.solving.solve import OVERRIDES

        kept = tuple(c for c in self.constraints if not isinstance(c, OVERRIDES))
        if kept == self.constraints:
            return None
        if kept not in self.variants.counts:
            _Auto(self.variants, kept, max(self._seconds_left, 1.0), False).plan()
        return self.variants.counts.get(kept)

    @property
    def _seconds_left(self) -> float:
        cancelled = self.variants.base.listeners.cancelled
        if cancelled is not None and cancelled():
            return 0.0
        return self.began + self.time_limit_s - time.monotonic()

    def _bench(self, count: int) -> Workbench:
        variants = self.variants
        return variants.bench(first_layers(variants.base.graph, variants.order, count))

    def _trial(self, count: int) -> Trial:
        from planner.solving.checkpoints import Trial

        try:
            limit = max(self._seconds_left, 1.0)
            plan, us_per_byte = self._bench(count).solve_here(self.constraints, time_limit_s=limit, exact=False)
        except PlannerError as error:
            if not self._may_differ(error):
                raise
            self.errors[count] = error
            return Trial(math.inf, True, getattr(error, "shortfall_bytes", None) or 0.0)
        self.plans[count] = plan
        return Trial(plan.objective_us, us_per_byte > 0.0)

    def _may_differ(self, error: PlannerError) -> bool:
        """Whether another number of checkpointed layers can have a plan: memory, time, or a pin on a repeated op."""
        if isinstance(error, InfeasibleError):
            return error.shortfall_bytes is not None
        if isinstance(error, InvalidConstraintError):
            return any("/recompute#" in getattr(constraint, "where", "") for constraint in self.constraints)
        return isinstance(error, SolverError)

    def _finished(self, count: int) -> Plan:
        """The plan, with the exact step if that was asked for and is needed. It takes a solver that has answered nothing yet."""
        plan = self.plans[count]
        if self.exact is False or plan.report.status == "optimal" or self._seconds_left <= 0:
            return plan
        fresh = self._bench(count).with_fresh_solver()
        better, _ = fresh.solve_here(self.constraints, time_limit_s=self._seconds_left, exact=self.exact)
        return better if better.objective_us <= plan.objective_us else plan

    def _error(self) -> PlannerError:
        """That of all layers checkpointed, which says so; if time ran out before those were tried, that."""
        most = len(self.variants.order)
        error = self.errors[max(self.errors)]
        if most not in self.errors:
            return SolverError(
                f"no plan was found within {self.time_limit_s:g} s; {max(self.errors)} of {most} layers checkpointed are too few",
                hint="Give more time, or --checkpoint full.",
            )
        if isinstance(error, InfeasibleError):
            return InfeasibleError(
                f"with all {most} layers checkpointed, {error.message}", hint=error.hint, conflicts=error.conflicts,
                shortfall_bytes=error.shortfall_bytes,
            )  # fmt: skip
        return error
