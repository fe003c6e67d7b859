"""Rows of single kernels: matmul, attention, scans, convolutions, pointwise; all as measured in short bursts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from planner.accuracy.labels import profile_for
from planner.accuracy.rows import Fields, Scored, Skip, needed, read_csv
from planner.costing.compute import Kernels
from planner.costing.fusion import NO_TRAFFIC, Traffic
from planner.hardware import load_profile
from planner.strategy import KernelShapes

GEMM_FILE = re.compile(r"gemm_(h100|h200|a100|b200)_(bf16|fp16|fp32|fp8)\.csv(\.gz)?$")
ATTENTION_FILE = re.compile(r"attention_fwd_(h100|h200|a100|b200)\.csv(\.gz)?$")
MEMORY_FILE = re.compile(r"membound_(h100|h200|a100|b200)\.csv(\.gz)?$")
SCAN_FILE = re.compile(r"(gated_deltanet|mamba2)_(h100|h200|a100|b200)\.csv(\.gz)?$")
PROFILES = {"h100": "h100_sxm", "h200": "h200", "a100": "a100_80gb", "b200": "b200"}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}

Column = np.ndarray


def _columns(rows: list[dict[str, str]], names: Iterable[str]) -> dict[str, Column]:
    return {name: np.array([float(row[name]) for row in rows]) for name in names}


def _scored(
    category: np.ndarray | str, family: np.ndarray, labels: Iterable[str], measured: Column, predicted: Column
) -> Iterator[Scored]:
    categories = np.broadcast_to(np.asarray(category), measured.shape)
    for kind, source, label, us, guess in zip(categories, family, labels, measured, predicted, strict=True):
        yield Scored(category=str(kind), source=str(source), label=label, measured=float(us), predicted=float(guess))


def score_gemm(path: Path) -> Iterator[Scored]:
    """`x[m,k] · W[n,k]ᵀ`. Rows of fp8 include the quantisation of x: one pass that reads two bytes and writes one."""
    match = GEMM_FILE.match(path.name)
    assert match is not None
    prices = Kernels(load_profile(PROFILES[match[1]]), sustained=False)
    rows = read_csv(path, ("m", "n", "k", "latency_us"))
    of = _columns(rows, ("m", "n", "k", "latency_us"))
    dims = {"batch": np.ones(len(rows)), "m": of["m"], "n": of["n"], "k": of["k"]}
    fp8 = match[2] == "fp8"
    kernel = KernelShapes("gemm", dims, dtype=DTYPES[match[2]], out_dtype="bfloat16" if fp8 else DTYPES[match[2]])
    us = prices.us(kernel, NO_TRAFFIC)
    if fp8:
        us = us + quantise_us(prices, of["m"], of["k"])
    size = np.where(of["m"] >= 128, "m >= 128", "m < 128")
    category = np.array([f"gemm {match[2]}, {s}" for s in size])
    labels = [f"{match[1]} {r['m']} x {r['n']} x {r['k']}" for r in rows]
    return _scored(category, np.array([f"n={r['n']} k={r['k']}" for r in rows]), labels, of["latency_us"], us)


def quantise_us(prices: Kernels, m: Column, k: Column) -> Column:
    """Two passes over the activations: the largest value, then the quotient. Not fused with anything."""
    read = KernelShapes("pointwise", {"operand_bytes": (2 * m * k)[:, None], "output_bytes": np.zeros((len(m), 1))})
    write = KernelShapes("pointwise", {"operand_bytes": (2 * m * k)[:, None], "output_bytes": (m * k)[:, None]})
    return prices.us(read, Traffic((1.0,), (1.0,), 2)) + prices.us(write, Traffic((1.0,), (1.0,), 2))


def _attention_kernel(of: Mapping[str, Column], causal: bool, backward: bool, library: str) -> KernelShapes:
    dims = {name: of[name] for name in ("batch", "heads", "kv_heads", "head_dim")}
    dims |= {"seq_q": of["seq"], "seq_k": of["seq"]}
    fields = {"causal": causal, "backward": backward, "library": library}
    return KernelShapes("attention", dims, dtype="bfloat16", fields=fields)


def score_attention(path: Path) -> Iterator[Scored]:
    match = ATTENTION_FILE.match(path.name)
    assert match is not None
    prices = Kernels(load_profile(PROFILES[match[1]]), sustained=False)
    rows = read_csv(path, ("batch", "seq", "q_heads", "kv_heads", "head_dim", "latency_us"))
    of = _columns(rows, ("batch", "seq", "q_heads", "kv_heads", "head_dim", "latency_us"))
    us = prices.us(_attention_kernel({**of, "heads": of["q_heads"]}, True, False, "trtllm"), NO_TRAFFIC)
    category = np.where(of["seq"] >= 1024, "attention, seq >= 1024", "attention, seq < 1024")
    family = np.array([f"heads={r['q_heads']}/{r['kv_heads']} d={r['head_dim']}" for r in rows])
    labels = [f"{match[1]} batch {r['batch']} seq {r['seq']} heads {r['q_heads']}/{r['kv_heads']} d{r['head_dim']}" for r in rows]
    return _scored(category, family, labels, of["latency_us"], us)


def score_attention_figure(row: Fields) -> Scored:
    """One bar of a chart: TFLOP/s of a library at hidden 2048; causal FLOPs counted half."""
    seq, tokens, head_dim, rate = needed(row, "seq", "total_tokens", "head_dim", "tflops")
    causal = row["causal"] in ("1", "True", "true")
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
    return Scored(category=category, source=row["library"], label=label, measured=flops / rate / 1e6, predicted=total)


def score_memory(path: Path) -> Iterator[Scored]:
    """One elementwise kernel, run again and again on the same tensors."""
    match = MEMORY_FILE.match(path.name)
    assert match is not None
    rows = read_csv(path, ("m", "k", "latency_us", "bytes_read_plus_written"))
    of = _columns(rows, ("latency_us", "bytes_read_plus_written"))
    size = of["bytes_read_plus_written"]
    kernel = KernelShapes("pointwise", {"output_bytes": size[:, None]}, fields={"repeated": True})
    us = Kernels(load_profile(PROFILES[match[1]])).us(kernel, Traffic((), (1.0,), 1))
    category = np.where(size >= 64e6, "pointwise, >= 64 MB", "pointwise, < 64 MB")
    labels = [f"{match[1]} {int(s)} B" for s in size]
    return _scored(category, np.array([f"k={r['k']}" for r in rows]), labels, of["latency_us"], us)


def score_scan(path: Path) -> Iterator[Scored]:
    """Chunked scans of linear attention, and the short convolutions before them."""
    match = SCAN_FILE.match(path.name)
    assert match is not None
    prices = Kernels(load_profile(PROFILES[match[2]]), sustained=False)
    for row in read_csv(path, ("kernel_source", "batch_size", "seq_len", "num_tokens", "d_conv", "model_name", "latency_us")):
        label = f"{row['kernel_source']} {row['model_name']} batch {row['batch_size']} seq {row['seq_len']}"
        measured = float(row["latency_us"])
        conv = "conv1d" in row["kernel_source"]
        category = "causal convolution" if conv else "linear-attention scan"
        try:
            kernel = _convolution(row) if conv else _scan(row)
        except Skip as skip:
            yield Scored(category=category, source=row["model_name"], label=label, measured=measured, skipped=str(skip))
            continue
        predicted = float(prices.us(kernel, NO_TRAFFIC)[0])
        yield Scored(category=category, source=row["model_name"], label=label, measured=measured, predicted=predicted)


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


KERNEL_FILES: tuple[tuple[re.Pattern[str], Callable[[Path], Iterator[Scored]]], ...] = (
    (GEMM_FILE, score_gemm),
    (ATTENTION_FILE, score_attention),
    (MEMORY_FILE, score_memory),
    (SCAN_FILE, score_scan),
)
