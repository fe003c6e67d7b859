"""Time of local kernels: kind and local dims of every strategy -> µs, by the rules of a hardware profile.

Matmuls are read from a grid (`costing/gemm.py`), attention is counted in tasks, pointwise groups from their bytes.

Assumed and not measured: gradients of matmuls (other memory layouts) cost like the forward one; fp32 reaches the same fraction
of its own peak as bf16 (plain fp32 units, never TF32); attention in a dtype without a fused kernel costs as if it had one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from planner.costing.fusion import Traffic
from planner.costing.gemm import GemmGrid, gemm_grid
from planner.costing.region import inside_us
from planner.errors import PlannerError
from planner.hardware import AttentionConstants, HardwareProfile, Points
from planner.strategy import KernelShapes
from planner.units import ITEMSIZE

TILE = 128
"""Rows of queries, and of keys, that attention works on at once."""
WIDE = 128
"""Head dim of the blocks that the start of a task is counted in."""
MATH = "math"
"""Library name for attention without a fused kernel."""


class Kernels:
    """Prices of kernels on one profile; the grids of matmul times are built once per dtype.

    `sustained` applies the profile's clock of long training to FLOP-bound time; bandwidth and launches keep their burst values.
    """

    def __init__(self, hardware: HardwareProfile, *, sustained: bool = True) -> None:
        self.hardware = hardware
        self.clock = hardware.sustained_clock if sustained else 1.0
        self._grids: dict[tuple[str, int], GemmGrid] = {}

    def us(self, kernel: KernelShapes, traffic: Traffic) -> np.ndarray:
        """float64 [strategies]: time on one device. `traffic` says which bytes a pointwise kernel moves.

        Raises:
            PlannerError: no rule for this kind of kernel. UnknownHardwareError: the profile has no peak for its dtype.
        """
        if kernel.kind not in _RULES:
            raise PlannerError(
                f"no price rule for kernels of kind {kernel.kind!r}", hint=f"Kinds with a rule: {', '.join(sorted(_RULES))}."
            )
        return _RULES[kernel.kind](self, kernel, traffic)

    def grid(self, dtype: str, out_dtype: str) -> GemmGrid:
        key = (dtype, _itemsize(out_dtype))
        if key not in self._grids:
            self._grids[key] = gemm_grid(self.hardware, dtype, _itemsize(dtype), _itemsize(out_dtype), self.clock)
        return self._grids[key]


def kernel_us(kernel: KernelShapes, traffic: Traffic, hardware: HardwareProfile, *, sustained: bool = True) -> np.ndarray:
    """float64 [strategies]: time of one kernel, see `Kernels`."""
    return Kernels(hardware, sustained=sustained).us(kernel, traffic)


def _gemm(prices: Kernels, kernel: KernelShapes, traffic: Traffic) -> np.ndarray:
    b, m, n, k = (np.asarray(kernel.dims[name], np.float64) for name in ("batch", "m", "n", "k"))
    return prices.grid(kernel.dtype, kernel.out_dtype or kernel.dtype).us(b, m, n, k)


def _attention(prices: Kernels, kernel: KernelShapes, traffic: Traffic) -> np.ndarray:
    """The longest task, the others in turns (`AttentionConstants`); never faster than reading and writing its operands once."""
    names = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim")
    b, h, kv, seq_q, seq_k, d = (np.asarray(kernel.dims[name], np.float64) for name in names)
    causal, backward = bool(kernel.fields["causal"]), bool(kernel.fields["backward"])
    hardware, rule = prices.hardware, prices.hardware.attention
    name = str(kernel.fields.get("library", rule.library)).lower()
    if name == MATH:
        return _attention_in_parts(prices, kernel)
    library = rule.libraries.get(name)
    peak = hardware.peak(kernel.dtype) * prices.clock / 1e6 * (library.rate if library else 1.0)
    if backward:
        peak = peak * rule.backward_rate / rule.backward_flop_factor
    start = np.asarray(library.backward_start if backward else library.start) if library else _by_head_dim(rule, rule.start, d)
    start_us, block_us = start * _block_us(rule, np.array(float(WIDE)), peak), _block_us(rule, d, peak)
    tiles, blocks = np.maximum(seq_q / TILE, 1.0), np.maximum(seq_k / TILE, 1.0)
    longest = start_us + block_us * blocks
    mean = start_us + block_us * ((blocks + 1) / 2 if causal else blocks)
    compute_us = longest + np.maximum(b * h * tiles / rule.multiprocessors - 1, 0.0) * mean
    itemsize, bandwidth = _itemsize(kernel.dtype), hardware.hbm_bytes_per_s / 1e6
    tensors = b * (h * seq_q + kv * seq_k) * d * itemsize
    if library is None and not backward:
        return compute_us + rule.measured_passes * tensors / bandwidth + rule.measured_launch_us
    memory_us = (4 if backward else 2) * tensors / (bandwidth * hardware.pointwise.efficiency)
    return np.maximum(compute_us, memory_us) + rule.launch_us


def _block_us(rule: AttentionConstants, head_dim: np.ndarray, peak: float) -> np.ndarray:
    """Both products of a tile of queries with as many keys, on one multiprocessor; `peak` of all of them in FLOP/µs."""
    return 4 * TILE**2 * head_dim * rule.multiprocessors / (peak * _by_head_dim(rule, rule.efficiency, head_dim))


def _by_head_dim(rule: AttentionConstants, values: tuple[float, ...], head_dim: np.ndarray) -> np.ndarray:
    return np.asarray(np.interp(np.log(head_dim), np.log(rule.head_dims), values))


def _attention_in_parts(prices: Kernels, kernel: KernelShapes) -> np.ndarray:
    """Attention without a fused kernel: scores in memory. Two products forward, four backward, nothing skipped for a causal mask;
    masked softmax and dropout read and write the scores, dropout with a mask of one byte."""
    b, h, seq_q, seq_k, d = (np.asarray(kernel.dims[n], np.float64) for n in ("batch", "heads", "seq_q", "seq_k", "head_dim"))
    grid, itemsize = prices.grid(kernel.dtype, kernel.dtype), _itemsize(kernel.dtype)
    into_scores, from_scores = grid.us(b * h, seq_q, seq_k, d), grid.us(b * h, seq_q, d, seq_k)
    passes = 5 * itemsize + 2 if kernel.fields["backward"] else 4 * itemsize + 1
    rule = prices.hardware.pointwise
    moved = b * h * seq_q * seq_k * passes / (rule.efficiency * prices.hardware.hbm_bytes_per_s) * 1e6 + 2 * rule.launch_us
    return (into_scores + from_scores) * (2 if kernel.fields["backward"] else 1) + moved


def _at(points: Points, x: np.ndarray) -> np.ndarray:
    knots, values = np.array(points).T
    return np.interp(np.log(np.maximum(x, 1.0)), np.log(knots), values)


def _pointwise(prices: Kernels, kernel: KernelShapes, traffic: Traffic) -> np.ndarray:
    """Bytes over bandwidth, plus a launch for the first kernel of a fused group."""
    moved = np.asarray(kernel.dims["output_bytes"], np.float64) @ np.array(traffic.writes, np.float64)
    if traffic.reads and "operand_bytes" in kernel.dims:
        moved = moved + np.asarray(kernel.dims["operand_bytes"], np.float64) @ np.array(traffic.reads, np.float64)
    rule = prices.hardware.pointwise
    rate = _at(rule.cached_rate, moved) if kernel.fields.get("repeated") else rule.efficiency
    return moved / (rate * prices.hardware.hbm_bytes_per_s) * 1e6 + rule.launch_us * traffic.launches


def _region(prices: Kernels, kernel: KernelShapes, traffic: Traffic) -> np.ndarray:
    grid = prices.grid(kernel.dtype, kernel.dtype)
    return inside_us(kernel, lambda side: grid.us(np.ones_like(side), side, side, side), prices.hardware)


def _scan(prices: Kernels, kernel: KernelShapes, traffic: Traffic) -> np.ndarray:
    batch, heads, seq = (np.asarray(kernel.dims[name], np.float64) for name in ("batch", "heads", "seq"))
    rule = prices.hardware.scan
    rounds = np.maximum(batch * heads / rule.tasks, 1.0)
    return rule.launch_us + (rule.round_us + rule.chunk_us * np.ceil(seq / rule.chunk)) * rounds


def _conv1d(prices: Kernels, kernel: KernelShapes, traffic: Traffic) -> np.ndarray:
    size = 2 * _itemsize(kernel.dtype) * np.asarray(kernel.dims["tokens"], np.float64) * kernel.dims["channels"]
    rule = prices.hardware.scan
    return size / (prices.hardware.hbm_bytes_per_s * rule.convolution_efficiency) * 1e6 + rule.convolution_launch_us


def _itemsize(dtype: str) -> int:
    if dtype not in ITEMSIZE:
        raise PlannerError(f"no size known for dtype {dtype!r}", hint=f"Known: {', '.join(ITEMSIZE)}.")
    return ITEMSIZE[dtype]


_Rule = Callable[[Kernels, KernelShapes, Traffic], np.ndarray]
_RULES: Mapping[str, _Rule] = {
    "gemm": _gemm,
    "attention": _attention,
    "pointwise": _pointwise,
    "factory": _pointwise,
    "scan": _scan,
    "conv1d": _conv1d,
    "region": _region,
}
TIMELESS_KINDS = frozenset({"view", "leaf"})
"""Kernels that take no time: nothing is computed or moved."""
