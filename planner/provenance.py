"""Where the numbers of a plan come from: per kind of work its time, the rule, the constants behind it, and an error bar.

The error of one kind of work is the largest residual of its fitted constants: what was measured on data left out of the fit.
Constants of another machine, or guessed, count as off by `UNMEASURED_PCT` at least. Errors within a kind are taken to go the
same way and are added; kinds are independent, so the total is the root of the sum of squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.constants import Constant
from planner.hardware import HardwareProfile
from planner.plan import Plan

UNMEASURED_PCT = 25.0

RULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "matmul": ("smooth roofline times a surface over (m, n, k)", ("gemm.", "clock.sustained")),
    "attention": (
        "the longest task of a tile of queries, and the others in turns over the multiprocessors",
        ("attention.efficiency", "attention.backward_rate", "clock.sustained"),
    ),
    "pointwise": ("bytes of a fused group over bandwidth, plus a launch", ("pointwise.efficiency", "pointwise.launch_us")),
    "optimizer": ("bytes of parameters, gradients and state over bandwidth", ("pointwise.efficiency",)),
}
"""Kind of work -> its rule, and where its constants are."""
MATMULS = ("linear", "einsum", "matmul", "mm", "bmm", "addmm", "baddbmm")
"""Names of ops that are matmuls; those of their gradients begin alike."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """What one kind of work takes in a plan, and why.

    Attributes:
        error_pct: expected error, in % of `us`.
        constants: by name, those that the rule reads.
        measured: every constant that can be fitted was fitted on this machine.
    """

    kind: str
    us: float
    rule: str
    error_pct: float
    constants: Mapping[str, Constant]

    @property
    def measured(self) -> bool:
        return all(c.kind in ("fitted", "measured", "datasheet") for c in self.constants.values() if _is_physical(c))

    def to_json(self) -> dict[str, Any]:
        return {
            "us": self.us,
            "error_pct": round(self.error_pct, 1),
            "rule": self.rule,
            "measured": self.measured,
            "constants": {
                name: {"kind": c.kind, "source": c.source, "date": c.date, "residual_pct": c.residual_pct, "range": c.range}
                for name, c in self.constants.items()
            },
        }


def prices(plan: Plan, hardware: HardwareProfile) -> tuple[Price, ...]:
    """Kinds of work of a plan, dearest first."""
    us: dict[str, float] = {}
    for key, choice in plan.choices.items():
        kind = _kind(key)
        us[kind] = us.get(kind, 0.0) + choice.compute_us
    found = [_price(kind, spent, *_rule(kind, hardware), hardware) for kind, spent in us.items()]
    moved: dict[tuple[str, bool], float] = {}
    for redistribution in plan.redistributions:
        for step in redistribution.steps:
            if step.collective is not None:
                across = _spans_nodes(plan, step.collective.axes)
                label = (str(step.collective.kind), across)
                moved[label] = moved.get(label, 0.0) + step.us
            else:
                moved["copies", False] = moved.get(("copies", False), 0.0) + step.us
    for (kind, across), spent in moved.items():
        found.append(_moved_price(kind, across, spent, hardware))
    return tuple(sorted((price for price in found if price.us > 0), key=lambda price: -price.us))


def total_error_pct(found: tuple[Price, ...]) -> float:
    """Expected error of the sum, in %."""
    total = sum(price.us for price in found)
    return math.sqrt(sum((price.us * price.error_pct) ** 2 for price in found)) / total if total else 0.0


def _rule(kind: str, hardware: HardwareProfile) -> tuple[str, tuple[str, ...]]:
    rule, prefixes = RULES[kind]
    name = hardware.attention.library
    parts = [f"attention.library_{part}.{name}" for part in ("rate", "start", "backward_start")]
    return rule, (*prefixes, *(parts if kind == "attention" else ()))


def _moved_price(kind: str, across: bool, us: float, hardware: HardwareProfile) -> Price:
    if kind == "copies":
        return _price("copies", us, "bytes read and written over bandwidth", ("pointwise.efficiency",), hardware)
    near = (f"node.collective.{kind}.",)
    if not across:
        return _price(f"{kind} in a node", us, "measured curve over bytes, by ranks", near, hardware)
    far = (*near, f"fabric.efficiency.{kind}", f"fabric.start_up.{kind}", "fabric.nic_bytes_per_s")
    return _price(f"{kind} across nodes", us, "start-up plus bytes over the tightest link", far, hardware)


def _price(kind: str, us: float, rule: str, prefixes: tuple[str, ...], hardware: HardwareProfile) -> Price:
    constants = {name: c for name, c in hardware.constants.items() if _is_part(name, prefixes)}
    residuals = [c.residual_pct or 0.0 for c in constants.values()]
    if any(c.kind in ("derived", "guess") and _is_physical(c) for c in constants.values()):
        residuals.append(UNMEASURED_PCT)
    return Price(kind=kind, us=us, rule=rule, error_pct=max(residuals, default=0.0), constants=constants)


def _is_part(name: str, of: tuple[str, ...]) -> bool:
    """Whether a constant is one of these, or belongs to one: names are dotted."""
    return any(name == prefix or name.startswith(f"{prefix.removesuffix('.')}.") for prefix in of)


def _is_physical(constant: Constant) -> bool:
    """Not merely where a table has its entries, or a name."""
    return constant.unit.startswith(("fraction", "us", "(", "blocks", "bytes", "FLOP", "log", "exponent"))


def _kind(key: str) -> str:
    if key.startswith("param:"):
        return "optimizer"
    op = key.split("/")[1] if "/" in key else ""
    if op.startswith("attention"):
        return "attention"
    return "matmul" if op.startswith(MATMULS) else "pointwise"


def _spans_nodes(plan: Plan, axes: tuple[int, ...]) -> bool:
    """A group reaches as far as the outermost of its axes: that axis times everything nearer."""
    return math.prod(plan.mesh.axis_sizes[min(axes) :]) > plan.gpus_per_node
