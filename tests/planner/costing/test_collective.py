"""Groups of a mesh, and curves that pass through what was measured."""

import numpy as np
import pytest

from planner.costing.collective import GroupShape, group_curves, group_shape, mesh_collectives
from planner.hardware import load_profile
from planner.mesh import Mesh
from planner.redistribution import CollectiveKind
from planner.units import MIB

H100 = load_profile("h100_sxm")
KIND = CollectiveKind


@pytest.mark.parametrize(
    ("mesh", "axes", "gpus_per_node", "expected"),
    [
        ("dp=16,tp=8", (0,), 8, (16, 16, 1)),
        ("dp=16,tp=8", (1,), 8, (8, 1, 8)),
        ("dp=16,tp=8", (0, 1), 8, (128, 16, 8)),
        ("a=2,b=4,c=4", (1,), 8, (4, 2, 2)),  # ranks 0, 4, 8, 12
        ("a=2,b=4,c=4", (0, 2), 8, (8, 2, 4)),
        ("dp=4,tp=6", (1,), 8, (6, 2, 2)),  # ranks 6 to 11 lie 2 + 4 on two nodes
        ("dp=4,tp=2", (0,), 4, (4, 2, 2)),
        ("dp=8,one=1", (1,), 8, (1, 1, 1)),
        ("tp=16", (0,), 16, (16, 1, 16)),
    ],
)
def test_group_lies_on_nodes_by_rank_order(
    mesh: str, axes: tuple[int, ...], gpus_per_node: int, expected: tuple[int, ...]
) -> None:
    assert group_shape(Mesh.parse(mesh), axes, gpus_per_node) == GroupShape(*expected)


@pytest.mark.parametrize("kind", list(KIND))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_curve_passes_through_the_profile_where_the_laws_allow(kind: CollectiveKind, ranks: int) -> None:
    """From 16 MiB up the measured curves all but keep the laws by themselves: 2 % is clamped at most."""
    for size, us in H100.node.curves[kind][ranks]:
        if size >= 16 * MIB:
            found = group_curves(H100, GroupShape(ranks, 1, ranks)).us(kind, np.array([size]))
            assert found == pytest.approx(us, rel=0.02)


def test_unmeasured_rank_counts_lie_between_their_neighbours() -> None:
    size = np.array([64.0 * MIB])
    us = [group_curves(H100, GroupShape(n, 1, n)).us(KIND.ALL_GATHER, size)[0] for n in (4, 5, 6, 7, 8)]
    assert us == sorted(us)
    assert us[0] < us[2] < us[4]


def test_switch_reduction_makes_eight_ranks_as_cheap_as_four() -> None:
    """The named exception to 'more ranks cost no less': 438 against 345 GB/s of bus bandwidth."""
    size = np.array([512.0 * MIB])
    four, eight = (group_curves(H100, GroupShape(n, 1, n)).us(KIND.ALL_REDUCE, size)[0] for n in (4, 8))
    assert eight < four


def test_integer_sums_do_not_use_the_switch() -> None:
    mesh = Mesh.parse("tp=8")
    curves = mesh_collectives(H100, mesh, 8)
    size = np.array([256.0 * MIB])
    floats, integers = (curves.us(KIND.ALL_REDUCE, (0,), size, dtype) for dtype in ("bfloat16", "int64"))
    parts = curves.us(KIND.REDUCE_SCATTER, (0,), size, "int64") + curves.us(KIND.ALL_GATHER, (0,), size, "int64")
    assert floats < integers <= parts
    assert integers == pytest.approx(curve_at(H100.node.curves["all_reduce_ring"][8], 256 * MIB), rel=0.02)


def curve_at(points: tuple[tuple[float, float], ...], size: float) -> float:
    return dict(points)[size]


def test_spread_group_is_bound_by_one_network_card_each() -> None:
    """dp groups of (16, 8): one rank per node, 50 GB/s, not eight cards."""
    size = np.array([1e9])
    curves = mesh_collectives(H100, Mesh.parse("dp=16,tp=8"), 8)
    us = curves.us(KIND.ALL_GATHER, (0,), size, "bfloat16")
    assert us[0] > 1e9 * 15 / 16 / 50e9 * 1e6
    assert us[0] < 1.3 * 1e9 * 15 / 16 / (50e9 * H100.fabric.efficiency["all_gather"]) * 1e6


def test_one_rank_moves_nothing() -> None:
    curves = mesh_collectives(H100, Mesh.parse("dp=1,tp=8"), 8)
    assert (curves.us(KIND.ALL_REDUCE, (0,), np.array([0.0, 1e9]), "float32") == 0).all()
