"""Fit of attention, task by task, and of elementwise kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from planner.costing.compute import Kernels
from planner.costing.fusion import NO_TRAFFIC
from planner.hardware import AttentionConstants, LibraryConstants, load_profile
from planner.strategy import KernelShapes
from tests.benchmarks.fitting import emit, family_folds, gauss_newton, left_out

HBM_BYTES_PER_US = 3.35e6
HEAD_DIMS = (64, 128, 256)
KERNELS = "aiconfigurator at 095f58a51, systems/data/h100_sxm"
FIGURES = "Dao-AILab/flash-attention benchmark figures; arXiv 2407.08608"


def fit_attention(folder: Path) -> None:
    """The measured op: what surrounds attention, and per head dim the rate inside a task and its start."""
    rows = pd.read_csv(folder / "attention_fwd_h100.csv")
    us, seq, head_dim = (rows[name].to_numpy(float) for name in ("latency_us", "seq", "head_dim"))
    dims = {"batch": "batch", "heads": "q_heads", "kv_heads": "kv_heads", "seq_q": "seq", "seq_k": "seq", "head_dim": "head_dim"}
    columns = {name: rows[column].to_numpy(float) for name, column in dims.items()}
    profile = load_profile("h100_sxm")

    def predict(rule: AttentionConstants, at: np.ndarray) -> np.ndarray:
        fields = {"causal": True, "backward": False, "library": "measured"}
        kernel = KernelShapes("attention", {n: c[at] for n, c in columns.items()}, dtype="bfloat16", fields=fields)
        return Kernels(replace(profile, attention=rule), sustained=False).us(kernel, NO_TRAFFIC)

    def rule_of(logs: np.ndarray) -> AttentionConstants:
        launch, passes, *rest = map(float, np.exp(logs))
        return replace(
            profile.attention, head_dims=HEAD_DIMS, measured_launch_us=launch, measured_passes=passes,
            efficiency=tuple(rest[:3]), start=tuple(rest[3:]),
        )  # fmt: skip

    def fit(at: np.ndarray) -> AttentionConstants:
        start = np.log([12.0, 5.0, 0.5, 0.6, 0.6, 1.3, 0.3, 0.5])
        return rule_of(gauss_newton(lambda logs: np.log(predict(rule_of(logs), at) / us[at]), start))

    error = left_out(family_folds(rows.q_heads, rows.kv_heads, rows.head_dim), lambda at: partial(predict, fit(at)), us) * 100
    few = rows.batch * rows.q_heads * np.maximum(seq / 128, 1) <= profile.attention.multiprocessors
    for name, at in (("seq >= 1024", seq >= 1024), ("seq < 1024", seq < 1024), ("one turn of tasks", few.to_numpy())):
        print(f"# attention left out by heads: {error[at].mean():.1f} % at {name}")
    rule = fit(us > 0)
    source, extent = f"{KERNELS}/attention/trtllm/1.3.0rc20", "causal forward, bf16, seq 1 to 16384; residual left out by heads"
    whole = {"residual": float(error.mean()), "rows": len(us), "extent": extent}
    emit("attention.measured_launch_us", round(rule.measured_launch_us, 2), "us", source, **whole)
    emit("attention.measured_passes", round(rule.measured_passes, 2), "tensors of queries and of keys", source, **whole)
    for number, d in enumerate(HEAD_DIMS):
        mine = head_dim == d
        of_dim = {"residual": float(error[mine].mean()), "rows": int(mine.sum()), "extent": extent}
        emit(f"attention.efficiency.d{d}", round(rule.efficiency[number], 4), "fraction of peak", source, **of_dim)
        emit(f"attention.start.d{d}", round(rule.start[number], 3), "blocks of head dim 128", source, **of_dim)
    fit_libraries(folder, rule)


def fit_libraries(folder: Path, rule: AttentionConstants) -> None:
    """Rate and starts of each library, and the one rate of backward; each library is left out for the others' backward rate."""
    rows = pd.read_csv(folder / "attention_fa_figures.csv").query("gpu == 'H100-SXM-80GB'")
    flops = 4.0 * rows.total_tokens * rows.seq * 2048 * np.where(rows.causal == 1, 0.5, 1.0)
    us = (flops * rows.phase.map({"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}) / rows.tflops / 1e6).to_numpy()
    profile, names = load_profile("h100_sxm"), sorted(rows.library.unique())

    heads = 2048 / rows.head_dim
    columns = {"batch": rows.total_tokens / rows.seq, "heads": heads, "kv_heads": heads, "head_dim": rows.head_dim}
    shapes = {name: column.to_numpy(float) for name, column in (columns | {"seq_q": rows.seq, "seq_k": rows.seq}).items()}
    cases = [
        (one, library, causal, ((rows.library == library) & (rows.causal == causal) & rows.phase.str.contains(one)).to_numpy())
        for one in ("fwd", "bwd") for library in names for causal in (0, 1)
    ]  # fmt: skip

    def predict(found: AttentionConstants, at: np.ndarray) -> np.ndarray:
        prices, total = Kernels(replace(profile, attention=found), sustained=False), np.zeros(len(rows))
        for one, library, causal, inside in cases:
            fields = {"causal": causal == 1, "backward": one == "bwd", "library": library}
            kernel = KernelShapes("attention", {n: c[inside] for n, c in shapes.items()}, dtype="bfloat16", fields=fields)
            total[inside] += prices.us(kernel, NO_TRAFFIC)
        return total[at]

    def rule_of(logs: np.ndarray) -> AttentionConstants:
        backward, *rest = map(float, np.exp(logs))
        parts = ("rate", "start", "backward_start")
        found = zip(names, np.reshape(rest, (-1, 3)), strict=True)
        libraries = {
            name.lower(): LibraryConstants(**dict(zip(parts, map(float, numbers), strict=True))) for name, numbers in found
        }
        return replace(rule, backward_rate=backward, libraries=libraries)

    def fit(at: np.ndarray) -> AttentionConstants:
        start = np.log([0.87, *[1.0, 1.0, 2.0] * len(names)])
        return rule_of(gauss_newton(lambda logs: np.log(predict(rule_of(logs), at) / us[at]), start))

    by_length = left_out(pd.factorize(rows.seq)[0], lambda at: partial(predict, fit(at)), us) * 100
    found, source, extent = fit(us > 0), FIGURES, "H100, seq 512 to 16384, head_dim 64 and 128; residual left out by length"
    print(f"# attention of libraries: {by_length.mean():.1f} % left out by length")
    backward = rows.phase.str.contains("bwd").to_numpy()
    of_backward = {"residual": float(by_length[backward].mean()), "rows": int(backward.sum()), "extent": extent}
    emit("attention.backward_rate", round(found.backward_rate, 3), "fraction of the forward rate", source, **of_backward)
    for name in names:
        library, mine = found.libraries[name.lower()], (rows.library == name).to_numpy()
        of_library = {"residual": float(by_length[mine].mean()), "rows": int(mine.sum()), "extent": extent}
        emit(
            f"attention.library_rate.{name.lower()}",
            round(library.rate, 3),
            "(rate / rate of the measured op)",
            source,
            **of_library,
        )
        emit(f"attention.library_start.{name.lower()}", round(library.start, 2), "blocks of head dim 128", source, **of_library)
        key = f"attention.library_backward_start.{name.lower()}"
        emit(key, round(library.backward_start, 2), "blocks of head dim 128", source, **of_library)


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
