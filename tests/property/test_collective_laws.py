"""Laws of collective costs over a grid of sizes, groups and profiles. The one exception is named: in-switch reduction."""

import itertools

import numpy as np
import pytest

from planner.costing.collective import GroupShape, group_curves, mesh_collectives
from planner.hardware import HardwareProfile, load_profile
from planner.mesh import Mesh
from planner.redistribution import CollectiveKind

KIND = CollectiveKind
POWERS = 2.0 ** np.arange(33)
SIZES = np.unique(np.concatenate([POWERS, POWERS - 1, POWERS + 1, 1.25 * POWERS, 1.5 * POWERS, 1.75 * POWERS]))
SIZES = SIZES[(SIZES >= 1) & (SIZES <= 2**32)]
PROFILES = ("h100_sxm", "h100_hbm2e_500w", "a100_80gb", "b200", "noisy")
RANKS = (2, 3, 4, 6, 8, 16, 64)
SHAPES = [GroupShape(n, 1, n) for n in RANKS if n <= 8]
SHAPES += [GroupShape(n * g, n, g) for n in RANKS for g in (1, 2, 4, 8)]


def noisy(profile: HardwareProfile) -> HardwareProfile:
    """A profile whose measurements break every law: points up to three times too slow, start-ups that fall, a free network."""
    content, rng = profile.to_dict(), np.random.default_rng(0)
    for of_ranks in content["node"]["collective"].values():
        for constant in of_ranks.values():
            constant["value"] = [[size, us * rng.uniform(1, 3)] for size, us in constant["value"]]
    for constant in content["fabric"]["start_up"].values():
        constant["value"] = [[size, us * rng.uniform(0.01, 1)] for size, us in constant["value"]]
    content["fabric"]["nic_bytes_per_s"]["value"] *= 100
    return HardwareProfile.from_dict(content)


@pytest.fixture(scope="module", params=PROFILES)
def hardware(request: pytest.FixtureRequest) -> HardwareProfile:
    return noisy(load_profile("h100_sxm")) if request.param == "noisy" else load_profile(request.param)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_monotone_finite_positive_without_jumps(hardware: HardwareProfile, shape: GroupShape) -> None:
    curves = group_curves(hardware, shape)
    for kind in KIND:
        us = curves.us(kind, SIZES)
        assert np.isfinite(us).all() and (us > 0).all()
        assert (np.diff(us) >= -1e-9 * us[1:]).all(), kind
        assert (curves.us(kind, SIZES + 1) <= 1.01 * us).all(), kind


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_laws_between_kinds(hardware: HardwareProfile, shape: GroupShape) -> None:
    curves = group_curves(hardware, shape)
    reduce, scatter, gather = (curves.us(k, SIZES) for k in (KIND.ALL_REDUCE, KIND.REDUCE_SCATTER, KIND.ALL_GATHER))
    assert (scatter <= reduce * (1 + 1e-12)).all()
    assert (gather <= reduce * (1 + 1e-12)).all()
    assert (reduce <= (scatter + gather) * (1 + 1e-12)).all()


def test_more_ranks_in_a_node_cost_no_less(hardware: HardwareProfile) -> None:
    switch_from = hardware.node.nvls_min_ranks or 99
    for kind in KIND:
        for more in range(3, 9):
            fewer = more - 1
            if kind is KIND.ALL_REDUCE and fewer < switch_from <= more:
                continue  # reduced in the switch from here on
            low, high = (group_curves(hardware, GroupShape(n, 1, n)).us(kind, SIZES) for n in (fewer, more))
            assert (low <= high * (1 + 1e-12)).all(), (kind, more)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_more_nodes_cost_no_less(hardware: HardwareProfile, ranks_per_node: int) -> None:
    nodes = (2, 3, 4, 6, 8, 16, 64)
    for kind in KIND:
        us = [group_curves(hardware, GroupShape(n * ranks_per_node, n, ranks_per_node)).us(kind, SIZES) for n in nodes]
        for low, high in itertools.pairwise(us):
            assert (low <= high * (1 + 1e-12)).all(), kind


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_the_same_ranks_in_one_node_cost_no_more(hardware: HardwareProfile, ranks: int) -> None:
    near = group_curves(hardware, GroupShape(ranks, 1, ranks))
    for per_node in (g for g in (1, 2, 4) if ranks % g == 0 and ranks // g > 1):
        far = group_curves(hardware, GroupShape(ranks, ranks // per_node, per_node))
        for kind in KIND:
            assert (near.us(kind, SIZES) <= far.us(kind, SIZES) * (1 + 1e-12)).all(), (kind, per_node)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_never_below_the_datasheet(hardware: HardwareProfile, shape: GroupShape) -> None:
    """Wire bytes over link: (n-1)/n of the buffer, twice for an all-reduce unless a tree or the switch does it in one."""
    curves = group_curves(hardware, shape)
    wire = (shape.ranks - 1) / shape.ranks
    for kind in KIND:
        near_factor = 1.0 if kind is KIND.ALL_REDUCE else wire
        if shape.ranks_per_node > 1 and shape.nodes == 1:
            assert (curves.us(kind, SIZES) >= near_factor * SIZES / hardware.node.link_bytes_per_s * 1e6).all(), kind
        if shape.nodes > 1:
            cards = shape.ranks_per_node * hardware.fabric.nic_bytes_per_s
            crossing = (shape.nodes - 1) / shape.nodes * (shape.ranks_per_node if kind is KIND.ALL_TO_ALL else 1)
            assert (curves.us(kind, SIZES) >= crossing * SIZES / cards * 1e6).all(), kind


def test_a_faster_link_costs_no_more(hardware: HardwareProfile) -> None:
    content = hardware.to_dict()
    content["fabric"]["nic_bytes_per_s"]["value"] *= 2
    faster = HardwareProfile.from_dict(content)
    mesh = Mesh.parse("a=4,b=2,c=8")
    slow, fast = mesh_collectives(hardware, mesh, 8), mesh_collectives(faster, mesh, 8)
    for axes in slow.curves:
        for kind in KIND:
            assert (fast.us(kind, axes, SIZES, "float32") <= slow.us(kind, axes, SIZES, "float32") * (1 + 1e-12)).all()
