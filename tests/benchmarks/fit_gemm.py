"""Fit of the matmul rule: four numbers of the roofline, then the surface of what it misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from planner.accuracy.kernels import quantise_us
from planner.costing.compute import Kernels
from planner.costing.gemm import gemm_grid, roofline_us
from planner.hardware import GemmConstants, HardwareProfile, QuantiseConstants, load_profile
from tests.benchmarks.fitting import bends, emit, family_folds, gauss_newton, hats, least_squares, left_out, simplex

M = [1.0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 32768]
N = K = [32.0, 128, 512, 1024, 2048, 4096, 8192, 16384, 65536]
SMOOTH, SMALL = 2.0, 0.05
"""Weights of the second differences and of the size of the surface against one row's error."""


class Rows:
    def __init__(self, folder: Path, hardware: HardwareProfile, file: str) -> None:
        table = pd.read_csv(folder / file)
        self.hardware = hardware
        self.m, self.n, self.k, self.us = (table[c].to_numpy(float) for c in ("m", "n", "k", "latency_us"))
        self.folds = family_folds(table.n, table.k)
        self.flops, self.bytes = 2 * self.m * self.n * self.k, 2 * (self.m * (self.n + self.k) + self.n * self.k)
        weights = [hats(x, knots) for x, knots in ((self.m, M), (self.n, N), (self.k, K))]
        self.design = np.einsum("ra,rb,rc->rabc", *weights).reshape(len(self.us), -1)
        shape = (len(M), len(N), len(K))
        self.penalty = np.concatenate([SMOOTH * bends(shape), SMALL * np.eye(self.design.shape[1])])

    def base_us(self, rule: GemmConstants, at: np.ndarray) -> np.ndarray:
        peak, bandwidth = self.hardware.peak("bfloat16"), self.hardware.hbm_bytes_per_s
        return roofline_us(rule, self.flops[at], self.bytes[at], peak, bandwidth) + rule.launch_us

    def roofline(self, at: np.ndarray) -> GemmConstants:
        """The four numbers that fit m >= 128 best."""
        at = at & (self.m >= 128)

        def rule(x: np.ndarray) -> GemmConstants:
            e, h, p, launch = map(float, x)
            values = {"compute_efficiency": e, "memory_efficiency": h, "sharpness": p, "launch_us": launch}
            return replace(self.hardware.gemm, **values)

        def loss(x: np.ndarray) -> float:
            legal = 0.05 < x[0] <= 1 and 0.05 < x[1] <= 1 and 1 <= x[2] <= 20 and x[3] >= 0
            return float(np.abs(self.base_us(rule(x), at) / self.us[at] - 1).mean()) if legal else 9.0

        return rule(np.round(simplex(loss, np.array([0.78, 0.82, 2.4, 2.9]), 80), 3))

    def fit(self, at: np.ndarray) -> GemmConstants:
        rule = self.roofline(at)
        found = least_squares(self.design[at], np.log(self.us[at] / self.base_us(rule, at)), self.penalty)
        table = np.round(found.reshape(len(M), len(N), len(K)), 3)
        return replace(rule, surface_m=tuple(M), surface_n=tuple(N), surface_k=tuple(K), surface=table.tolist())

    def predict(self, rule: GemmConstants, at: np.ndarray) -> np.ndarray:
        grid = gemm_grid(replace(self.hardware, gemm=rule), "bfloat16", 2, 2, 1.0)
        return grid.us(np.ones(1), self.m[at], self.n[at], self.k[at])


def fit_gemm(folder: Path) -> None:
    rows = Rows(folder, load_profile("h100_sxm"), "gemm_h100_bf16.csv")
    every = rows.us > 0

    def fit(at: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        return partial(rows.predict, rows.fit(at))

    error = left_out(rows.folds, fit, rows.us) * 100
    kept, large = rows.m >= 128, np.minimum(np.minimum(rows.m, rows.n), rows.k) >= 1024
    print(f"# gemm left out by (n, k): {error[kept].mean():.1f} % at m >= 128, {error.mean():.1f} % at any m,")
    print(f"# {error[large].mean():.1f} % where all dims are >= 1024")
    rule = rows.fit(every)
    source = "aiconfigurator at 095f58a51, systems/data/h100_sxm/gemm/trtllm/1.3.0rc20"
    extent = "m 1 to 32768, n and k 32 to 65536, x·Wᵀ layout, bf16, short bursts; both gradients assumed equal"
    residual, count = float(error[kept].mean()), len(rows.us)
    for name in ("compute_efficiency", "memory_efficiency", "sharpness", "launch_us"):
        unit = {"sharpness": "exponent", "launch_us": "us"}.get(name, "fraction of datasheet")
        emit(f"gemm.{name}", getattr(rule, name), unit, source, residual=residual, rows=count, extent=extent)
    for dim, knots in (("m", M), ("n", N), ("k", K)):
        emit(f"gemm.surface.{dim}", [int(x) for x in knots], "elements", "where the table of log residuals has its entries")
    unit = "log of measured over roofline, [m][n][k]"
    emit("gemm.surface.log_residual", rule.surface, unit, source, residual=residual, rows=count, extent=extent)


def fit_fp8(folder: Path) -> None:
    """What products in fp8 lose against bf16, and the quantisation of their left operand, which is in the measured time."""
    hardware = load_profile("h100_sxm")
    table = pd.read_csv(folder / "gemm_h100_fp8.csv")
    m, n, k, us = (table[c].to_numpy(float) for c in ("m", "n", "k", "latency_us"))

    def predict(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        rate, efficiency, launch = map(float, np.exp(x))
        rule = replace(hardware.gemm, dtype_rate={"float8_e4m3fn": rate})
        quantise = QuantiseConstants(efficiency=efficiency, launch_us=launch)
        prices = Kernels(replace(hardware, gemm=rule, quantise=quantise), sustained=False)
        product = prices.grid("float8_e4m3fn", "bfloat16").us(np.ones(1), m[at], n[at], k[at])
        return product + quantise_us(prices, m[at], k[at])

    def fit(at: np.ndarray) -> np.ndarray:
        return gauss_newton(lambda x: np.log(predict(x, at) / us[at]), np.log([0.95, 0.65, 9.5]), steps=5)

    error = left_out(family_folds(table.n, table.k), lambda at: partial(predict, fit(at)), us) * 100
    kept = m >= 128
    print(f"# gemm fp8 left out by (n, k): {error[kept].mean():.1f} % at m >= 128, {error[~kept].mean():.1f} % below")
    source = "aiconfigurator at 095f58a51, systems/data/h100_sxm/gemm/trtllm/1.3.0rc20"
    extent = "fp8 with quantisation of the activations, m 1 to 32768, n and k 32 to 65536; residual at m >= 128"
    names = ("gemm.dtype_rate.float8_e4m3fn", "quantise.efficiency", "quantise.launch_us")
    units = ("(rate / rate of bf16, as fractions of their peaks)", "fraction of datasheet", "us")
    for name, unit, value in zip(names, units, np.exp(fit(us > 0)), strict=True):
        residual = float(error[kept].mean())
        emit(name, round(float(value), 3), unit, source, residual=residual, rows=len(us), extent=extent)
