"""Which slice of a tensor each rank holds, as a matrix of the mesh: the last axis across, the others down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner import Mesh

MOST_SHOWN = 16
"""Rows and columns shown; of more, the first ones and the last."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One device. `slices` is its (start, stop) per tensor dim; `number` the same for equal slices; `part` says which share of
    a pending reduction it holds, "" if none."""

    rank: int
    slices: tuple[tuple[int, int], ...]
    number: int
    part: str

    def text(self, shape: Sequence[int]) -> str:
        """`[0:8, :]`"""
        whole = zip(self.slices, shape, strict=True)
        return f"[{', '.join(':' if (a, b) == (0, n) else f'{a}:{b}' for (a, b), n in whole)}]"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """`rows` are (label, cells); None stands for what is left out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    shape: tuple[int, ...]
    distinct: int
    copies: int
    devices: int

    @property
    def summary(self) -> str:
        pieces = "the whole tensor on every device" if self.distinct == 1 else f"{self.distinct:,} different pieces"
        copies = f", each held by {self.copies:,} devices" if self.distinct > 1 and self.copies > 1 else ""
        return f"{pieces}{copies}; {self.devices:,} devices"


def grid(shape: Sequence[int], placements: Sequence[object], mesh: Mesh) -> Grid:
    """`placements` one per mesh axis. A dim split by several axes is split by the outermost first."""
    dims = [getattr(p, "dim", None) for p in placements]
    shards = [math.prod(n for n, d in zip(mesh.axis_sizes, dims, strict=True) if d == dim) for dim in range(len(shape))]
    pending = [str(p) if str(p).startswith("P") else "" for p in placements]
    distinct = math.prod(shards)
    outer, across = mesh.axis_names[:-1], mesh.axis_names[-1]
    columns = _shown(mesh.axis_sizes[-1])
    places = list(itertools.product(*(range(n) for n in mesh.axis_sizes[:-1])))

    def cell(place: tuple[int, ...]) -> Cell:
        slices, number = [], 0
        for dim, size in enumerate(shape):
            piece = _index(place, [d == dim for d in dims], mesh)
            step = size // shards[dim]
            slices.append((piece * step, (piece + 1) * step))
            number = number * shards[dim] + piece
        part = ", ".join(f"{mark} {axis} {i}" for mark, axis, i in zip(pending, mesh.axis_names, place, strict=True) if mark)
        return Cell(rank=_index(place, [True] * len(place), mesh), slices=tuple(slices), number=number, part=part)

    rows: list[tuple[str, tuple[Cell | None, ...]]] = []
    for index in _shown(len(places)):
        if index is None:
            rows.append(("…", (None,) * len(columns)))
            continue
        label = " ".join(f"{axis} {i}" for axis, i in zip(outer, places[index], strict=True))
        rows.append((label, tuple(None if c is None else cell((*places[index], c)) for c in columns)))
    return Grid(
        columns=tuple("…" if c is None else f"{across} {c}" for c in columns), rows=tuple(rows), shape=tuple(shape),
        distinct=distinct, copies=mesh.num_devices // distinct, devices=mesh.num_devices,
    )  # fmt: skip


def _shown(size: int) -> list[int | None]:
    return list(range(size)) if size <= MOST_SHOWN else [*range(MOST_SHOWN - 2), None, size - 1]


def _index(place: Sequence[int], counts: Sequence[bool], mesh: Mesh) -> int:
    """Row-major number of a place among the axes that count."""
    number = 0
    for i, size, use in zip(place, mesh.axis_sizes, counts, strict=True):
        if use:
            number = number * size + i
    return number
