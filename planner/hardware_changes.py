"""A profile with changed fields, by its name: `h100_sxm@link=2,memory=0.5` has links of twice the bandwidth and half the memory.

The name goes along into plans, so every result says what was changed. Each changed constant is `derived` and says the factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import InputError

SEPARATOR = "@"
FIELDS = {
    "link": "bandwidth of the links inside a node",
    "network": "bandwidth of the network between nodes",
    "hbm": "bandwidth of device memory",
    "memory": "size of device memory",
    "clock": "clock, which peak FLOP/s go with",
}
"""Field -> what it means."""
LOWEST, HIGHEST = 0.1, 10.0


def parse_changes(text: str) -> dict[str, float]:
    """`link=2,memory=0.5` -> factors by field, in the order of FIELDS. Raises InputError."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        field, _, number = part.partition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if field not in FIELDS or field in found or not LOWEST <= factor <= HIGHEST:
            raise InputError(
                f"{part!r} is no change of a hardware profile",
                hint=f"Write FIELD=FACTOR once per field, fields {', '.join(FIELDS)}, factors from {LOWEST:g} to {HIGHEST:g}.",
            )
        found[field] = factor
    return {field: found[field] for field in FIELDS if found.get(field, 1.0) != 1.0}


def changes_text(factors: Mapping[str, float]) -> str:
    """`link=2,memory=0.5`, "" for none; `parse_changes` reads it back."""
    return ",".join(f"{field}={factors[field]:.6g}" for field in FIELDS if factors.get(field, 1.0) != 1.0)


def split_name(name: str) -> tuple[str, str, dict[str, float]]:
    """(machine, network or "", factors) of `h100_sxm+roce_8x400g@link=2`. Raises InputError."""
    base, _, changes = name.partition(SEPARATOR)
    machine, _, fabric = base.partition("+")
    return machine, fabric, parse_changes(changes)


def joined_name(machine: str, fabric: str, factors: Mapping[str, float]) -> str:
    changes = changes_text(factors)
    return machine + (f"+{fabric}" if fabric else "") + (f"{SEPARATOR}{changes}" if changes else "")


def changed(data: Mapping[str, Any], factors: Mapping[str, float]) -> dict[str, Any]:
    """The content of a profile file with the changes."""
    found = dict(data)
    for field, factor in factors.items():
        for path, change in _CONSTANTS[field]:
            found = _with(found, path.split("."), field, factor, change)
    return found


def _times(value: Any, factor: float) -> Any:
    return round(value * factor) if isinstance(value, int) else value * factor


def _faster(curve: Any, factor: float) -> Any:
    """(bytes, µs) of a collective: what it takes beyond its time for the fewest bytes shrinks with the bandwidth."""
    start = min(us for _, us in curve)
    return [[size, start + (us - start) / factor] for size, us in curve]


_CONSTANTS: dict[str, tuple[tuple[str, Callable[[Any, float], Any]], ...]] = {
    "link": (("node.link_bytes_per_s", _times), ("node.collective", _faster)),
    "network": (("fabric.nic_bytes_per_s", _times),),
    "hbm": (("memory.hbm_bytes_per_s", _times),),
    "memory": (("memory.hbm_bytes", _times), ("memory.usable_bytes", _times)),
    "clock": (("peak", _times),),
}
"""Field -> constants, or branches of them, and how a factor changes their values."""


def _with(
    tree: Mapping[str, Any], path: list[str], field: str, factor: float, change: Callable[[Any, float], Any]
) -> dict[str, Any]:
    found = dict(tree)
    for key in path[:1] or list(found):
        branch = found[key]
        if not path and "value" in branch:
            source = f"what if {field} were {factor:g} times: {branch['source']}"
            kept = {name: branch[name] for name in ("unit", "date")}
            found[key] = {**kept, "value": change(branch["value"], factor), "kind": "derived", "source": source}
        elif len(path) == 1 and "value" in branch:
            found[key] = _with({key: branch}, [], field, factor, change)[key]
        else:
            found[key] = _with(branch, path[1:], field, factor, change)
    return found
