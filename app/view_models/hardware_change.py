"""What another hardware profile changes: its constants side by side, with their sources, and what a plan makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.view_models.status import GIB
from planner import Plan
from planner.hardware import Constant, HardwareProfile

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


def fabric_choice(machine: str, fabric: str) -> str:
    """`h100_sxm` with the network it comes with, or `h100_sxm+roce_8x400g`."""
    return f"{machine}+{fabric}" if fabric else machine


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
    }
