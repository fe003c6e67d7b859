"""Changing a tensor's placement: the single moves, and the cheapest legal sequence of them.

This one module lists the collectives of a placement change for the solver, the plan, the exporter and the counts: what is
priced is what is emitted.

A move changes one mesh axis, or several axes that make the same change in one step (a collective over their flattened group):

    S(d) -> R     all-gather                    P -> R      all-reduce
    S(d) -> S(e)  all-to-all                    P -> S(d)   reduce-scatter
    R -> S(d)     local narrow, no traffic
    R -> P(sum)   local: the first device keeps the value, the others zeros; no traffic

R -> P is offered to uses that add a whole tensor to a pending sum (`costing/pending.py`), nowhere else.

A dim sharded by several axes is split by the outermost first. So an axis may give up or take S(d) only if no later axis
outside the move shards d (otherwise the pieces would be strided).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from planner.placement import P_MAX, S0, P, Placements, R
from planner.strategy import Lattice

IMPOSSIBLE_US = float("inf")


class CollectiveKind(StrEnum):
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective call.

    Attributes:
        axes: mesh axes of the group, ascending; several axes are one flattened group.
        full_bytes: the largest buffer of one rank, as nccl-tests counts it: all-gather output, reduce-scatter input,
            all-reduce buffer, all-to-all send buffer.
        reduce_op: `sum` or `max` for reductions, "" otherwise.
    """

    kind: CollectiveKind
    axes: tuple[int, ...]
    full_bytes: int
    dtype: str
    reduce_op: str = ""


@dataclass(frozen=True, kw_only=True)
class Move:
    """One step of a redistribution: placements before and after, the collective (None: local), bytes read and written by
    copies."""

    source: Placements
    target: Placements
    collective: Collective | None
    copy_bytes: int
    us: float


@dataclass(frozen=True, eq=False)
class MoveGroup:
    """All moves of one lattice with the same change on the same axes; arrays of equal length, prices not included.

    Attributes:
        kind: the collective, None for a local narrow or R -> P.
        source, target: int32 placement numbers; each occurs once.
        full_bytes: float64, see `Collective`.
        copy_bytes: float64, bytes read plus written by re-layout copies around the collective.
    """

    kind: CollectiveKind | None
    axes: tuple[int, ...]
    reduce_op: str
    source: np.ndarray
    target: np.ndarray
    full_bytes: np.ndarray
    copy_bytes: np.ndarray


def _kind(old: int, new: int) -> CollectiveKind | None:
    if old in (P, P_MAX):
        return CollectiveKind.ALL_REDUCE if new == R else CollectiveKind.REDUCE_SCATTER
    if old == R:
        return None
    return CollectiveKind.ALL_GATHER if new == R else CollectiveKind.ALL_TO_ALL


def move_groups(lattice: Lattice, *, to_pending: bool = False) -> Iterator[MoveGroup]:
    """Every legal single move between placements of a lattice; R -> P among them if asked for."""
    real_axes = [axis for axis, size in enumerate(lattice.mesh.axis_sizes) if size > 1]
    used = sorted({int(code) for code in lattice.codes.ravel()})
    for count in range(1, len(real_axes) + 1):
        for axes in itertools.combinations(real_axes, count):
            for old, new in itertools.permutations(used, 2):
                if new not in (P, P_MAX) or (to_pending and (old, new) == (R, P)):
                    group = _group(lattice, axes, old, new)
                    if group is not None:
                        yield group


def _group(lattice: Lattice, axes: tuple[int, ...], old: int, new: int) -> MoveGroup | None:
    codes = lattice.codes
    legal = (codes[:, axes] == old).all(1)
    for code in (old, new):
        if code >= S0:
            for axis in axes:
                later = [b for b in range(axis + 1, codes.shape[1]) if b not in axes]
                legal &= ~(codes[:, later] == code).any(1)
    source = np.flatnonzero(legal)
    if not len(source):
        return None
    after = codes[source].copy()
    after[:, axes] = new
    target = lattice.index(after)
    source, target = source[target >= 0].astype(np.int32), target[target >= 0].astype(np.int32)
    if not len(source):
        return None
    kind = _kind(old, new)
    before_bytes, after_bytes = lattice.local_bytes[source], lattice.local_bytes[target]
    full_bytes = after_bytes if kind is CollectiveKind.ALL_GATHER else before_bytes if kind is not None else np.zeros(len(source))
    copied = np.zeros(len(source))
    if new == P:
        copied += after_bytes  # zeros are written; the device that keeps its value is not the slowest
    elif kind is None:
        copied += np.where(_is_strided(lattice, source, new), 2 * after_bytes, 0.0)
    else:
        # The collective works on pieces that lie one behind the other. A dim with something outside it needs a re-layout.
        if old >= S0:
            copied += np.where(_is_strided(lattice, target, old), 2 * full_bytes, 0.0)
        if new >= S0:
            copied += np.where(_is_strided(lattice, source, new), 2 * full_bytes, 0.0)
    reduce_op = {P: "sum", P_MAX: "max"}.get(old, "")
    return MoveGroup(kind, axes, reduce_op, source, target, full_bytes, copied)


def _is_strided(lattice: Lattice, numbers: np.ndarray, code: int) -> np.ndarray:
    """bool: pieces of the dim of `code` are not contiguous, because a dim before it has local size over 1."""
    return lattice.local_shapes[numbers, : code - S0].prod(1) > 1


@dataclass(frozen=True, eq=False)
class Routes:
    """Cheapest sequences of moves between all placements of a lattice.

    Attributes:
        table_us: float64 [source, target], `inf` where there is no way.
        previous: int32 [source, target], the placement before the last move, -1 on the diagonal and where impossible.
        group: int16 [source, target], the number in `groups` of the last move.
    """

    lattice: Lattice
    groups: tuple[MoveGroup, ...]
    move_us: tuple[np.ndarray, ...]
    table_us: np.ndarray
    previous: np.ndarray
    group: np.ndarray

    @cached_property
    def _position(self) -> tuple[dict[int, int], ...]:
        return tuple({int(s): i for i, s in enumerate(g.source)} for g in self.groups)

    def path(self, source: int, target: int) -> tuple[Move, ...]:
        """The moves from one placement number to another, in order. Their `us` add up to `table_us[source, target]`."""
        assert np.isfinite(self.table_us[source, target]), "no legal sequence"
        moves: list[Move] = []
        here = target
        while here != source:
            before, number = int(self.previous[source, here]), int(self.group[source, here])
            moves.append(self._move(number, before, here))
            here = before
        return tuple(reversed(moves))

    def _move(self, number: int, source: int, target: int) -> Move:
        group = self.groups[number]
        at = self._position[number][source]
        collective = None
        if group.kind is not None:
            collective = Collective(
                kind=group.kind, axes=group.axes, full_bytes=int(group.full_bytes[at]),
                dtype=self.lattice.meta.dtype, reduce_op=group.reduce_op,
            )  # fmt: skip
        return Move(
            source=self.lattice.placements(source), target=self.lattice.placements(target), collective=collective,
            copy_bytes=int(group.copy_bytes[at]), us=float(self.move_us[number][at]),
        )  # fmt: skip


def cheapest_routes(
    lattice: Lattice, price: Callable[[MoveGroup], np.ndarray], *, allow_reductions: bool = True, to_pending: bool = False
) -> Routes:
    """Shortest paths over single moves (Bellman-Ford, all sources at once).

    `price(group)` gives µs per move. Because the table is a shortest-path closure, direct is never dearer than via.
    Without reductions a pending sum keeps its P on every axis (used where a dtype rule says where a sum may be taken).
    With `to_pending` a replicated axis may become P(sum).
    """
    groups = tuple(g for g in move_groups(lattice, to_pending=to_pending) if allow_reductions or not g.reduce_op)
    return _closure(lattice, groups, [price(group) for group in groups])


def without(routes: Routes, forbidden: Callable[[MoveGroup], bool]) -> Routes:
    """The same prices where some moves must not be made: other ways are found, or there is none."""
    kept = [number for number, group in enumerate(routes.groups) if not forbidden(group)]
    if len(kept) == len(routes.groups):
        return routes
    return _closure(routes.lattice, tuple(routes.groups[n] for n in kept), [routes.move_us[n] for n in kept])


def _closure(lattice: Lattice, groups: tuple[MoveGroup, ...], prices: Sequence[np.ndarray]) -> Routes:
    size = len(lattice)
    to_from = np.full((size, size), IMPOSSIBLE_US)  # [target, source]: the rows that a group reads and writes lie together
    np.fill_diagonal(to_from, 0.0)
    previous = np.full((size, size), -1, np.int32)
    last = np.full((size, size), -1, np.int16)
    written = np.zeros(size, np.int64)  # when a row was last improved
    read = np.full(len(groups), -1, np.int64)  # when a group last read
    now = 0
    changed = True
    while changed:
        changed = False
        for number, (group, us) in enumerate(zip(groups, prices, strict=True)):
            fresh = np.flatnonzero(written[group.source] > read[number])
            if not len(fresh):
                continue
            now += 1
            read[number] = now
            here, there = group.source[fresh], group.target[fresh]
            offered = to_from[here] + us[fresh, None]
            better = offered < to_from[there] - 1e-9
            if better.any():
                changed = True
                row, source = np.nonzero(better)
                to_from[there[row], source] = offered[row, source]
                previous[source, there[row]] = here[row]
                last[source, there[row]] = number
                written[there[row]] = now
    table = np.ascontiguousarray(to_from.T)
    table.setflags(write=False)
    return Routes(lattice, groups, tuple(prices), table, previous, last)
