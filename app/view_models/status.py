"""The status strip: does it fit, is it proved, how long is a step, what does it communicate; and how it differs from the base."""

from __future__ import annotations

from dataclasses import dataclass

from app.view_models.demands import Demands as Pins
from app.view_models.demands import num_changed
from app.view_models.proofs import gap_text
from planner import MemoryBudget, Plan
from planner.hardware_changes import split_name

GIB, MIB, GB, MB = 2**30, 2**20, 10**9, 10**6
LONGEST_NAME = 32
"""Characters of a model's name in the strip."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number that can be drawn: with its unit and where it comes from.

    Attributes:
        delta: difference from the base plan in the same unit, None without a base.
    """

    label: str
    value: float
    unit: str
    source: str
    delta: float | None = None
    digits: int = 1

    @property
    def text(self) -> str:
        return f"{self.value:,.{self.digits}f} {self.unit}"

    @property
    def delta_text(self) -> str:
        """`▲ +1.2` or `▼ -0.3`, "" if there is no difference worth a digit."""
        if self.delta is None or round(self.delta, self.digits) == 0:
            return ""
        return f"{'▲ +' if self.delta > 0 else '▼ -'}{abs(self.delta):,.{self.digits}f}"


@dataclass(frozen=True, kw_only=True)
class Strip:
    """`verdict` and `state` with a tone (`good`, `bad`, `plain`) that only repeats what the text says."""

    title: str
    base: str
    verdict: str
    verdict_tone: str
    state: str
    state_tone: str
    quantities: tuple[Quantity, ...]


def budget_bytes(plan: Plan) -> int | None:
    """The tightest, if there are several."""
    return min((c.num_bytes for c in plan.constraints if isinstance(c, MemoryBudget)), default=None)


def verdict(plan: Plan) -> tuple[str, str]:
    budget = budget_bytes(plan)
    if budget is None:
        return "no memory limit", "plain"
    free = budget - plan.memory.peak_bytes
    digits = 1 if abs(free) >= GIB else 2
    if free < 0:
        return f"{-free / GIB:.{digits}f} GiB over", "bad"
    return f"fits, {free / GIB:.{digits}f} GiB free", "good"


def state(plan: Plan, pins: Pins, *, infeasible: bool, proving: bool = False) -> tuple[str, str]:
    if infeasible:
        return "infeasible with the pins now; last good plan shown", "bad"
    changed = num_changed(pins, plan)
    if changed:
        return f"stale: {changed} {'pin' if changed == 1 else 'pins'} changed", "bad"
    if plan.report.status == "optimal":
        return "optimal", "good"
    return gap_text(plan) + (", proof running" if proving else ", not proved"), "plain"


def strip(
    plan: Plan,
    base: Plan | None,
    pins: Pins,
    *,
    infeasible: bool = False,
    proving: bool = False,
    exposed: tuple[float, float] | None = None,
    base_exposed: tuple[float, float] | None = None,
) -> Strip:
    """`exposed`: step and exposed communication of the overlapped forecast in µs, if they are known yet."""
    verdict_text, verdict_tone = verdict(plan)
    changes = ", ".join(f"{field} ×{factor:g}" for field, factor in split_name(plan.hardware_name)[2].items())
    state_text, state_tone = state(plan, pins, infeasible=infeasible, proving=proving)
    return Strip(
        title=f"{shortened(plan.request.model)} / plan {plan.plan_id[:7]}" + (f", with {changes}" if changes else ""),
        base=f"base plan {base.plan_id[:7]}" if base else "",
        verdict=verdict_text, verdict_tone=verdict_tone, state=state_text, state_tone=state_tone,
        quantities=(*_times(plan, base), *_overlapped(plan, exposed, base_exposed), _peak(plan, base), *_volumes(plan, base)),
    )  # fmt: skip


def shortened(name: str) -> str:
    """The end of a long path, which tells one model from another."""
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


def _times(plan: Plan, base: Plan | None) -> tuple[Quantity, ...]:
    source = f"predicted by the cost model on {plan.hardware_name}"
    rows = (
        ("step", "objective_us", f"{source}; serial, no overlap: computation and communication one after the other"),
        ("compute", "compute_us", f"{source}: sum over the local kernels"),
        ("comm", "comm_us", f"{source}: sum over the redistributions, local slices and copies included"),
    )
    return tuple(
        Quantity(
            label=label, value=getattr(plan, name) / 1000, unit="ms", source=text, digits=1 if plan.objective_us >= 10_000 else 3,
            delta=(getattr(plan, name) - getattr(base, name)) / 1000 if base else None,
        )
        for label, name, text in rows
    )  # fmt: skip


def _overlapped(plan: Plan, now: tuple[float, float] | None, before: tuple[float, float] | None) -> tuple[Quantity, ...]:
    if now is None:
        return ()
    model = f"forecast on {plan.hardware_name}: event simulation of compute, links and the issuing CPU"
    rows = (("overlapped step", model), ("exposed comm", f"{model}; time that compute stands still for communication"))
    return tuple(
        Quantity(
            label=label, value=now[n] / 1000, unit="ms", source=source, digits=1 if plan.objective_us >= 10_000 else 3,
            delta=(now[n] - before[n]) / 1000 if before else None,
        )
        for n, (label, source) in enumerate(rows)
    )  # fmt: skip


def _peak(plan: Plan, base: Plan | None) -> Quantity:
    unit, size = ("GiB", GIB) if plan.memory.peak_bytes >= 0.1 * GIB else ("MiB", MIB)
    return Quantity(
        label="peak memory", value=plan.memory.peak_bytes / size, unit=unit,
        source="predicted per device: parameters, gradients, optimizer state, what backward needs; no temporaries, no reserve"
        + "".join(f"; {text}" for text in (plan.checkpointed_text, plan.kept_text) if text),
        delta=(plan.memory.peak_bytes - base.memory.peak_bytes) / size if base else None,
    )  # fmt: skip


def _volumes(plan: Plan, base: Plan | None) -> tuple[Quantity, ...]:
    now = {axis: sum(kinds.values()) for axis, kinds in plan.comm_bytes.items()}
    before = {axis: sum(kinds.values()) for axis, kinds in base.comm_bytes.items()} if base else {}
    unit, size = ("GB", GB) if max((*now.values(), *before.values()), default=0) >= 0.1 * GB else ("MB", MB)
    return tuple(
        Quantity(
            label=f"traffic {axis}", value=now.get(axis, 0) / size, unit=unit, digits=2,
            source=f"full bytes of all collectives over {axis}, one step, one rank (GB = 10⁹, MB = 10⁶)",
            delta=(now.get(axis, 0) - before.get(axis, 0)) / size if base else None,
        )
        for axis in sorted({*now, *before})
    )  # fmt: skip
