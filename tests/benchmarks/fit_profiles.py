"""Fit the fitted constants of a hardware profile from a folder of public measurements; print them as TOML.

    python tests/benchmarks/fit_profiles.py FOLDER

Every `residual_pct` is the mean absolute error on rows left out of the fit, split by shape family (kernels) or by source
(collectives), never by row, unless `range` says otherwise. Nothing in `planner/` reads the folder. Not run by the test suite.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

PEAK_FLOP_PER_US, HBM_BYTES_PER_US = 989.4e6, 3.35e6
NIC_BYTES_PER_US = 50e3
SIZES = [4096, 32768, 131072, 524288, 2**20, 2**21, 2**22, 2**23, 2**24, 2**26, 2**28, 2**29]
TILES, SEQS, HEAD_DIMS = [66, 200, 400, 800, 2400], [128, 512, 1024, 2048, 4096, 8192, 16384], [64, 128, 256]
ATTENTION_LAUNCH_US = 4.0
KERNELS = "aiconfigurator at 095f58a51, systems/data/h100_sxm"


def emit(key: str, value: object, unit: str, source: str, residual: float, rows: int, extent: str) -> None:
    """Print one constant as a TOML table."""
    print(f'[{key}]\nvalue = {json.dumps(value)}\nunit = {json.dumps(unit)}\nkind = "fitted"')
    print(f"source = {json.dumps(source)}\ndate = {json.dumps(str(datetime.date.today()))}")
    print(f"residual_pct = {residual:.1f}\nrows = {rows}\nrange = {json.dumps(extent)}\n")


def simplex(loss: Callable[[np.ndarray], float], start: np.ndarray, steps: int) -> np.ndarray:
    """Nelder-Mead, enough for four parameters."""
    points = [start] + [start * (1 + 0.1 * row) for row in np.eye(len(start))]
    ranked = sorted((loss(p), tuple(p)) for p in points)
    for _ in range(steps):
        best, worst = np.array(ranked[0][1]), np.array(ranked[-1][1])
        middle = np.mean([p for _, p in ranked[:-1]], axis=0)
        for factor in (2.0, 1.0, -0.5):
            moved = middle + factor * (middle - worst)
            if loss(moved) < ranked[-2][0]:
                ranked[-1] = (loss(moved), tuple(moved))
                break
        else:
            ranked = [(loss(q), tuple(q)) for q in (best + 0.5 * (np.array(p) - best) for _, p in ranked)]
        ranked.sort()
    return np.array(ranked[0][1])


def hats(x: np.ndarray, knots: list[int]) -> np.ndarray:
    """[rows, knots] weights of linear interpolation in log x, flat outside."""
    logs = np.log(knots)
    return np.stack([np.interp(np.log(x), logs, row) for row in np.eye(len(knots))], 1)


def least_squares(design: np.ndarray, target: np.ndarray, smooth: np.ndarray | None = None) -> np.ndarray:
    """Least squares, then twice reweighted towards least absolute error."""
    weight = np.ones(len(target))
    for _ in range(3):
        rows = [design * weight[:, None]] + ([] if smooth is None else [smooth])
        values = [target * weight] + ([] if smooth is None else [np.zeros(len(smooth))])
        found = np.linalg.lstsq(np.concatenate(rows), np.concatenate(values), rcond=None)[0]
        weight = 1 / np.sqrt(np.maximum(np.abs(design @ found - target), 0.02))
    return found


def left_out(folds: np.ndarray, fit: Callable[[np.ndarray], Callable[[np.ndarray], np.ndarray]], truth: np.ndarray) -> np.ndarray:
    """|predicted / measured - 1| of every row, predicted by a fit on the other folds."""
    error = np.zeros(len(truth))
    for fold in np.unique(folds):
        inside = folds == fold
        error[inside] = np.abs(fit(~inside)(inside) / truth[inside] - 1)
    return error


def family_folds(*columns: pd.Series) -> np.ndarray:
    family = pd.factorize(pd.Series(list(zip(*columns, strict=True))))[0]
    return np.random.default_rng(0).integers(0, 5, family.max() + 1)[family]


def gemm(folder: Path) -> None:
    rows = pd.read_csv(folder / "gemm_h100_bf16.csv").query("m >= 128")
    m, n, k, us = (rows[c].to_numpy(float) for c in ("m", "n", "k", "latency_us"))
    flops, size = 2 * m * n * k, 2 * (m * k + k * n + m * n)

    def predict(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        e, h, p, c = x
        return ((flops[at] / (PEAK_FLOP_PER_US * e)) ** p + (size[at] / (HBM_BYTES_PER_US * h)) ** p) ** (1 / p) + c

    def fit(at: np.ndarray) -> np.ndarray:
        def loss(x: np.ndarray) -> float:
            legal = 0.05 < x[0] <= 1 and 0.05 < x[1] <= 1 and 1 <= x[2] <= 20 and x[3] >= 0
            return float(np.abs(predict(x, at) / us[at] - 1).mean()) if legal else 9.0

        return simplex(loss, np.array([0.78, 0.82, 2.4, 2.9]), 120)

    error = left_out(family_folds(rows.n, rows.k), lambda at: partial(predict, fit(at)), us) * 100
    large = (m >= 1024) & (n >= 1024) & (k >= 1024)
    print(f"# gemm: {error.mean():.1f} % left out by (n, k); all dims >= 1024: {error[large].mean():.1f} %")
    extent = "m 128 to 65536, x·Wᵀ layout, bf16, short bursts; both gradients assumed equal"
    for name, value in zip(("compute_efficiency", "memory_efficiency", "sharpness", "launch_us"), fit(us > 0), strict=True):
        unit = {"sharpness": "exponent", "launch_us": "us"}.get(name, "fraction of datasheet")
        emit(f"gemm.{name}", round(value, 3), unit, f"{KERNELS}/gemm/trtllm/1.3.0rc20", error.mean(), len(us), extent)


def attention(folder: Path) -> None:
    rows = pd.read_csv(folder / "attention_fwd_h100.csv").query("seq >= 128 and head_dim in @HEAD_DIMS")
    tiles = (rows.batch * rows.q_heads * rows.seq / 128).to_numpy(float)
    flops, us = (2.0 * rows.batch * rows.q_heads * rows.seq**2 * rows.head_dim).to_numpy(float), rows.latency_us.to_numpy(float)
    head_dim, seq = rows.head_dim.to_numpy(), rows.seq.to_numpy(float)
    grid = (hats(tiles, TILES)[:, :, None] * hats(seq, SEQS)[:, None, :]).reshape(len(rows), -1)
    log_efficiency = np.log(flops / (PEAK_FLOP_PER_US * (us - ATTENTION_LAUNCH_US)))
    cells = np.arange(len(TILES) * len(SEQS)).reshape(len(TILES), len(SEQS))
    eye = np.eye(cells.size)
    bends = [
        eye[a] - 2 * eye[b] + eye[c] for line in (*cells, *cells.T) for a, b, c in zip(line, line[1:], line[2:], strict=False)
    ]

    def table(at: np.ndarray) -> np.ndarray:
        """One per head dim; rising in tiles and in sequence, by no more than in proportion: more work takes no less time."""
        found = [
            least_squares(grid[at & (head_dim == d)], log_efficiency[at & (head_dim == d)], 0.3 * np.array(bends))
            for d in HEAD_DIMS
        ]
        logs = np.stack([f.reshape(cells.shape) for f in found])
        for axis, knots in ((1, TILES), (2, SEQS)):
            steps = np.log(knots).reshape((-1, 1) if axis == 1 else (1, -1))
            risen = np.maximum.accumulate(logs, axis)
            logs = np.flip(np.maximum.accumulate(np.flip(risen - steps, axis), axis), axis) + steps
        return logs

    def predict(logs: np.ndarray, at: np.ndarray) -> np.ndarray:
        which = np.searchsorted(HEAD_DIMS, head_dim[at])
        log_eff = (grid[at] * logs.reshape(len(HEAD_DIMS), -1)[which]).sum(1)
        return flops[at] / (PEAK_FLOP_PER_US * np.exp(log_eff)) + ATTENTION_LAUNCH_US

    folds = family_folds(rows.q_heads, rows.kv_heads, rows.head_dim)
    error = left_out(folds, lambda at: partial(predict, table(at)), us) * 100
    print(f"# attention: {error[seq >= 1024].mean():.1f} % at seq >= 1024 left out by heads; {error.mean():.1f} % at seq >= 128")
    logs = table(us > 0)
    source = f"{KERNELS}/attention/trtllm/1.3.0rc20"
    for number, d in enumerate(HEAD_DIMS):
        mine = (head_dim == d) & (seq >= 1024)
        values = [[round(float(x), 4) for x in row] for row in np.exp(logs[number])]
        extent = "causal forward, bf16; residual at seq 1024 to 16384, table from 128"
        emit(
            f"attention.efficiency.d{d}",
            values,
            "fraction of peak [tiles][seq]",
            source,
            error[mine].mean(),
            int(mine.sum()),
            extent,
        )
    attention_rates(folder)


def attention_rates(folder: Path) -> None:
    rows = pd.read_csv(folder / "attention_fa_figures.csv").query("gpu == 'H100-SXM-80GB'")
    rate = rows.pivot_table(index=["library", "head_dim", "seq"], columns=["phase", "causal"], values="tflops")
    for name, every in (
        ("causal_rate", rate["fwd", 1] / rate["fwd", 0]),
        ("backward_rate", rate["bwd", 0] / rate["fwd", 0]),
    ):
        ratio = every.dropna()
        mean = ratio.groupby("seq").mean().cummax()
        error = 0.0
        for library in ratio.index.unique("library"):
            others = ratio[ratio.index.get_level_values("library") != library].groupby("seq").mean()
            mine = ratio.xs(library, level="library").groupby("seq").mean()
            error += float((others / mine - 1).abs().mean()) * 100 / ratio.index.unique("library").size
        print(f"# attention {name}: {error:.1f} % left out by library")
        curve = [[int(seq), round(float(value), 3)] for seq, value in mean.items()]
        unit = "(sequence, ratio of rates)"
        source = "Dao-AILab/flash-attention benchmark figures; arXiv 2407.08608 (FA2, FA3, cuDNN)"
        emit(f"attention.{name}", curve, unit, source, error, len(ratio), "head_dim 64 and 128, seq 512 to 16384")


def pointwise(folder: Path) -> None:
    rows = pd.read_csv(folder / "membound_h100.csv")
    size, us = rows.bytes_read_plus_written.to_numpy(float), rows.latency_us.to_numpy(float)

    def fit(at: np.ndarray) -> np.ndarray:
        large, small = at & (size >= 64e6), at & (size <= 64e3)
        launch = float(np.median(us[small]))
        return np.array([np.median(size[large] / (HBM_BYTES_PER_US * (us[large] - launch))), launch])

    def predict(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        return size[at] / (HBM_BYTES_PER_US * x[0]) + x[1]

    error = left_out(family_folds(rows.k), lambda at: partial(predict, fit(at)), us) * 100
    print(f"# pointwise: {error[size >= 64e6].mean():.1f} % at >= 64 MB left out by width; all sizes {error.mean():.1f} %")
    source, extent = (
        f"{KERNELS}/quantize/vllm/0.24.0",
        "one elementwise kernel, 96 B to GBs; small tensors that stay in L2 are faster",
    )
    efficiency, launch = fit(us > 0)
    emit(
        "pointwise.efficiency",
        round(float(efficiency), 3),
        "fraction of datasheet",
        source,
        error[size >= 64e6].mean(),
        len(us),
        extent,
    )
    emit("pointwise.launch_us", round(float(launch), 2), "us", source, error.mean(), len(us), extent)


def isotonic_curve(size: np.ndarray, us: np.ndarray, knots: list[int]) -> list[list[float]]:
    logs = least_squares(hats(size, knots), np.log(us))
    return [[knot, round(float(t), 2)] for knot, t in zip(knots, np.exp(np.maximum.accumulate(logs)), strict=True)]


def curve_us(curve: list[list[float]], size: np.ndarray) -> np.ndarray:
    knots, us = np.array(curve).T
    return np.exp(np.interp(np.log(size), np.log(knots), np.log(us))) * np.maximum(size / knots[-1], 1)


def by_size(size: np.ndarray, us: np.ndarray) -> np.ndarray:
    """Errors when every other power of two is left out and interpolated over a gap of 4x; ends are not scored."""
    power, error = np.round(np.log2(size)).astype(int), np.full(len(size), np.nan)
    for parity in (0, 1):
        kept = power % 2 == parity
        knots = [2 ** int(p) for p in np.unique(power[kept])]
        inner = ~kept & (size > knots[0]) & (size < knots[-1])
        error[inner] = np.abs(curve_us(isotonic_curve(size[kept], us[kept], knots), size[inner]) / us[inner] - 1)
    return error


def node_collectives(rows: pd.DataFrame) -> None:
    for (kind, ranks), mine in rows.groupby(["collective", "gpus"]):
        knots = SIZES + ([2**34] if mine.size_bytes.max() >= 2**34 else [])
        size, us = mine.size_bytes.to_numpy(float), mine.time_us.to_numpy(float)
        folds = pd.factorize(mine.source_url)[0]
        # Two NCCL versions were measured for all kinds but all-reduce; there only sizes can be left out.
        versions = mine.nccl.nunique() > 1

        def fit(at: np.ndarray, s=size, u=us, k=knots) -> Callable[[np.ndarray], np.ndarray]:
            curve = isotonic_curve(s[at], u[at], k)
            return lambda other: curve_us(curve, s[other])

        error = (left_out(folds, fit, us) if versions else by_size(size, us)) * 100
        large, small = np.nanmean(error[size >= 2**20]), np.nanmean(error[size < 2**20])
        how = "NCCL version" if versions else "size"
        between = np.nanmean(by_size(size, us)[size >= 2**20]) * 100
        print(f"# {kind} n={ranks}: by {how} {large:.1f} % at >= 1 MiB, {small:.1f} % below; over gaps of 4x {between:.1f} %")
        source = "aiconfigurator at 095f58a51 (NCCL 2.23, 2.27.3)"
        source += ", dgxc-benchmarking, mscclpp chart" if kind == "all_reduce" and ranks == 8 else ""
        extent = f"{int(size.min())} B to {int(size.max())} B, one NVSwitch node; residual at >= 1 MiB, left out by {how}"
        emit(
            f"node.collective.{kind}.n{ranks}",
            isotonic_curve(size, us, knots),
            "(full bytes, us)",
            source,
            large,
            len(us),
            extent,
        )


def start_up(rows: pd.DataFrame) -> None:
    """µs that two nodes of eight need beyond bytes / bandwidth, with the bandwidth rules of costing/collective.py."""
    bus = {"H100-SXM-80GB": 438e3, "H200-SXM": 438e3, "H200-SXM (A3 Ultra assumed)": 326e3, "B200-SXM": 670e3}
    for kind, efficiency in (("all_reduce", 0.93), ("all_gather", 0.82)):
        mine = rows[
            rows.fabric.str.contains("8x400") & (rows.collective == kind) & (rows.nodes == 2) & (rows.size_bytes <= 2**28)
        ]
        mine = mine[mine.gpu.isin(bus)]
        size, us, rate = mine.size_bytes.to_numpy(float), mine.time_us.to_numpy(float), mine.gpu.map(bus).to_numpy(float)
        network = 8 * NIC_BYTES_PER_US * efficiency
        wire = size * 15 / 16
        bandwidth_us = np.maximum(2 * wire / rate, size / network) if kind == "all_reduce" else wire / np.minimum(rate, network)
        knots = [4096, 65536, 2**20, 2**24, 2**26]
        left = np.maximum(us - bandwidth_us, 1.0)
        folds = pd.factorize(mine.source_url)[0]
        if folds.max() == 0:
            folds = np.log2(size).astype(int) % 3

        def fit(at: np.ndarray, s=size, x=left, base=bandwidth_us, k=knots) -> Callable[[np.ndarray], np.ndarray]:
            us_at = np.array(isotonic_curve(s[at], x[at], k))[:, 1]
            return lambda o: np.exp(np.interp(np.log(s[o]), np.log(k), np.log(us_at))) + base[o]

        error = left_out(folds, fit, us) * 100
        print(f"# across two nodes, {kind}: {error.mean():.1f} % left out by source (one source: by size)")
        extent = f"2 nodes x 8, {int(size.min())} B to 256 MiB, 8x400G InfiniBand and RoCE pooled"
        source = "nccl-tests logs: " + ", ".join(sorted(set(mine.fabric)))
        curve = isotonic_curve(size, left, knots)
        emit(f"fabric.start_up.{kind}", curve, "(full bytes, us)", source, error.mean(), len(us), extent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    gemm(folder)
    attention(folder)
    pointwise(folder)
    rows = pd.read_csv(folder / "collectives.csv", dtype={"variant": str})
    rows = rows[rows.reliability.isin(["high", "medium"]) & ~rows.variant.fillna("").str.contains("MSCCL|peak", regex=True)]
    inside = rows[(rows.gpu == "H100-SXM-80GB") & (rows.nodes == 1)]
    ring = (inside.collective == "all_reduce") & inside.variant.fillna("").str.contains("int8")
    node_collectives(inside[~ring])
    start_up(rows)


if __name__ == "__main__":
    main()
