"""Numbers that say where they come from: tables of TOML with `value, unit, kind, source, date`, and for fitted ones
`residual_pct, rows, range`. One that lacks any of these does not load.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import InputError

COMMON_FOLDER = Path(__file__).parent / "hardware_profiles" / "common"
CONSTANT_KINDS = ("datasheet", "measured", "fitted", "derived", "guess")
REQUIRED = ("value", "unit", "kind", "source", "date")
REQUIRED_IF_FITTED = ("residual_pct", "rows", "range")


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One number, curve or table of a profile.

    Attributes:
        value: a number, (x, y) pairs or rows of numbers.
        kind: `datasheet`; `measured` by the source; `fitted` to measurements of this hardware; `derived` from those of other
            hardware; `guess`.
        date: when it was looked up or fitted, ISO.
        residual_pct: fitted only: mean absolute error in % on data left out of the fit.
        rows, range: fitted only: how many measurements, and over which range they reach.
    """

    value: Any
    unit: str
    kind: str
    source: str
    date: str
    residual_pct: float | None = None
    rows: int | None = None
    range: str = ""

    def to_dict(self) -> dict[str, Any]:
        names = REQUIRED + (REQUIRED_IF_FITTED if self.kind == "fitted" else ())
        return {name: thaw(getattr(self, name)) for name in names}


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the hardware profile {path.name} is not TOML: {error}", hint="Check the line it names.") from error


def common_constants(name: str) -> dict[str, Constant]:
    """Constants that are the same for all machines, by dotted name: the file `common/NAME.toml`. They are no part of a profile's
    hash, since no price of a plan depends on them.

    Raises InputError if the file is damaged or a number lacks its provenance.
    """
    data = read_toml(COMMON_FOLDER / f"{name}.toml")
    return constants_in({key: value for key, value in data.items() if key not in ("schema", "title")})


def freeze(value: Any) -> Any:
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def thaw(value: Any) -> Any:
    return list(map(thaw, value)) if isinstance(value, tuple) else value


def constants_in(data: Mapping[str, Any], prefix: str = "") -> dict[str, Constant]:
    """Dotted name -> constant, for every table that has a field of a constant."""
    found: dict[str, Constant] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if not isinstance(value, dict):
            raise InputError(
                f"hardware profile: {key} is a bare value", hint=f"Write a table [{key}] with {', '.join(REQUIRED)}."
            )
        if set(value) & set(REQUIRED):
            found[key] = _constant(key, value)
        else:
            found.update(constants_in(value, f"{key}."))
    return found


def _constant(key: str, table: Mapping[str, Any]) -> Constant:
    required = REQUIRED + (REQUIRED_IF_FITTED if table.get("kind") == "fitted" else ())
    missing = [name for name in required if table.get(name) in (None, "")]
    unknown = sorted(set(table) - set(REQUIRED) - set(REQUIRED_IF_FITTED))
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown fields {', '.join(unknown)}"
        raise InputError(f"hardware profile: {key} {problem}", hint="Say where the number comes from, or drop it.")
    if table["kind"] not in CONSTANT_KINDS:
        raise InputError(f"hardware profile: {key} has kind {table['kind']!r}", hint=f"Kinds are {', '.join(CONSTANT_KINDS)}.")
    return Constant(**{name: freeze(value) for name, value in table.items()} | {"date": str(table["date"])})
