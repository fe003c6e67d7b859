"""What another hardware profile changes: its constants side by side, with their sources, and what a plan makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.view_models.status import GB, GIB
from planner import Plan
from planner.constants import Constant
from planner.hardware import HardwareProfile
from planner.hardware_changes import FIELDS, joined_name, split_name

TABLE = "table"
DECIMALS = ("step ms", "compute ms", "comm ms", "peak GiB")


@dataclass(frozen=True, kw_only=True)
class ConstantChange:
    """A constant of two profiles that differs, as text; `source` is that of the new one."""

    name: str
    before: str
    after: str
    unit: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Field:
    """A number of a profile that can be changed; `value` in the unit of its label."""

    name: str
    label: str
    value: float


def fields(profile: HardwareProfile) -> tuple[Field, ...]:
    values = {
        "link": ("Links in a node, GB/s", profile.node.link_bytes_per_s / GB),
        "network": ("Network per device, GB/s", profile.fabric.nic_bytes_per_s / GB),
        "hbm": ("Memory bandwidth, TB/s", profile.hbm_bytes_per_s / 1e12),
        "memory": ("Device memory, GB", profile.hbm_bytes / GB),
        "clock": ("Clock, % of the profile's", 100.0),
    }
    return tuple(Field(name=name, label=values[name][0], value=values[name][1]) for name in FIELDS)


def factor(field: Field, value: float) -> float:
    """What the profile's number is multiplied with; 1 if it is left as it is."""
    found = float(f"{value / field.value:.6g}")
    return 1.0 if abs(found - 1) < 1e-4 else found


def changed_fields(hardware: str) -> str:
    """`link ×2, memory ×0.5`, "" for a profile as it is."""
    return ", ".join(f"{name} ×{factor:g}" for name, factor in split_name(hardware)[2].items())


def fabric_choice(machine: str, fabric: str, factors: Mapping[str, float] | None = None) -> str:
    """`h100_sxm` with the network it comes with, or `h100_sxm+roce_8x400g`; with changed fields `h100_sxm@link=2`."""
    base, own, changes = split_name(machine)
    return joined_name(base, fabric or own, {**changes, **(factors or {})})


def changed_constants(before: HardwareProfile, after: HardwareProfile) -> tuple[ConstantChange, ...]:
    """Single numbers first, then tables and curves, of which only the size is told."""
    found = []
    for name in dict.fromkeys((*before.constants, *after.constants)):
        one, two = before.constants.get(name), after.constants.get(name)
        if _value(one) != _value(two):
            known = two or one
            assert known is not None
            source = f"{known.kind}: {known.source} ({known.date})" if two is not None else "not in this profile"
            found.append(
                ConstantChange(name=name, before=_text(one), after=_changed_text(one, two), unit=known.unit, source=source)
            )
    return tuple(sorted(found, key=lambda change: TABLE in change.after + change.before))


def _value(constant: Constant | None) -> Any:
    return None if constant is None else constant.value


def _text(constant: Constant | None) -> str:
    if constant is None:
        return "absent"
    value = constant.value
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) and abs(value) < 10**7 else f"{value:.4g}"
    return f"{TABLE} of {len(value)}" if isinstance(value, (list, tuple)) else str(value)


def _changed_text(before: Constant | None, after: Constant | None) -> str:
    """Tables of one size are not told apart by it."""
    text = _text(after)
    return f"{text}, other values" if text.startswith(TABLE) and text == _text(before) else text


def result_columns(plans: dict[str, Plan]) -> dict[str, list[Any]]:
    """Column -> values, one row per plan."""
    return {
        "plan": list(plans),
        "step ms": [round(plan.objective_us / 1000, 1) for plan in plans.values()],
        "compute ms": [round(plan.compute_us / 1000, 1) for plan in plans.values()],
        "comm ms": [round(plan.comm_us / 1000, 1) for plan in plans.values()],
        "peak GiB": [round(plan.memory.peak_bytes / GIB, 1) for plan in plans.values()],
        "hardware": [plan.hardware_name for plan in plans.values()],
        "changed fields": [changed_fields(plan.hardware_name) or "none" for plan in plans.values()],
    }
