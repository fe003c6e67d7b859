"""Time of a collective on one mesh: which ranks form a group, and µs over bytes for each kind.

Inside a node the profile's measured curves are interpolated; across nodes a start-up curve is added to bytes / bandwidth.
Everything is brought to one grid of sizes, clamped there to the laws below, and then read by interpolation in
(log bytes, log µs), so the laws hold between grid points too.

Laws, kept at every grid point: not less for more bytes; inside a node not less for more ranks, except that an all-reduce
reduced in the switch (NVLS) may be cheaper than one of fewer ranks that is not; across nodes not less for more nodes at equal
ranks per node, nor than inside a node; reduce-scatter <= all-reduce, all-gather <= all-reduce. All-reduce <= reduce-scatter +
all-gather is kept where curves are read, since a sum is not linear in logs.

Not modelled: congestion of the network beyond the two ends; start-up for groups with fewer ranks per node than were measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planner.hardware import HardwareProfile, Points
from planner.mesh import Mesh
from planner.redistribution import CollectiveKind

KIND = CollectiveKind
KNOTS = 2.0 ** np.arange(9, 37)
"""Sizes in bytes at which curves are kept: 512 B to 64 GiB. Constant below, constant bandwidth above."""
_LOG_KNOTS = np.log(KNOTS)
_BIG = len(KNOTS) - 1


@dataclass(frozen=True)
class GroupShape:
    """How the ranks of one group lie on the nodes. The slowest group counts: most nodes, then fewest ranks on one of them."""

    ranks: int
    nodes: int
    ranks_per_node: int


def group_shape(mesh: Mesh, axes: tuple[int, ...], gpus_per_node: int) -> GroupShape:
    """Shape of the groups over some mesh axes, flattened. Ranks are row-major: the last axis is the nearest devices.

    Sibling groups run at the same time and each rank has the network card of its own GPU, so no group gets more.
    """
    ranks = np.arange(mesh.num_devices).reshape(mesh.axis_sizes)
    others = [axis for axis in range(mesh.num_axes) if axis not in axes]
    groups = ranks.transpose(*others, *axes).reshape(-1, math.prod(mesh.axis_sizes[axis] for axis in axes))
    worst = (1, groups.shape[1])
    for nodes in np.unique(groups // gpus_per_node, axis=0):
        _, counts = np.unique(nodes, return_counts=True)
        worst = max(worst, (len(counts), int(counts.min())), key=lambda shape: (shape[0], -shape[1]))
    return GroupShape(groups.shape[1], *worst)


@dataclass(frozen=True, eq=False)
class GroupCurves:
    """µs at KNOTS for each kind of collective in one group; `ring_log_us` for an all-reduce that the switch cannot do."""

    shape: GroupShape
    log_us: Mapping[CollectiveKind, np.ndarray]
    ring_log_us: np.ndarray | None = None

    def us(self, kind: CollectiveKind, full_bytes: np.ndarray, *, in_switch: bool = True) -> np.ndarray:
        """float64 like `full_bytes`: time of one collective. 0 for a group of one rank.

        `in_switch` = False for sums that the switch cannot take (integers): a ring, or reduce-scatter and all-gather.
        """
        size = np.asarray(full_bytes, np.float64)
        if self.shape.ranks == 1:
            return np.zeros_like(size)
        direct = _read(self.log_us[kind], size)
        if kind is not KIND.ALL_REDUCE:
            return direct
        in_two = self.us(KIND.REDUCE_SCATTER, size) + self.us(KIND.ALL_GATHER, size)
        if in_switch:
            return np.minimum(direct, in_two)
        return in_two if self.ring_log_us is None else np.minimum(_read(self.ring_log_us, size), in_two)


def _read(log_us: np.ndarray, size: np.ndarray) -> np.ndarray:
    return np.exp(np.interp(np.log(np.maximum(size, 1.0)), _LOG_KNOTS, log_us)) * np.maximum(size / KNOTS[-1], 1.0)


@dataclass(frozen=True, eq=False)
class MeshCollectives:
    """Curves of every group a mesh can form: all sets of its axes."""

    curves: Mapping[tuple[int, ...], GroupCurves]

    def us(self, kind: CollectiveKind, axes: tuple[int, ...], full_bytes: np.ndarray, dtype: str) -> np.ndarray:
        """µs of a collective over the flattened group of `axes`; `full_bytes` as in `planner.redistribution.Collective`."""
        return self.curves[axes].us(kind, full_bytes, in_switch=dtype.startswith(("float", "bfloat")))


def mesh_collectives(hardware: HardwareProfile, mesh: Mesh, gpus_per_node: int) -> MeshCollectives:
    shapes = {
        axes: group_shape(mesh, axes, gpus_per_node)
        for count in range(1, mesh.num_axes + 1)
        for axes in itertools.combinations(range(mesh.num_axes), count)
    }
    of_shape = {shape: group_curves(hardware, shape) for shape in set(shapes.values())}
    return MeshCollectives({axes: of_shape[shape] for axes, shape in shapes.items()})


def group_curves(hardware: HardwareProfile, shape: GroupShape) -> GroupCurves:
    if shape.ranks == 1:
        return GroupCurves(shape, {})
    ring = None
    if shape.nodes == 1:
        us = _node_us(hardware, shape.ranks)
        if "all_reduce_ring" in hardware.node.curves:
            measured = [
                np.maximum.accumulate(_measured_us(hardware.node.curves["all_reduce_ring"], n)) for n in range(2, shape.ranks + 1)
            ]
            ring = np.log(np.max([us[KIND.ALL_REDUCE], *measured], axis=0))
    else:
        g = shape.ranks_per_node
        near = _node_us(hardware, g) if g > 1 else {kind: np.zeros(len(KNOTS)) for kind in KIND}
        in_node = [_node_us(hardware, n) for n in range(2, min(shape.ranks, max(hardware.node.curves[KIND.ALL_REDUCE])) + 1)]
        floor = {kind: np.max([us_of[kind] for us_of in in_node], axis=0) for kind in KIND}
        us = {kind: np.maximum(_across_us(hardware, kind, shape, near[kind]), floor[kind]) for kind in KIND}
        for kind in (KIND.REDUCE_SCATTER, KIND.ALL_GATHER):  # measured on other fabrics than the all-reduce
            us[kind] = np.minimum(us[kind], us[KIND.ALL_REDUCE])
    return GroupCurves(shape, {kind: np.log(values) for kind, values in us.items()}, ring)


def _node_us(hardware: HardwareProfile, ranks: int) -> dict[CollectiveKind, np.ndarray]:
    """µs at KNOTS inside a node, clamped to the laws."""
    us = {}
    for kind in KIND:
        curves, first, nvls = hardware.node.curves[kind], 2, hardware.node.nvls_min_ranks
        if kind is KIND.ALL_REDUCE and nvls is not None and ranks >= nvls:
            curves, first = {n: points for n, points in curves.items() if n >= nvls}, nvls
        rising = [np.maximum.accumulate(_measured_us(curves, fewer)) for fewer in range(first, ranks + 1)]
        us[kind] = np.max(rising, axis=0)
    us[KIND.ALL_REDUCE] = np.max([us[KIND.ALL_REDUCE], us[KIND.REDUCE_SCATTER], us[KIND.ALL_GATHER]], axis=0)
    return us


def _measured_us(curves: Mapping[int, Points], ranks: int) -> np.ndarray:
    """µs at KNOTS: measured rank counts as they are, others at equal wire bytes, linear in log ranks, flat outside."""
    known = sorted(curves)
    below = max([n for n in known if n <= ranks], default=known[0])
    above = min([n for n in known if n >= ranks], default=known[-1])
    wire = KNOTS * (ranks - 1) / ranks
    low = _curve_log_us(curves[below], wire * below / (below - 1))
    if above == below:
        return np.exp(low)
    high = _curve_log_us(curves[above], wire * above / (above - 1))
    share = math.log(ranks / below) / math.log(above / below)
    return np.exp((1 - share) * low + share * high)


def _curve_log_us(points: Points, size: np.ndarray) -> np.ndarray:
    """Interpolated in (log bytes, log µs); constant below the first point, constant bandwidth above the last."""
    knots, us = np.array(points).T
    return np.interp(np.log(size), np.log(knots), np.log(us)) + np.log(np.maximum(size / knots[-1], 1.0))


def _across_us(hardware: HardwareProfile, kind: CollectiveKind, shape: GroupShape, near_us: np.ndarray) -> np.ndarray:
    """µs at KNOTS across nodes: start-up plus bytes over the tightest link.

    The start-up was measured for two nodes; its smallest value, the latency, is added once per doubling of the nodes.

    Ring: every hop carries (n-1)/n of the buffer, all cards of a node together carry one ring. All-reduce of two nodes is a
    tree: half of each node's buffer crosses each way. All-to-all: every rank sends its own share through its own card.
    """
    n, g = shape.ranks, shape.ranks_per_node
    network = hardware.fabric.nic_bytes_per_s * hardware.fabric.efficiency[kind] / 1e6
    near_per_byte = near_us[_BIG] / KNOTS[_BIG] * (g / (g - 1) if g > 1 else 0.0)  # µs per wire byte, 0 for one rank
    wire = (n - 1) / n
    if kind is KIND.ALL_TO_ALL:
        per_byte = max(near_per_byte * (g - 1) / (2 * g), (n - g) / n / network)  # the near share of two nodes: more cost no less
    elif kind is KIND.ALL_REDUCE:
        tree = shape.nodes == 2
        per_byte = max(near_per_byte * wire, (1.0 if tree else 2 * wire) / (g * network))
    else:
        per_byte = max(near_per_byte * wire, wire / (g * network))
    points = hardware.fabric.start_up[kind]
    start_up = np.exp(_flat_log(points)) + points[0][1] * (math.log2(shape.nodes) - 1)
    return np.maximum.accumulate(start_up + KNOTS * per_byte)


def _flat_log(points: Points) -> np.ndarray:
    knots, us = np.array(points).T
    return np.interp(_LOG_KNOTS, np.log(knots), np.log(us))
