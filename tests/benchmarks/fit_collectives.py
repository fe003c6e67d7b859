"""Fit of collectives: curves inside a node per GPU, start-up across nodes per kind of network."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from planner.accuracy.labels import profile_for
from planner.accuracy.links import FROM_THE_HOST, NO_SWITCH, NOT_NCCL
from planner.hardware import HardwareProfile
from tests.benchmarks.fitting import bends, emit, hats, least_squares, left_out

SIZES = [4096.0, 16384, 65536, 131072, 262144, 524288, 2**20, 2**21, 2**22, 2**23, 2**24, 2**26, 2**28, 2**29]
HOST_US = 19.5
"""PyTorch operator and launch, in rows timed around a blocking call."""
SWEEP = 15
"""Rows from which a source counts as a sweep over sizes; others are single points."""
START_SIZES = [4096.0, 65536, 2**20, 2**24, 2**26]
FAMILIES = {
    "ib_8x400g": r"\bIB\b",
    "roce_8x400g": "RoCE",
    "efa_32x100g": "EFA (?!4x100G)",
    "efa_4x100g": "EFA 4x100G",
    "tcpxo_8x200g": "TCPXO",
    "tcpx_4x200g": "TCPX ",
}


def read(folder: Path) -> pd.DataFrame:
    rows = pd.read_csv(folder / "collectives.csv", dtype={"variant": str}).fillna({"variant": "", "fabric": ""})
    host = rows.variant.str.contains(FROM_THE_HOST) * HOST_US
    rows = rows.assign(time_us=rows.time_us - host)
    return rows[rows.reliability.isin(["high", "medium"]) & ~rows.variant.str.contains(NOT_NCCL)]


def curve(size: np.ndarray, us: np.ndarray, knots: list[float], weight: np.ndarray | None = None) -> list[list[float]]:
    """Rising curve through (size, µs), by least squares in the logs."""
    weight = np.ones(len(us)) if weight is None else weight
    logs = least_squares(hats(size, knots) * weight[:, None], np.log(us) * weight, 0.05 * bends((len(knots),)))
    return [[int(k), round(float(t), 2)] for k, t in zip(knots, np.exp(np.maximum.accumulate(logs)), strict=True)]


def read_off(points: list[list[float]], size: np.ndarray) -> np.ndarray:
    knots, us = np.array(points).T
    return np.exp(np.interp(np.log(size), np.log(knots), np.log(us))) * np.maximum(size / knots[-1], 1)


def by_size(size: np.ndarray, us: np.ndarray) -> np.ndarray:
    """Errors when every other power of two is left out and interpolated over a gap of 4x; ends are not scored."""
    power, error = np.round(np.log2(size)).astype(int), np.full(len(size), np.nan)
    for parity in (0, 1):
        kept = power % 2 == parity
        knots = [2.0 ** int(p) for p in np.unique(power[kept])]
        inner = ~kept & (size > knots[0]) & (size < knots[-1])
        error[inner] = np.abs(read_off(curve(size[kept], us[kept], knots), size[inner]) / us[inner] - 1)
    return error


def in_range_of_others(folds: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Rows whose size lies inside what the other sources measured."""
    inside = np.zeros(len(size), bool)
    for fold in np.unique(folds):
        others = size[folds != fold]
        if len(others):
            inside |= (folds == fold) & (size >= others.min()) & (size <= others.max())
    return inside


def fit_node(folder: Path, gpu: str) -> None:
    """Curves of one GPU. All-reduce has two: the default (in the switch where there is one) and the ring."""
    rows = read(folder)
    rows = rows[(rows.gpu == gpu) & (rows.nodes == 1)]
    ring = (rows.collective == "all_reduce") & rows.variant.str.contains(NO_SWITCH) & ~rows.variant.str.contains("NVLS default")
    rows = rows.assign(kind=np.where(ring, "all_reduce_ring", rows.collective))
    for (kind, ranks), mine in rows.groupby(["kind", "gpus"]):
        if mine.size_bytes.max() < 2**28 or mine.size_bytes.min() > 2**16:
            continue
        size, us = mine.size_bytes.to_numpy(float), mine.time_us.to_numpy(float)
        folds = pd.factorize(mine.source_url)[0]
        counts = np.bincount(folds)
        knots = SIZES + ([2.0**34] if size.max() >= 2**34 else [])
        weight = 1 / np.sqrt(np.maximum(counts, SWEEP) / SWEEP)[folds]

        def fit(at: np.ndarray, s=size, u=us, k=knots, w=weight) -> Callable[[np.ndarray], np.ndarray]:
            points = curve(s[at], u[at], k, w[at])
            return lambda other: read_off(points, s[other])

        several = (counts >= SWEEP).sum() > 1
        error = (left_out(folds, fit, us) if several else by_size(size, us)) * 100
        error = np.where(in_range_of_others(folds, size) | ~several, error, np.nan)
        how = "source" if several else "size"
        large, small = np.nanmean(error[size >= 2**20]), np.nanmean(error[size < 2**20])
        print(f"# {gpu} {kind} n={ranks}: left out by {how} {large:.1f} % at >= 1 MiB, {small:.1f} % below")
        versions = sorted({str(v) for v in mine.nccl.dropna()})
        extent = f"{int(size.min())} B to {int(size.max())} B, one node; residual at >= 1 MiB, left out by {how}"
        emit(
            f"node.collective.{kind}.n{ranks}", curve(size, us, knots, weight), "(full bytes, us)",
            f"{mine.source_url.nunique()} public nccl-tests sweeps, NCCL {', '.join(versions) or 'not stated'}",
            residual=float(large), rows=len(us), extent=extent,
        )  # fmt: skip


def bandwidth_us(row: pd.Series, hardware: HardwareProfile, efficiency: float) -> float:
    """Bytes over the tightest link across nodes, as in `planner/costing/collective.py`."""
    n, nodes, g = row.gpus, row.nodes, row.gpus // row.nodes
    network = hardware.fabric.nic_bytes_per_s * efficiency / 1e6
    size, us = hardware.node.curves[row.collective][g][-1]
    near = us / size * g / (g - 1) * (0.5 if row.collective == "all_reduce" else 1.0)
    wire = (n - 1) / n
    if row.collective == "all_to_all":
        return float(row.size_bytes * max(near * (g - 1) / n, (n - g) / n / network))
    if row.collective == "all_reduce":
        return float(row.size_bytes * max(2 * near * wire, (1.0 if nodes == 2 else 2 * wire) / (g * network)))
    return float(row.size_bytes * max(near * wire, wire / (g * network)))


def fit_fabric(folder: Path, family: str, efficiency: dict[str, float]) -> None:
    """Start-up curves of one kind of network, for the kinds of collective that were measured on it."""
    rows = read(folder)
    rows = rows[(rows.nodes > 1) & (rows.nodes <= 4) & rows.fabric.str.contains(FAMILIES[family])]
    for kind, mine in rows.groupby("collective"):
        profiles = [profile_for(gpu, fabric) for gpu, fabric in zip(mine.gpu, mine.fabric, strict=True)]
        base = np.array([bandwidth_us(row, p, efficiency[kind]) for (_, row), p in zip(mine.iterrows(), profiles, strict=True)])
        size, us, nodes = (mine[c].to_numpy(float) for c in ("size_bytes", "time_us", "nodes"))
        print(f"# {family} {kind}: largest messages over the bandwidth bound: {np.round((us / base)[size >= 2**30], 2).tolist()}")
        if (size <= 2**26).sum() < 4:
            continue
        doublings = np.log2(nodes) - 1

        def fit(at: np.ndarray, s=size, u=us, b=base, d=doublings) -> Callable[[np.ndarray], np.ndarray]:
            used = at & (s <= 2**28)
            points = curve(s[used], np.maximum((u - b)[used] / (1 + d[used]), 1.0), START_SIZES)
            return lambda o: np.exp(np.interp(np.log(s[o]), *np.log(points).T)) + points[0][1] * d[o] + b[o]

        folds = pd.factorize(mine.source_url)[0]
        several = folds.max() > 0
        error = left_out(folds if several else np.round(np.log2(size)).astype(int) % 3, fit, us) * 100
        how = "source" if several else "size"
        print(f"# {family} {kind}: {error.mean():.1f} % left out by {how}")
        used = size <= 2**28
        points = curve(size[used], np.maximum((us - base)[used] / (1 + doublings[used]), 1.0), START_SIZES)
        extent = f"{sorted(set(mine.nodes.astype(int)))} nodes of 8, {int(size.min())} B up; left out by {how}"
        source = "nccl-tests logs: " + ", ".join(sorted(set(mine.fabric)))
        emit(
            f"fabric.start_up.{kind}", points, "(full bytes, us)", source,
            residual=float(error.mean()), rows=int(used.sum()), extent=extent,
        )  # fmt: skip
        assert math.isfinite(error.mean())
