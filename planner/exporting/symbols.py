"""Sizes as symbols: every size in an exported file is written as a product of the model's named sizes.

A number seen in two traces of one model at different sizes (4096 and 256) tells which named sizes it is made of (`D`). Where two
products of equally few names fit, nothing tells them apart, and nothing is guessed: such a size is a constant of its own, with
its full and its tiny value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.errors import ExportError
from planner.mesh import Mesh
from planner.placement import Placements, Shard

END = 2**62
"""Slice ends at or beyond this mean `to the end`."""

MAX_FACTORS = 4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The named sizes of one model, at full and at tiny size.

    Attributes:
        full, tiny: name -> value, the same names in the same order. `tiny` is None when the model was traced at one size only:
            then sizes are literal numbers.
        axis_names: one Python name per mesh axis, holding the number of devices along it in the exported file.
    """

    full: Mapping[str, int]
    tiny: Mapping[str, int] | None
    axis_names: tuple[str, ...]
    found: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Answers so far; belongs to one export."""
    unnamed: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)
    """Constants for sizes that are no product of named sizes, or of which two products fit."""

    def factors(self, full: int, tiny: int) -> tuple[str, ...]:
        """The names (or one literal) whose product is `full` at full size and `tiny` at tiny size, fewest names first.

        Where no product fits, or several of the same number of names, the size becomes a constant of its own, such as N128.
        """
        key = (full, tiny)
        if key not in self.found:
            self.found[key] = self._solve(full, tiny)
        return self.found[key]

    def _solve(self, full: int, tiny: int) -> tuple[str, ...]:
        if self.tiny is None or full == tiny:
            return (str(full),)
        for count in range(1, MAX_FACTORS + 1):
            hits = [names for names in itertools.combinations(self.full, count) if self._product(names) == (full, tiny)]
            if len(hits) == 1:
                return hits[0]
            if hits:
                return (self.constant(full, tiny),)
        return self._with_literal(full, tiny) or (self.constant(full, tiny),)

    def constant(self, full: float, tiny: float) -> str:
        """A new name for a number that is no product of named sizes: `N4096`, `X1` if it is no whole number."""
        if isinstance(full, float):
            name = next(name for number in range(1, len(self.unnamed) + 2) if (name := f"X{number}") not in self.unnamed)
            self.unnamed[name] = (full, tiny)
            return name
        name, count = f"N{full}", 1
        while name in self.full or name in self.unnamed:
            count += 1
            name = f"N{full}_{count}"
        self.unnamed[name] = (full, tiny)
        return name

    def values(self) -> tuple[dict[str, float], dict[str, float]]:
        """All names of the file with their full and their tiny values, unnamed ones last."""
        assert self.tiny is not None
        full = {**self.full, **{name: pair[0] for name, pair in self.unnamed.items()}}
        return full, {**self.tiny, **{name: pair[1] for name, pair in self.unnamed.items()}}

    def _with_literal(self, full: int, tiny: int) -> tuple[str, ...] | None:
        """`HD//2`, `2*D`: one product of named sizes times, or divided by, a small number."""
        for count in (1, 2, 3):
            for by in (2, 3, 4):
                for names in itertools.combinations(self.full, count):
                    a, b = self._product(names)
                    if (a, b) == (full * by, tiny * by):
                        return (f"({'*'.join(names)}//{by})",)
                    if (a * by, b * by) == (full, tiny):
                        return (str(by), *names)
        return None

    def _product(self, names: Sequence[str]) -> tuple[int, int]:
        assert self.tiny is not None
        return math.prod(self.full[name] for name in names), math.prod(self.tiny[name] for name in names)

    def number(self, full: int, tiny: int) -> str:
        if full >= END:
            return "END"
        if full < 0 or tiny < 0:
            if full < 0 and tiny < 0 and full != tiny:
                return "-" + self._bracketed(-full, -tiny)
            if full != tiny:
                raise ExportError(f"the number {full} changes its sign at tiny size ({tiny})", hint="This op cannot be exported.")
            return str(full)
        return "*".join(self.factors(full, tiny))

    def _bracketed(self, full: int, tiny: int) -> str:
        parts = self.factors(full, tiny)
        return parts[0] if len(parts) == 1 else f"({'*'.join(parts)})"

    def real(self, full: float, tiny: float) -> str:
        """A float that may depend on the sizes: `N`, `1/N`; otherwise it must be equal at both sizes."""
        if self.tiny is None or full == tiny or (math.isnan(full) and math.isnan(tiny)):
            return _float_text(full)
        if full.is_integer() and tiny.is_integer():
            return self.number(int(full), int(tiny))
        for power, form in ((-1.0, "1/{}"), (-2.0, "{}**-0.5"), (2.0, "{}**0.5"), (-4.0, "{}**-0.25")):
            a, b = full**power, tiny**power
            if _nearly_integer(a) and _nearly_integer(b):
                return form.format(self._bracketed(round(a), round(b)))
        raise ExportError(
            f"the constant {full!r} (tiny: {tiny!r}) depends on the model's sizes in an unknown way",
            hint="Write it in the model as a product, or as one over a product, of named sizes.",
        )

    def local(self, full: int, tiny: int, placements: Placements | None, dim: int) -> str:
        """Size of one device's piece of a dim: `H*HD//TP`."""
        axes = [name for name, p in zip(self.axis_names, placements or (), strict=False) if p == Shard(dim)]
        return "//".join([self.number(full, tiny), *axes])

    def shape(self, full: Sequence[int], tiny: Sequence[int], placements: Placements | None = None) -> str:
        """`[B//DP, S, H//TP, HD]`"""
        dims = [self.local(a, b, placements, dim) for dim, (a, b) in enumerate(zip(full, tiny, strict=True))]
        return f"[{', '.join(dims)}]"


def axis_variables(mesh: Mesh, taken: Sequence[str]) -> tuple[str, ...]:
    """One constant name per mesh axis (`dp` -> `DP`), different from the names of sizes."""
    return tuple(f"{name.upper()}_AXIS" if name.upper() in taken else name.upper() for name in mesh.axis_names)


def _nearly_integer(value: float) -> bool:
    return abs(value) < 2**52 and value != 0 and abs(value - round(value)) < 1e-9 * abs(value)


def _float_text(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'
