"""Kernel times: the formulas at hand-computed points, datasheet bounds, scaling, errors for what is unknown."""

from dataclasses import replace

import numpy as np
import pytest

from planner.costing.compute import kernel_us
from planner.costing.fusion import NO_TRAFFIC, Traffic
from planner.costing.gemm import SLACK
from planner.errors import PlannerError, UnknownHardwareError
from planner.hardware import load_profile
from planner.strategy import KernelShapes

H100 = load_profile("h100_sxm")
SIZES = 2.0 ** np.arange(4, 17)
MEASURED_ATTENTION = (
    (1, 1, 1, 64, 13.995), (1, 2, 1, 4096, 70.048), (1, 4, 1, 4096, 74.059), (1, 1, 1, 16384, 243.195), (1, 8, 2, 1024, 29.307),
    (8, 8, 2, 512, 41.275), (64, 32, 32, 128, 247.456), (256, 8, 2, 1, 55.408),
)  # fmt: skip
"""(batch, heads, kv heads, sequence, us)"""


def gemm(m: object, n: object, k: object, batch: object = 1, dtype: str = "bfloat16") -> KernelShapes:
    dims = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (batch, m, n, k)))
    return KernelShapes("gemm", dict(zip(("batch", "m", "n", "k"), dims, strict=True)), dtype=dtype, out_dtype=dtype)


def attention(heads: object, seq: object, *, causal: bool = True, backward: bool = False, head_dim: int = 128) -> KernelShapes:
    h, s = np.broadcast_arrays(np.asarray(heads, np.float64), np.asarray(seq, np.float64))
    dims = {"batch": np.ones_like(h), "heads": h, "kv_heads": h, "seq_q": s, "seq_k": s, "head_dim": np.full_like(h, head_dim)}
    return KernelShapes("attention", dims, dtype="bfloat16", fields={"causal": causal, "backward": backward})


def test_gemm_without_its_surface_is_the_smooth_maximum_of_two_bounds() -> None:
    m, n, k = 4096, 4096, 4096
    rule = replace(H100.gemm, surface=tuple(tuple((0.0,) * 9 for _ in range(9)) for _ in range(10)))
    compute_us = 2 * m * n * k / (989.4e12 * rule.compute_efficiency * H100.sustained_clock) * 1e6
    memory_us = 2 * (m * k + k * n + m * n) / (3.35e12 * rule.memory_efficiency) * 1e6
    p = rule.sharpness
    expected = (compute_us**p + memory_us**p) ** (1 / p) + rule.launch_us
    assert kernel_us(gemm(m, n, k), NO_TRAFFIC, replace(H100, gemm=rule)) == pytest.approx(expected, rel=1e-12)


def test_the_surface_moves_the_roofline_where_it_was_measured() -> None:
    """Short inner dims: 0.31 of peak at k = 128, 0.17 at k = 64 with much work (median of the fitted rows)."""
    for k, fraction in ((64, 0.17), (128, 0.31), (256, 0.53)):
        us = kernel_us(gemm(32768, 8192, k), NO_TRAFFIC, H100, sustained=False)
        assert 2 * 32768 * 8192 * k / us / 1e6 / 989.4 == pytest.approx(fraction, rel=0.2)


def test_a_batch_of_products_reads_all_its_operands() -> None:
    """Many small products of one row are bound by their right operands."""
    us = kernel_us(gemm(1, 4096, 4096, batch=64), NO_TRAFFIC, H100)
    assert us >= 64 * 4096 * 4096 * 2 / H100.hbm_bytes_per_s * 1e6


def test_gemm_burst_rate_matches_a_published_figure() -> None:
    """cuBLAS 8192³ bf16 on H100: 795 TFLOP/s (https://github.com/pranjalssh/fast.cu); this shape was not fitted."""
    us = kernel_us(gemm(8192, 8192, 8192), NO_TRAFFIC, H100, sustained=False)
    assert 2 * 8192**3 / us / 1e6 == pytest.approx(795, rel=0.06)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_no_gemm_is_below_the_datasheet(dtype: str) -> None:
    m, n, k = (x.ravel() for x in np.meshgrid(SIZES, SIZES, SIZES))
    us = kernel_us(gemm(m, n, k, dtype=dtype), NO_TRAFFIC, H100, sustained=False)
    size = {"float32": 4}.get(dtype, 2) * (m * k + k * n + m * n)
    assert (us >= np.maximum(2 * m * n * k / H100.peak(dtype), size / H100.hbm_bytes_per_s) * 1e6).all()
    assert np.isfinite(us).all()


@pytest.mark.parametrize("axis", ["batch", "m", "n", "k"])
def test_gemm_grows_with_every_dim_and_never_by_more_than_its_share(axis: str) -> None:
    sizes = {name: np.full(len(SIZES) - 1, 512.0) for name in ("batch", "m", "n", "k")} | {"batch": np.ones(len(SIZES) - 1)}
    small, large = sizes | {axis: SIZES[:-1]}, sizes | {axis: SIZES[1:]}
    low, high = kernel_us(gemm(**small), NO_TRAFFIC, H100), kernel_us(gemm(**large), NO_TRAFFIC, H100)
    assert (low < high * (1 + 1e-9)).all() and (high <= 2 * SLACK * low * (1 + 1e-9)).all()


def test_short_inner_dims_are_inefficient() -> None:
    """Median fraction of peak at 0.2 TFLOP and more: 0.3 at k = 128, 0.78 at 4096 (the fitted measurements)."""
    k = np.array([128.0, 4096.0])
    m = 0.4e12 / (2 * 8192 * k)
    us = kernel_us(gemm(m, 8192, k), NO_TRAFFIC, H100, sustained=False)
    assert us[0] > 2 * us[1]


def test_fp32_matmul_uses_the_plain_fp32_peak() -> None:
    low, full = (kernel_us(gemm(8192, 8192, 8192, dtype=d), NO_TRAFFIC, H100)[()] for d in ("bfloat16", "float32"))
    assert full / low == pytest.approx(989.4 / 67, rel=0.02)


def test_attention_by_hand() -> None:
    """FA3, causal, 16 heads of 4096 queries: 512 tiles on 132 multiprocessors, the last tile of a head walks over 32 blocks."""
    rule = H100.attention
    library = rule.libraries["fa3"]
    block = 4 * 128 * 128 * 128 / (989.4e6 / 132 * rule.efficiency[rule.head_dims.index(128)] * library.rate)
    expected = block * (library.start + 32 + (512 / 132 - 1) * (library.start + 33 / 2)) + rule.launch_us
    kernel = attention(16, 4096)
    fa3 = replace(kernel, fields={**kernel.fields, "library": "fa3"})
    assert kernel_us(fa3, NO_TRAFFIC, H100, sustained=False) == pytest.approx(expected)


def test_attention_of_less_than_one_turn_takes_as_long_as_its_longest_task() -> None:
    """Sharding heads further gains nothing once each task has a multiprocessor of its own; short sequences keep a start."""
    heads = np.array([1.0, 2, 4])
    us = kernel_us(attention(heads, 4096), NO_TRAFFIC, H100)
    assert us == pytest.approx(np.full(3, us[0]))
    more = kernel_us(attention(np.array([4.0, 8, 16, 32]), 4096), NO_TRAFFIC, H100)
    assert (np.diff(more) > 0).all() and more[-1] < 8 * more[0]
    short = kernel_us(attention(1024, np.array([1.0, 16, 64])), NO_TRAFFIC, H100)
    assert short == pytest.approx(np.full(3, short[0])), "a tile of queries is computed whole"
    assert short[0] > 1024 / 132 * (us[0] - H100.attention.launch_us) / 33, "in turns"


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_attention_has_no_jumps(head_dim: int, backward: bool) -> None:
    """1 % more of anything never takes less time, nor more than the 2 % that its square does (and a turn begins smoothly)."""
    for name in ("heads", "seq"):
        x = np.geomspace(1, 4096, 800)
        heads, seq = (x, 1024.0) if name == "heads" else (8.0, x)
        us = kernel_us(attention(heads, seq, backward=backward, head_dim=head_dim), NO_TRAFFIC, H100)
        rise, step = np.diff(np.log(us)), np.log(x[1] / x[0])
        assert (rise > -1e-12).all() and (rise < 2.0 * step + 1e-9).all()


def test_attention_of_few_heads_matches_what_was_measured() -> None:
    """The measured op, head dim 128, one sequence: rows of 2 heads, 8 heads and many short sequences (aiconfigurator, H100)."""
    for batch, heads, kv, seq, us in MEASURED_ATTENTION:
        dims = {"batch": batch, "heads": heads, "kv_heads": kv, "seq_q": seq, "seq_k": seq, "head_dim": 128}
        fields = {"causal": True, "backward": False, "library": "measured"}
        kernel = KernelShapes("attention", {n: np.array(float(v)) for n, v in dims.items()}, dtype="bfloat16", fields=fields)
        assert kernel_us(kernel, NO_TRAFFIC, H100, sustained=False) == pytest.approx(us, rel=0.15)


def test_attention_libraries_scale_the_rate_of_the_tables() -> None:
    """TFLOP/s at head_dim 128, 16384 tokens, causal forward: 335 (FA2), 539 (cuDNN), 616 (FA3)."""
    for library, rate in (("fa2", 335), ("cudnn", 539), ("fa3", 616)):
        kernel = attention(16, 16384)
        us = kernel_us(replace(kernel, fields={**kernel.fields, "library": library}), NO_TRAFFIC, H100, sustained=False)
        assert 2 * 16 * 16384**2 * 128 / us / 1e6 == pytest.approx(rate, rel=0.08)


def test_scan_is_sequential_in_chunks_and_parallel_in_heads() -> None:
    def us(heads: float, seq: float) -> float:
        dims = {"batch": np.array(1.0), "heads": np.array(heads), "seq": np.array(seq)}
        return float(kernel_us(KernelShapes("scan", dims), NO_TRAFFIC, H100))

    assert us(8, 4096) == us(64, 4096), "heads that run at once"
    assert us(64, 8192) == pytest.approx(2 * us(64, 4096), rel=0.05)
    assert us(440, 4096) > 3 * us(64, 4096)


def test_attention_grows_and_is_above_the_datasheet() -> None:
    for causal in (True, False):
        for backward in (True, False):
            seq, heads = SIZES[3:11], np.array([1.0, 4, 16, 64])[:, None]
            us = kernel_us(attention(heads, seq, causal=causal, backward=backward), NO_TRAFFIC, H100, sustained=False)
            flops = (2 if causal else 4) * heads * seq**2 * 128 * (2.5 if backward else 1)
            assert (us >= flops / H100.peak("bfloat16") * 1e6).all()
            assert (np.diff(us, axis=0) > -1e-9).all() and (np.diff(us, axis=1) > 0).all()


def test_causal_is_cheaper_than_full_and_dearer_than_half_of_it() -> None:
    causal, full = (kernel_us(attention(64, SIZES[5:], causal=c), NO_TRAFFIC, H100) for c in (True, False))
    assert (causal < full).all() and (causal > 0.5 * full).all()


def test_sharding_heads_over_too_many_ranks_gains_less() -> None:
    whole, eighth = kernel_us(attention(np.array([32.0, 4.0]), 4096), NO_TRAFFIC, H100)
    assert whole / 8 < eighth < whole


def test_grouped_keys_cost_no_more() -> None:
    kernel = attention(32, 4096)
    fewer = KernelShapes("attention", {**kernel.dims, "kv_heads": np.array(8.0)}, dtype="bfloat16", fields=kernel.fields)
    assert kernel_us(fewer, NO_TRAFFIC, H100) <= kernel_us(kernel, NO_TRAFFIC, H100)


def test_pointwise_is_charged_for_its_share_of_the_group() -> None:
    dims = {"operand_bytes": np.array([[8e6, 4e6], [4e6, 4e6]]), "output_bytes": np.array([[8e6], [4e6]])}
    us = kernel_us(KernelShapes("pointwise", dims), Traffic((1.0, 0.0), (1.0,), 1), H100)
    rate = 3.35e12 * H100.pointwise.efficiency
    assert us == pytest.approx(np.array([16e6, 8e6]) / rate * 1e6 + H100.pointwise.launch_us)
    inside = kernel_us(KernelShapes("pointwise", dims), Traffic((0.0, 0.0), (0.0,), 0), H100)
    assert (inside == 0).all()


def test_factory_is_charged_for_writing() -> None:
    us = kernel_us(KernelShapes("factory", {"output_bytes": np.array([[8e6]])}), Traffic((), (1.0,), 0), H100)
    assert us == pytest.approx(8e6 / (3.35e12 * H100.pointwise.efficiency) * 1e6)


def test_what_is_unknown_is_an_error() -> None:
    with pytest.raises(PlannerError, match="kind 'fft'"):
        kernel_us(KernelShapes("fft", {}), NO_TRAFFIC, H100)
    with pytest.raises(UnknownHardwareError, match="float64"):
        kernel_us(gemm(64, 64, 64, dtype="float64"), NO_TRAFFIC, H100)
    with pytest.raises(PlannerError, match="dtype 'int3'"):
        kernel_us(KernelShapes("gemm", gemm(8, 8, 8).dims, dtype="bfloat16", out_dtype="int3"), NO_TRAFFIC, H100)


def test_attention_without_a_fused_kernel_moves_its_scores() -> None:
    """Scores of 16 heads at 4096 tokens are half a gigabyte: several passes over them cost more than the fused kernel."""
    for backward, passes in ((False, 4), (True, 5)):
        kernel = attention(16, 4096, backward=backward)
        apart = replace(kernel, fields={**kernel.fields, "library": "math"})
        us = kernel_us(apart, NO_TRAFFIC, H100)
        assert us > passes * 16 * 4096**2 * 2 / H100.hbm_bytes_per_s * 1e6
        assert us > 2 * kernel_us(kernel, NO_TRAFFIC, H100)
