"""Plans as text and as the dictionary of `show --json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.constants import Constant
from planner.constraint import Constraint
from planner.costing.assumptions import CONSTANTS
from planner.errors import UnknownHardwareError
from planner.graph import without_layer
from planner.hardware import load_profile
from planner.plan import Plan
from planner.provenance import prices, total_error_pct
from planner.units import format_gb, format_gib, format_ms

if TYPE_CHECKING:
    from planner.forecast import Forecast, Forecasts


def as_dict(plan: Plan) -> dict[str, Any]:
    """The answer of `show --json`."""
    return {
        "plan_id": plan.plan_id,
        "model": plan.request.to_json(),
        "mesh": str(plan.mesh),
        "hardware": plan.hardware_name,
        "status": plan.report.status,
        "objective_us": plan.objective_us,
        "objective": "serial, no overlap",
        "bound_us": plan.report.bound_us,
        "gap": plan.report.gap,
        "method": plan.report.method,
        "checkpoint": plan.checkpoint,
        "checkpointed": list(plan.checkpointed),
        "compute_us": plan.compute_us,
        "comm_us": plan.comm_us,
        "peak_bytes": plan.memory.peak_bytes,
        "memory": plan.memory.to_json(),
        "prices": _prices(plan),
        "comm_bytes": plan.comm_bytes,
        "collectives": plan.collective_counts,
        "num_ops": plan.num_ops,
        "constraints": [c.to_json() for c in plan.constraints],
        "pins": [pin.to_json() for pin in plan.pins],
        "replicated_for_lack_of_a_rule": list(plan.replicated_for_lack_of_a_rule),
        "regions": dict(plan.regions),
        "placements": {
            key: [None if p is None else "".join(map(str, p)) for p in choice.outputs] for key, choice in plan.choices.items()
        },
    }


def _prices(plan: Plan) -> dict[str, Any]:
    """Where the times come from: per kind of work its rule, constants, sources and error bar."""
    try:
        hardware = load_profile(plan.hardware_name)
    except UnknownHardwareError as error:
        return {"note": error.message}
    found = prices(plan, hardware)
    return {
        "error_pct": round(total_error_pct(found), 1),
        "profile_changed_since": hardware.content_hash != plan.hardware_hash,
        "kinds": {price.kind: price.to_json() for price in found},
    }


def _price_lines(plan: Plan) -> list[str]:
    """The same in words, a line per kind of work."""
    try:
        hardware = load_profile(plan.hardware_name)
    except UnknownHardwareError as error:
        return [f"where the times come from: {error.message}"]
    found = prices(plan, hardware)
    changed = "; its constants have changed since" if hardware.content_hash != plan.hardware_hash else ""
    lines = [f"where the times come from ({plan.hardware_name}{changed}), in all ± {total_error_pct(found):.0f} %:"]
    for price in found:
        origin = "measured on this hardware" if price.measured else "in part of other hardware, or guessed"
        lines.append(f"  {price.kind} {format_ms(price.us)} ± {price.error_pct:.0f} %: {price.rule}; {origin}")
    return lines


def summary(plan: Plan) -> str:
    report = plan.report
    proof = "proved optimal" if report.status == "optimal" else f"{report.status}, within {100 * report.gap:.2g} % of the bound"
    lines = [
        f"plan {plan.plan_id}: {plan.request.model} on {plan.mesh}, {plan.hardware_name}, {proof} ({report.method})",
        f"  step time {format_ms(plan.objective_us)} (serial, no overlap) = compute {format_ms(plan.compute_us)}"
        f" + communication {format_ms(plan.comm_us)}",
        f"  memory {format_gib(plan.memory.peak_bytes)} per device: "
        + ", ".join(_named_bytes(*part) for part in plan.memory.to_json().items() if part != ("kept_parameter_bytes", 0)),
    ]
    if report.merged_us:
        lines.append(f"  proof and bound count equal redistributions for each use: {format_ms(report.objective_us)}")
    lines += [f"  {text}" for text in (plan.checkpointed_text, plan.kept_text) if text]
    for axis, kinds in plan.comm_bytes.items():
        lines.append(f"  traffic on {axis}: " + ", ".join(f"{kind} {format_gb(size)}" for kind, size in kinds.items()))
    lines += [f"  {line}" for line in _regions(plan)]
    if plan.replicated_for_lack_of_a_rule:
        lines.append(f"  replicated for lack of a rule: {', '.join(plan.replicated_for_lack_of_a_rule)}")
    return "\n".join(lines)


def _named_bytes(name: str, size: int) -> str:
    """`kept_parameter_bytes`, 2**30 -> `kept parameter 1.00 GiB`"""
    return f"{name.removesuffix('_bytes').replace('_', ' ')} {format_gib(size)}"


def forecast_text(found: Forecasts) -> str:
    """Step time with and without overlap, exposed communication, MFU, and the memory peak with temporaries."""
    lines = [
        f"  predicted step, {name}: {_step_text(f)}" for name, f in (("serial", found.serial), ("overlapped", found.overlapped))
    ]
    timeline, memory = found.overlapped.timeline, found.overlapped.memory
    if timeline.exposed_us:
        of_kind = ", ".join(f"{label} {format_ms(us)}" for label, us in list(timeline.exposed_us.items())[:4])
        lines.append(f"  exposed communication (overlapped): {of_kind}")
    idle = ", ".join(f"{cause} {format_ms(us)}" for cause, us in timeline.idle_us.items()) or "never"
    busy = ", ".join(f"{lane} {100 * share:.0f} %" for lane, share in timeline.busy_share.items())
    lines += [
        f"  busy (overlapped): {busy}; compute waits for: {idle}",
        f"  memory peak with temporaries (overlapped, blocks compiled): {format_gib(memory.allocated_bytes)} allocated, "
        f"{format_gib(memory.reserved_bytes)} reserved of {format_gib(found.overlapped.usable_bytes)}, "
        f"at {format_ms(found.overlapped.moment_us)} in {memory.moment_name}",
    ]
    lines += [
        f"    {format_gib(s.num_bytes)}  {s.dtype}{list(s.shape)} {s.placements}  {s.key} ({s.category})" for s in memory.top[:3]
    ]
    lines.append(f"  forecast constants: {', '.join(map(_constant_text, CONSTANTS.items()))}")
    if found.overlapped.missing_bytes:
        lines.append(
            f"  this does not fit: {format_gib(found.overlapped.missing_bytes)} too much; plan again with as much less --memory"
        )
    return "\n".join(lines)


def _constant_text(named: tuple[str, Constant]) -> str:
    name, constant = named
    value = f"{constant.value:g}" if isinstance(constant.value, int | float) else "table"
    return f"{name} {value} ({constant.kind})"


def _step_text(found: Forecast) -> str:
    timeline = found.timeline
    hidden = timeline.communication_us - timeline.exposed_total_us
    return (
        f"{format_ms(timeline.step_us)}, MFU {100 * timeline.mfu:.1f} %, communication {format_ms(timeline.exposed_total_us)}"
        f" exposed and {format_ms(max(hidden, 0.0))} hidden"
    )


def _regions(plan: Plan) -> list[str]:
    """Each contract once: `user-controlled region x27: module.function, ep: S(0), R -> S(0); ...`"""
    keys: dict[str, list[str]] = {}
    for key, contract in plan.regions.items():
        keys.setdefault(contract, []).append(key)
    return [f"user-controlled region x{len(found)}: {contract}" for contract, found in keys.items()]


def _with_note(constraint: Constraint) -> str:
    note = constraint.to_json().get("note")
    return f"{constraint.describe()} # {note}" if note else constraint.describe()


def details(plan: Plan) -> str:
    """Summary, constraints, and the placements of parameters and module outputs, equal layers once."""
    lines = [
        summary(plan),
        *_price_lines(plan),
        "constraints:",
        *(f"  {_with_note(c)}" for c in plan.constraints),
        "placements (equal layers once):",
    ]
    groups: dict[tuple[str, str], list[str]] = {}
    for key, choice in plan.choices.items():
        text = ", ".join("-" if p is None else "".join(map(str, p)) for p in choice.outputs)
        groups.setdefault((without_layer(key), text), []).append(key)
    lines += [f"  x{len(keys):<3d} {key:70s} {text}" for (key, text), keys in groups.items()]
    return "\n".join(lines)
