"""Placement changes carried out on numbers: pieces on the devices of a mesh, moved as the planned steps say, in numpy."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costing.collective import mesh_collectives
from planner.costing.redistribution import move_price
from planner.graph import TensorMeta
from planner.hardware import load_profile
from planner.mesh import Mesh
from planner.placement import P_MAX, S0, P, R, parse, to_codes
from planner.redistribution import CollectiveKind, Routes, cheapest_routes
from planner.strategy import Lattice

MESHES = ("a=4", "a=6", "a=2,b=2", "a=2,b=3", "a=3,b=2", "a=2,b=2,c=2", "a=2,b=1,c=3")
SHAPES = ((12,), (24, 12), (2, 12, 24))
Pieces = dict[tuple[int, ...], np.ndarray]
Codes = tuple[int, ...]


@cache
def routes_of(mesh: str, shape: tuple[int, ...], partial: int, to_pending: bool) -> Routes:
    profile, parsed = load_profile("h100_sxm"), Mesh.parse(mesh)
    lattice = Lattice.build(TensorMeta(shape, "float32"), parsed, dims=tuple(range(len(shape))), partial_code=partial)
    price = move_price(profile, mesh_collectives(profile, parsed, 8), "float32")
    return cheapest_routes(lattice, price, to_pending=to_pending)


# ---- the simulation: every device its piece, every move by groups of devices ---------------------------------------------
def cut(full: np.ndarray, codes: Codes, mesh: Mesh, rng: np.random.Generator) -> Pieces:
    """Splits from the outermost axis inwards; pending sums and maxima in random parts."""
    pieces: Pieces = {(): full}
    for code, size in zip(codes, mesh.axis_sizes, strict=True):
        pieces = {(*at, i): part for at, whole in pieces.items() for i, part in enumerate(_parts(whole, code, size, rng))}
    return pieces


def _parts(whole: np.ndarray, code: int, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    if code == R:
        return [whole] * size
    if code >= S0:
        return np.split(whole, size, code - S0)
    others = [rng.integers(-50, 50, whole.shape) for _ in range(size - 1)]
    if code == P:
        return [*others, whole - sum(others)]
    return [np.minimum(whole, other) for other in others] + [whole]


def join(pieces: Pieces, codes: Codes, mesh: Mesh) -> np.ndarray:
    """The whole tensor; copies that differ are an error."""
    for axis in reversed(range(mesh.num_axes)):
        groups: dict[tuple[int, ...], list[np.ndarray]] = {}
        for at in sorted(pieces):
            groups.setdefault(at[:axis], []).append(pieces[at])
        pieces = {at: _whole(parts, codes[axis]) for at, parts in groups.items()}
    return pieces[()]


def _whole(parts: list[np.ndarray], code: int) -> np.ndarray:
    if code == R:
        assert all(np.array_equal(parts[0], part) for part in parts), "copies differ"
        return parts[0]
    if code >= S0:
        return np.concatenate(parts, code - S0)
    return np.sum(parts, axis=0) if code == P else np.max(parts, axis=0)


def moved(pieces: Pieces, source: Codes, target: Codes, mesh: Mesh) -> Pieces:
    """One step: all axes that change do so in one group, whose devices count from the outermost axis inwards."""
    axes = [axis for axis in range(mesh.num_axes) if source[axis] != target[axis]]
    old, new = source[axes[0]], target[axes[0]]
    assert all((source[axis], target[axis]) == (old, new) for axis in axes)
    result: Pieces = {}
    outside = [range(1) if axis in axes else range(size) for axis, size in enumerate(mesh.axis_sizes)]
    for first in itertools.product(*outside):
        inside = itertools.product(*(range(mesh.axis_sizes[axis]) for axis in axes))
        group = [tuple(dict(zip(axes, at, strict=True)).get(a, first[a]) for a in range(mesh.num_axes)) for at in inside]
        result.update(zip(group, _of_group([pieces[at] for at in group], old, new), strict=True))
    return result


def _of_group(given: list[np.ndarray], old: int, new: int) -> list[np.ndarray]:
    count = len(given)
    if old == R and new == P:
        return [given[0], *(np.zeros_like(part) for part in given[1:])]
    if old == R:
        return [np.split(part, count, new - S0)[at] for at, part in enumerate(given)]
    whole = _whole(given, old)
    return [whole] * count if new == R else np.split(whole, count, new - S0)


def carried_out(pieces: Pieces, routes: Routes, source: int, target: int) -> Pieces:
    for move in routes.path(source, target):
        pieces = moved(pieces, to_codes(move.source), to_codes(move.target), routes.lattice.mesh)
    return pieces


# ---- values ---------------------------------------------------------------------------------------------------------------
@st.composite
def walks(draw: st.DrawFn) -> tuple[Routes, list[int], int]:
    """Routes of a lattice, a start, and one to three placements in a row that can be reached; a seed."""
    partial, to_pending = draw(st.sampled_from([(P, False), (P, True), (P_MAX, False)]))
    routes = routes_of(draw(st.sampled_from(MESHES)), draw(st.sampled_from(SHAPES)), partial, to_pending)
    stops = [draw(st.integers(0, len(routes.lattice) - 1))]
    for _ in range(draw(st.integers(1, 3))):
        stops.append(int(draw(st.sampled_from(list(np.flatnonzero(np.isfinite(routes.table_us[stops[-1]])))))))
    return routes, stops, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=150, deadline=None)
@given(walks())
def test_every_way_keeps_the_tensor(walk: tuple[Routes, list[int], int]) -> None:
    """Direct or via others: the pieces make up the same tensor, and no more is paid for the direct way."""
    routes, stops, seed = walk
    lattice, rng = routes.lattice, np.random.default_rng(seed)
    full = rng.integers(-100, 100, lattice.meta.shape)
    codes = [tuple(map(int, lattice.codes[stop])) for stop in stops]
    pieces, paid = cut(full, codes[0], lattice.mesh, rng), 0.0
    for here, there in itertools.pairwise(stops):
        pieces = carried_out(pieces, routes, here, there)
        paid += float(routes.table_us[here, there])
    assert {part.shape for part in pieces.values()} == {tuple(lattice.local_shapes[stops[-1]])}
    assert np.array_equal(join(pieces, codes[-1], lattice.mesh), full)
    assert routes.table_us[stops[0], stops[-1]] <= paid + 1e-6


@settings(max_examples=80, deadline=None)
@given(walks())
def test_gathering_what_was_scattered_gives_every_device_its_piece_back(walk: tuple[Routes, list[int], int]) -> None:
    """From any placement without pending sums to a finer one, which is free of communication, and back: bit for bit."""
    routes, stops, seed = walk
    lattice, start = routes.lattice, stops[0]
    codes = lattice.codes
    if ((codes[start] == P) | (codes[start] == P_MAX)).any():
        start = int(np.flatnonzero((codes == R).all(1))[0])
    rng = np.random.default_rng(seed)
    finer = np.flatnonzero(((codes == codes[start]) | ((codes[start] == R) & (codes >= S0))).all(1))
    there = int(rng.choice(finer))
    if not np.isfinite(routes.table_us[start, there]):
        return
    whole = rng.integers(-100, 100, lattice.meta.shape)
    before = cut(whole, tuple(map(int, codes[start])), lattice.mesh, rng)
    scattered = carried_out(before, routes, start, there)
    after = carried_out(scattered, routes, there, start)
    assert all(np.array_equal(before[at], after[at]) for at in before)
    if lattice.mesh.num_axes == 1:
        assert all(move.collective is None for move in routes.path(start, there))
        assert all(move.collective.kind is CollectiveKind.ALL_GATHER for move in routes.path(there, start) if move.collective)


def test_a_pending_sum_of_a_whole_tensor_is_held_by_the_first_device() -> None:
    routes = routes_of("a=2,b=2", (24, 12), P, True)
    full = np.arange(24 * 12).reshape(24, 12)
    source, target = (routes.lattice.find(parse(text)) for text in ("RR", "PP"))
    (move,) = routes.path(source, target)
    assert move.collective is None and move.copy_bytes == 24 * 12 * 4
    pieces = carried_out(dict.fromkeys(itertools.product(range(2), range(2)), full), routes, source, target)
    assert np.array_equal(pieces[0, 0], full) and all(not pieces[at].any() for at in pieces if at != (0, 0))


# ---- prices ---------------------------------------------------------------------------------------------------------------
@cache
def priced(hardware: str, mesh: str, shape: tuple[int, ...], to_pending: bool) -> Routes:
    profile, parsed = load_profile(hardware), Mesh.parse(mesh)
    lattice = Lattice.build(TensorMeta(shape, "bfloat16"), parsed, dims=tuple(range(len(shape))), partial_code=P)
    return cheapest_routes(lattice, move_price(profile, mesh_collectives(profile, parsed, 8), "bfloat16"), to_pending=to_pending)


@pytest.mark.parametrize("mesh", ["a=8", "a=32,b=8", "a=2,b=4,c=8"])
@pytest.mark.parametrize("to_pending", [False, True])
@settings(max_examples=6, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), factors=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_more_bytes_never_cost_less(mesh: str, to_pending: bool, rows: int, columns: int, factors: tuple[int, int]) -> None:
    """A tensor that is longer in some dims, by any whole factors: every change of placement costs at least as much."""
    small = priced("h100_sxm", mesh, (256 * rows, 256 * columns), to_pending)
    large = priced("h100_sxm", mesh, (256 * rows * factors[0], 256 * columns * factors[1]), to_pending)
    known = np.isfinite(small.table_us)
    assert np.array_equal(small.lattice.codes, large.lattice.codes) and np.array_equal(known, np.isfinite(large.table_us))
    assert (small.table_us[known] <= large.table_us[known] + 1e-6).all()


@pytest.mark.parametrize("mesh", ["a=8", "a=32,b=8", "a=2,b=4,c=8"])
def test_becoming_pending_makes_no_change_dearer_and_needs_no_communication(mesh: str) -> None:
    """It may make one cheaper: a sum over far devices is taken faster by all devices of the nodes."""
    plain, more = (priced("h100_sxm", mesh, (4096, 2048), to_pending) for to_pending in (False, True))
    known = np.isfinite(plain.table_us)
    assert (more.table_us[known] <= plain.table_us[known] + 1e-6).all() and np.isfinite(more.table_us).all()
    codes = plain.lattice.codes
    whole = int(np.flatnonzero((codes == R).all(1))[0])
    for target in np.flatnonzero(((codes == R) | (codes == P)).all(1)):
        assert all(move.collective is None for move in more.path(whole, int(target)))
