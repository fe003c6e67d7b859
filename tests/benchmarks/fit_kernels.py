"""Fit of attention rates by length, head dim and tiles, and of elementwise kernels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from tests.benchmarks.fitting import bends, emit, family_folds, hats, least_squares, left_out

PEAK_FLOP_PER_US, HBM_BYTES_PER_US = 989.4e6, 3.35e6
TILES, SEQS, HEAD_DIMS = [66.0, 200, 400, 800, 2400], [128.0, 512, 1024, 2048, 4096, 8192, 16384], [64, 128, 256]
ATTENTION_LAUNCH_US = 4.0
KERNELS = "aiconfigurator at 095f58a51, systems/data/h100_sxm"


def fit_attention(folder: Path) -> None:
    rows = pd.read_csv(folder / "attention_fwd_h100.csv").query("seq >= 128 and head_dim in @HEAD_DIMS")
    tiles = (rows.batch * rows.q_heads * rows.seq / 128).to_numpy(float)
    flops, us = (2.0 * rows.batch * rows.q_heads * rows.seq**2 * rows.head_dim).to_numpy(float), rows.latency_us.to_numpy(float)
    head_dim, seq = rows.head_dim.to_numpy(), rows.seq.to_numpy(float)
    grid = (hats(tiles, TILES)[:, :, None] * hats(seq, SEQS)[:, None, :]).reshape(len(rows), -1)
    log_efficiency = np.log(flops / (PEAK_FLOP_PER_US * (us - ATTENTION_LAUNCH_US)))
    cells = np.arange(len(TILES) * len(SEQS)).reshape(len(TILES), len(SEQS))

    def table(at: np.ndarray) -> np.ndarray:
        """One per head dim; rising in tiles and in sequence, by no more than in proportion: more work takes no less time."""
        found = [
            least_squares(grid[at & (head_dim == d)], log_efficiency[at & (head_dim == d)], 0.3 * bends(cells.shape))
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
        unit = "fraction of peak [tiles][seq]"
        emit(
            f"attention.efficiency.d{d}", values, unit, source,
            residual=float(error[mine].mean()), rows=int(mine.sum()), extent=extent,
        )  # fmt: skip
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
        extent = "head_dim 64 and 128, seq 512 to 16384"
        emit(f"attention.{name}", curve, unit, source, residual=error, rows=len(ratio), extent=extent)


def fit_pointwise(folder: Path) -> None:
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
    large = float(error[size >= 64e6].mean())
    unit = "fraction of datasheet"
    emit("pointwise.efficiency", round(float(efficiency), 3), unit, source, residual=large, rows=len(us), extent=extent)
    every = float(error.mean())
    emit("pointwise.launch_us", round(float(launch), 2), "us", source, residual=every, rows=len(us), extent=extent)
