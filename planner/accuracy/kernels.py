"""Rows of single kernels: matmul, attention, scans, convolutions, pointwise; all as measured in short bursts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from planner.accuracy import facts
from planner.accuracy.labels import profile_for
from planner.accuracy.rows import Fields, Scored, Skip, needed, read_csv
from planner.costing.compute import Kernels
from planner.costing.fusion import NO_TRAFFIC, Traffic
from planner.errors import PlannerError
from planner.strategy import KernelShapes

GEMM_FILE = re.compile(r"gemm_(.+)_([^_]+)")
ATTENTION_FILE = re.compile(r"attention_fwd_(.+)")
MEMORY_FILE = re.compile(r"membound_(.+)")
SCAN_FILE = re.compile(r"(?:gated_deltanet|mamba2)_(.+)")
FIGURE_COLUMNS = ("gpu", "library", "phase", "head_dim", "causal", "seq", "total_tokens", "tflops")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}

Column = np.ndarray
Columns = Mapping[str, Column]
Prices = Callable[[list[Fields], Columns], tuple[Column, np.ndarray, list[facts.Facts]]]
"""Rows and their numbers -> µs, category and facts of each."""


@dataclass(frozen=True)
class _Table:
    """A file of one kind of kernel: `category` is that of rows that are not scored, `family` what names rows alike."""

    path: Path
    category: str
    numbers: tuple[str, ...]
    family: Callable[[Fields], str]
    label: Callable[[Fields], str]
    measured: str = "latency_us"

    def score(self, prices: Callable[[], Prices]) -> Iterator[Scored]:
        """All rows at once. A row that lacks a number is skipped; so are all if there are no prices for the machine."""
        good: list[Fields] = []
        of: dict[str, list[float]] = {name: [] for name in self.numbers}
        rows: list[Fields] = [*read_csv(self.path, self.numbers)]
        for row in rows:
            try:
                found = needed(row, *self.numbers)
            except Skip as skip:
                yield self._skipped(row, str(skip))
                continue
            good.append(row)
            for name, value in zip(self.numbers, found, strict=True):
                of[name].append(value)
        try:
            columns = {name: np.array(values) for name, values in of.items()}
            us, categories, known = prices()(good, columns)
        except Skip as skip:
            yield from (self._skipped(row, str(skip)) for row in good)
            return
        except PlannerError as error:
            yield from (self._skipped(row, error.message) for row in good)
            return
        for row, measured, predicted, category, said in zip(good, columns[self.measured], us, categories, known, strict=True):
            yield Scored(
                category=str(category), source=self.family(row), label=self.label(row), measured=float(measured),
                predicted=float(predicted), facts=said,
            )  # fmt: skip

    def _skipped(self, row: Fields, reason: str) -> Scored:
        nothing = float("nan")
        return Scored(category=self.category, source=self.family(row), label=self.label(row), measured=nothing, skipped=reason)


def score_gemm(path: Path, match: re.Match[str]) -> Iterator[Scored]:
    """`x[m,k] · W[n,k]ᵀ`. Rows of fp8 include the quantisation of x."""
    gpu, dtype = match[1], match[2]

    def prices() -> Prices:
        if dtype not in DTYPES:
            raise Skip(f"no matmuls of {dtype}")
        kernels, fp8 = Kernels(profile_for(gpu), sustained=False), dtype == "fp8"

        def us(rows: list[Fields], of: Columns) -> tuple[Column, np.ndarray, list[facts.Facts]]:
            dims = {"batch": np.ones(len(rows)), "m": of["m"], "n": of["n"], "k": of["k"]}
            shape = KernelShapes("gemm", dims, dtype=DTYPES[dtype], out_dtype="bfloat16" if fp8 else DTYPES[dtype])
            us = kernels.us(shape, NO_TRAFFIC) + (quantise_us(kernels, of["m"], of["k"]) if fp8 else 0.0)
            categories = np.where(of["m"] >= 128, f"gemm {dtype}, m >= 128", f"gemm {dtype}, m < 128")
            return us, categories, facts.of_gemm(kernels.hardware, dtype, of)

        return us

    table = _Table(
        path, f"gemm {dtype}", ("m", "n", "k", "latency_us"),
        family=lambda row: f"n={row['n']} k={row['k']}",
        label=lambda row: f"{gpu} {row['m']} x {row['n']} x {row['k']}",
    )  # fmt: skip
    return table.score(prices)


def quantise_us(prices: Kernels, m: Column, k: Column) -> Column:
    rule = prices.hardware.quantise
    return 5 * m * k / (prices.hardware.hbm_bytes_per_s * rule.efficiency) * 1e6 + rule.launch_us


def _attention_kernel(of: Mapping[str, Column], causal: bool, backward: bool, library: str) -> KernelShapes:
    dims = {name: of[name] for name in ("batch", "heads", "kv_heads", "head_dim")}
    dims |= {"seq_q": of["seq"], "seq_k": of["seq"]}
    fields = {"causal": causal, "backward": backward, "library": library}
    return KernelShapes("attention", dims, dtype="bfloat16", fields=fields)


def score_attention(path: Path, match: re.Match[str]) -> Iterator[Scored]:
    gpu = match[1]

    def prices() -> Prices:
        kernels = Kernels(profile_for(gpu), sustained=False)

        def us(rows: list[Fields], of: Columns) -> tuple[Column, np.ndarray, list[facts.Facts]]:
            kernel = _attention_kernel({**of, "heads": of["q_heads"]}, True, False, "trtllm")
            categories = np.where(of["seq"] >= 1024, "attention, seq >= 1024", "attention, seq < 1024")
            return kernels.us(kernel, NO_TRAFFIC), categories, facts.of_attention(kernels.hardware, of)

        return us

    def heads(row: Fields) -> str:
        return f"{row['q_heads']}/{row['kv_heads']}"

    table = _Table(
        path, "attention", ("batch", "seq", "q_heads", "kv_heads", "head_dim", "latency_us"),
        family=lambda row: f"heads={heads(row)} d={row['head_dim']}",
        label=lambda row: f"{gpu} batch {row['batch']} seq {row['seq']} heads {heads(row)} d{row['head_dim']}",
    )  # fmt: skip
    return table.score(prices)


def score_attention_figure(row: Fields) -> Scored:
    """One bar of a chart: TFLOP/s of a library at hidden 2048; causal FLOPs counted half."""
    seq, tokens, head_dim, rate = needed(row, "seq", "total_tokens", "head_dim", "tflops")
    causal = row["causal"].lower() in ("1", "1.0", "true")
    prices = Kernels(profile_for(row["gpu"]), sustained=False)
    dims = {"batch": tokens / seq, "heads": 2048 / head_dim, "kv_heads": 2048 / head_dim, "head_dim": head_dim, "seq": seq}
    forward = 4 * tokens * seq * 2048 * (0.5 if causal else 1.0)
    total, flops = 0.0, 0.0
    for phase, factor in (("fwd", 1.0), ("bwd", 2.5)):
        if phase in row["phase"].split("+"):
            kernel = _attention_kernel({k: np.array([v]) for k, v in dims.items()}, causal, phase == "bwd", row["library"])
            total, flops = total + float(prices.us(kernel, NO_TRAFFIC)[0]), flops + factor * forward
    if not flops:
        raise Skip(f"phase {row['phase']!r} is unknown")
    label = f"{row['library']} {row['phase']} seq {seq:g} d{head_dim:g} {'causal' if causal else 'full'}"
    category = "attention by library"
    return Scored(
        category=category, source=row["library"], label=label, measured=flops / rate / 1e6, predicted=total,
        facts=facts.of_library(prices.hardware, row["library"]),
    )  # fmt: skip


def score_memory(path: Path, match: re.Match[str]) -> Iterator[Scored]:
    """One elementwise kernel, run again and again on the same tensors."""
    gpu = match[1]

    def prices() -> Prices:
        kernels = Kernels(profile_for(gpu))

        def us(rows: list[Fields], of: Columns) -> tuple[Column, np.ndarray, list[facts.Facts]]:
            size = of["bytes_read_plus_written"]
            kernel = KernelShapes("pointwise", {"output_bytes": size[:, None]}, fields={"repeated": True})
            us = kernels.us(kernel, Traffic((), (1.0,), 1))
            categories = np.where(size >= 64e6, "pointwise, >= 64 MB", "pointwise, < 64 MB")
            return us, categories, facts.of_bytes(kernels.hardware, size)

        return us

    table = _Table(
        path, "pointwise", ("latency_us", "bytes_read_plus_written"),
        family=lambda row: f"k={row.get('k', '')}",
        label=lambda row: f"{gpu} {row['bytes_read_plus_written']} B",
    )  # fmt: skip
    return table.score(prices)


def score_scan(path: Path, match: re.Match[str]) -> Iterator[Scored]:
    """Chunked scans of linear attention, and the short convolutions before them."""
    columns = ("kernel_source", "batch_size", "seq_len", "num_tokens", "model_name", "latency_us")
    rows = read_csv(path, columns)
    try:
        prices = Kernels(profile_for(match[1]), sustained=False)
    except Skip as skip:
        yield from (replace(_scan_row(row), skipped=str(skip)) for row in rows)
        return
    for row in rows:
        scored, conv = _scan_row(row), "conv1d" in row["kernel_source"]
        try:
            (measured,) = needed(row, "latency_us")
            kernel = _convolution(row) if conv else _scan(row)
            known = facts.of_scan(row, prices.hardware)
            yield replace(scored, measured=measured, predicted=float(prices.us(kernel, NO_TRAFFIC)[0]), facts=known)
        except Skip as skip:
            yield replace(scored, skipped=str(skip))


def _scan_row(row: Fields) -> Scored:
    label = f"{row['kernel_source']} {row['model_name']} batch {row['batch_size']} seq {row['seq_len']}"
    category = "causal convolution" if "conv1d" in row["kernel_source"] else "linear-attention scan"
    return Scored(category=category, source=row["model_name"], label=label, measured=float("nan"))


def _scan(row: Fields) -> KernelShapes:
    batch, seq, heads = needed(row, "batch_size", "seq_len", "num_v_heads")
    return KernelShapes("scan", {"batch": np.array([batch]), "heads": np.array([heads]), "seq": np.array([seq])})


def _convolution(row: Fields) -> KernelShapes:
    """Over the q, k and v channels of gated delta nets; of x, B and C of Mamba-2."""
    if row.get("num_k_heads"):
        k_heads, k_dim, v_heads, v_dim = needed(row, "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim")
        channels = 2 * k_heads * k_dim + v_heads * v_dim
    else:
        heads, dim, groups, state = needed(row, "nheads", "head_dim", "n_groups", "d_state")
        channels = heads * dim + 2 * groups * state
    (tokens,) = needed(row, "num_tokens")
    return KernelShapes("conv1d", {"tokens": np.array([tokens]), "channels": np.array([channels])}, dtype="bfloat16")


KERNEL_FILES: tuple[tuple[re.Pattern[str], Callable[[Path, re.Match[str]], Iterator[Scored]]], ...] = (
    (GEMM_FILE, score_gemm),
    (ATTENTION_FILE, score_attention),
    (MEMORY_FILE, score_memory),
    (SCAN_FILE, score_scan),
)
