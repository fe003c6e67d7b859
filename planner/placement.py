"""Placements of a tensor on mesh axes: Replicate, Shard(dim), Partial(reduce_op); text form `R`, `S(0)`, `P`, `P(max)`.

Arrays use one int8 code per axis: 0 = R, 1 = P (sum), 2 = P(max), 3 + d = S(d). Tuples are in mesh-axis order: `S(0)R` is
sharded on dim 0 over axis 0 and replicated over axis 1. A dim sharded by several axes is split by the outermost first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.errors import InvalidConstraintError
from planner.mesh import Mesh

R, P, P_MAX, S0 = 0, 1, 2, 3


def shard_code(dim: int) -> int:
    return S0 + dim


@dataclass(frozen=True)
class Replicate:
    @property
    def code(self) -> int:
        return R

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Shard:
    dim: int

    @property
    def code(self) -> int:
        return S0 + self.dim

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Partial:
    """A pending reduction: the true value is the `reduce_op` over the ranks of the axis."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        assert self.reduce_op in ("sum", "max"), self.reduce_op

    @property
    def code(self) -> int:
        return P if self.reduce_op == "sum" else P_MAX

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else "P(max)"


Placement = Replicate | Shard | Partial
Placements = tuple[Placement, ...]


def from_code(code: int) -> Placement:
    if code == R:
        return Replicate()
    if code == P:
        return Partial()
    if code == P_MAX:
        return Partial("max")
    return Shard(int(code) - S0)


def from_codes(codes: Iterable[int]) -> Placements:
    return tuple(from_code(int(code)) for code in codes)


def to_codes(placements: Placements) -> tuple[int, ...]:
    return tuple(placement.code for placement in placements)


def text(placements: Placements) -> str:
    """`S(0)R`"""
    return "".join(map(str, placements))


def codes_text(codes: Iterable[int]) -> str:
    return text(from_codes(codes))


def identifier(placements: Placements) -> str:
    """`S0_R`: the spelling in exported files, where a Python name is needed."""
    return "_".join(str(p).replace("(", "").replace(")", "") for p in placements)


_ONE = re.compile(r"R|S\((\d+)\)|P\(max\)|P\(sum\)|P")


def _parse_one(token: str) -> Placement:
    if token == "R":
        return Replicate()
    if token.startswith("S"):
        return Shard(int(token[2:-1]))
    return Partial("max") if token == "P(max)" else Partial()


def parse(written: str, mesh: Mesh | None = None) -> Placements:
    """`S(0)R` or, given a mesh, `dp:S(0),tp:R` (axes not named are R) -> placements.

    Raises:
        InvalidConstraintError: malformed text, or another number of placements than the mesh has axes.
    """
    compact = written.replace(" ", "")
    hint = "Write one of R, S(dim), P per mesh axis, for example S(0)R, or name the axes: dp:S(0),tp:R."
    if ":" in compact:
        if mesh is None:
            raise InvalidConstraintError(f"placements {written!r} name axes, but no mesh is given", hint=hint)
        chosen: list[Placement] = [Replicate()] * mesh.num_axes
        for part in compact.split(","):
            name, _, token = part.partition(":")
            if not _ONE.fullmatch(token):
                raise InvalidConstraintError(f"{part!r} in {written!r} is not axis:placement", hint=hint)
            chosen[mesh.axis(name)] = _parse_one(token)
        return tuple(chosen)
    tokens = [m.group(0) for m in _ONE.finditer(compact)]
    if "".join(tokens) != compact or not tokens:
        raise InvalidConstraintError(f"{written!r} is not a list of placements", hint=hint)
    placements = tuple(_parse_one(token) for token in tokens)
    if mesh is not None and len(placements) != mesh.num_axes:
        raise InvalidConstraintError(
            f"{written!r} has {len(placements)} placements, the mesh {mesh} has {mesh.num_axes} axes", hint=hint
        )
    return placements


def num_shards(codes: Sequence[int], dim: int, mesh: Mesh) -> int:
    """Over how many devices `dim` is split."""
    total = 1
    for code, size in zip(codes, mesh.axis_sizes, strict=True):
        if code == S0 + dim:
            total *= size
    return total


def local_shape(shape: Sequence[int], placements: Placements, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one device's piece; shards are even, so every device holds the same."""
    codes = to_codes(placements)
    return tuple(size // num_shards(codes, dim, mesh) for dim, size in enumerate(shape))
