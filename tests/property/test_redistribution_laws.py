"""Laws of the price of a placement change, on meshes of one to four axes, from 100 kB to 10 GB."""

import itertools
from functools import cache

import numpy as np
import pytest

from planner.costing.collective import mesh_collectives
from planner.costing.redistribution import copy_us, move_price
from planner.graph import TensorMeta
from planner.hardware import load_profile
from planner.mesh import Mesh
from planner.placement import P_MAX, S0, P, R, parse
from planner.redistribution import Routes, cheapest_routes
from planner.strategy import Lattice

MESHES = ("a=8", "a=6", "a=4,b=8", "a=32,b=8", "a=16,b=2", "a=2,b=2,c=8", "a=4,b=3,c=2", "a=2,b=2,c=2,d=2", "a=2,b=4,c=4,d=2")
SHAPES = ((768, 96), (768, 768), (6144, 12288), (49152, 98304))
PROFILES = ("h100_sxm", "b200")
"""Profiles with curves of their own; the others share theirs."""
CASES = [(name, mesh, shape) for name in PROFILES for mesh in MESHES for shape in SHAPES]


@cache
def routes_of(hardware: str, mesh: str, shape: tuple[int, int], dtype: str = "bfloat16") -> Routes:
    profile, parsed = load_profile(hardware), Mesh.parse(mesh)
    lattice = Lattice.build(TensorMeta(shape, dtype), parsed, dims=(0, 1), partial_code=P)
    return cheapest_routes(lattice, move_price(profile, mesh_collectives(profile, parsed, profile.gpus_per_node), dtype))


def us(routes: Routes, source: str, target: str) -> float:
    numbers = [routes.lattice.find(parse(text)) for text in (source, target)]
    assert min(numbers) >= 0, (source, target)
    return float(routes.table_us[numbers[0], numbers[1]])


@pytest.mark.parametrize(("hardware", "mesh", "shape"), CASES)
def test_direct_costs_no_more_than_via(hardware: str, mesh: str, shape: tuple[int, int]) -> None:
    table = routes_of(hardware, mesh, shape).table_us
    for via in range(len(table)):
        assert (table <= table[:, via, None] + table[None, via, :] + 1e-6).all()


@pytest.mark.parametrize(("hardware", "mesh", "shape"), CASES)
def test_no_price_is_negative_and_impossible_is_marked(hardware: str, mesh: str, shape: tuple[int, int]) -> None:
    """Only a pending sum can be the source of one: no move of this table makes it."""
    routes = routes_of(hardware, mesh, shape)
    table, codes = routes.table_us, routes.lattice.codes
    assert (np.diag(table) == 0).all() and (table >= 0).all()
    appears = ((codes[None, :, :] == P) & (codes[:, None, :] != P)).any(-1)
    assert np.array_equal(np.isinf(table), appears)


@pytest.mark.parametrize(("hardware", "mesh", "shape"), CASES)
def test_cutting_from_replicated_needs_no_communication(hardware: str, mesh: str, shape: tuple[int, int]) -> None:
    routes = routes_of(hardware, mesh, shape)
    codes = routes.lattice.codes
    replicated = int(np.flatnonzero((codes == R).all(1))[0])
    for target in np.flatnonzero((codes != P).all(1)):
        path = routes.path(replicated, int(target))
        assert all(move.collective is None for move in path)
        if (codes[target] <= S0).all():  # R and S(0): a view
            assert routes.table_us[replicated, target] == 0


@pytest.mark.parametrize(("hardware", "mesh", "shape"), CASES)
def test_the_table_is_the_sum_of_the_emitted_moves(hardware: str, mesh: str, shape: tuple[int, int]) -> None:
    """Same move, same number: each collective priced by itself, plus its copies."""
    profile, routes = load_profile(hardware), routes_of(hardware, mesh, shape)
    collectives = mesh_collectives(profile, routes.lattice.mesh, profile.gpus_per_node)
    rng = np.random.default_rng(0)
    possible = np.argwhere(np.isfinite(routes.table_us))
    for source, target in rng.permutation(possible)[:60]:
        total = 0.0
        for move in routes.path(int(source), int(target)):
            total += float(copy_us(profile, np.array(float(move.copy_bytes))))
            if (c := move.collective) is not None:
                total += float(collectives.us(c.kind, c.axes, np.array(float(c.full_bytes)), c.dtype))
        assert total == pytest.approx(routes.table_us[source, target], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("hardware", PROFILES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mesh", ["a=4,b=8", "a=32,b=8", "a=16,b=2"])
def test_named_moves_on_two_axes(hardware: str, mesh: str, shape: tuple[int, int]) -> None:
    routes = routes_of(hardware, mesh, shape)
    assert us(routes, "PP", "RR") <= us(routes, "PP", "S(0)S(0)") + us(routes, "S(0)S(0)", "RR") + 1e-9
    assert us(routes, "S(0)S(0)", "S(0)R") < us(routes, "S(0)S(0)", "RS(0)")
    assert us(routes, "RP", "S(0)R") <= us(routes, "RP", "S(0)P") + us(routes, "S(0)P", "S(0)R") + 1e-9
    for axis in ("S({})R", "RS({})"):
        # Up to 3 %: S(1) may first cut dim 0 for free over the near axis, gather less over the far one, then gather near;
        # from S(0) the same detour cuts dim 1, which is a copy.
        assert us(routes, axis.format(0), "RR") <= 1.03 * us(routes, axis.format(1), "RR")
        # An all-to-all may be carried out as a gather and a cut; the cut of dim 1 is a copy.
        cut = us(routes, "RR", axis.format(1))
        assert us(routes, axis.format(0), axis.format(1)) <= us(routes, axis.format(0), "RR") + cut + 1e-9
    assert us(routes, "S(0)R", "RS(0)") <= us(routes, "S(0)R", "RR") + 1e-9


@pytest.mark.parametrize("hardware", PROFILES)
@pytest.mark.parametrize("mesh", ["a=8", "a=6"])
def test_gathering_a_later_dim_costs_no_less(hardware: str, mesh: str) -> None:
    for shape in SHAPES:
        routes = routes_of(hardware, mesh, shape)
        assert us(routes, "S(0)", "R") <= us(routes, "S(1)", "R")


@pytest.mark.parametrize("hardware", PROFILES)
def test_more_bytes_cost_no_less(hardware: str) -> None:
    for mesh in ("a=4,b=8", "a=2,b=2,c=8"):
        tables = [routes_of(hardware, mesh, shape).table_us for shape in SHAPES]
        for small, large in itertools.pairwise(tables):
            known = np.isfinite(small)
            assert (small[known] <= large[known] + 1e-9).all()


@pytest.mark.parametrize("hardware", PROFILES)
def test_reducing_in_fp32_moves_twice_the_bytes(hardware: str) -> None:
    low, wide = (routes_of(hardware, "a=32,b=8", (49152, 98304), dtype) for dtype in ("bfloat16", "float32"))
    assert us(wide, "PR", "RR") == pytest.approx(2 * us(low, "PR", "RR"), rel=0.1)


def test_without_reductions_pending_sums_stay_pending() -> None:
    profile, mesh = load_profile("h100_sxm"), Mesh.parse("a=4,b=8")
    lattice = Lattice.build(TensorMeta((96, 96), "bfloat16"), mesh, dims=(0, 1), partial_code=P)
    price = move_price(profile, mesh_collectives(profile, mesh, 8), "bfloat16")
    kept = cheapest_routes(lattice, price, allow_reductions=False).table_us
    free = cheapest_routes(lattice, price).table_us
    pending = lattice.codes == P
    same = (pending[:, None, :] == pending[None, :, :]).all(-1)
    assert np.isinf(kept[~same]).all() and np.isfinite(kept[same]).all()
    assert (kept[same] >= free[same] - 1e-9).all()
    assert (lattice.codes != P_MAX).all()
