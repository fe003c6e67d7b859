"""Time of matmuls by shape: a smooth roofline, corrected by a small fitted surface, kept on a grid that obeys the laws.

    t = ([(flops / (peak·e))^p + (bytes / (hbm·h))^p]^(1/p) + launch) · exp r(log m, log n, log k)

`r` holds what the roofline misses: tiles that do not fill the device, short inner dims, small weights. The product is brought
to powers of two and clamped there: more work never takes less time, twice the work never more than 2.06 times the time; nothing
is faster than the datasheet. It is read by linear interpolation of log time in the logs of m, n and k, so the laws hold between
grid points too.

A batch of products runs as one with `batch · m` rows, as long as reading all right operands takes no longer. Steps of single
tiles (a row more than a full wave of tiles costs up to 40 % on H100) are averaged over, not followed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.hardware import GemmConstants, HardwareProfile

OCTAVES = 25
"""Grid of 1, 2, 4 ... 2^24 in each dim; beyond, time is proportional."""
SLACK = 1.03
"""Twice the work may take this much more than twice the time: large products draw more power and run at a lower clock."""


@dataclass(frozen=True, eq=False)
class GemmGrid:
    """log µs [m, n, k] at powers of two for one pair of dtypes on one profile at one clock.

    Attributes:
        itemsize, out_itemsize: bytes per element of the operands and of the result.
        bytes_per_us: datasheet bandwidth: no product takes less than reading and writing its tensors once.
    """

    log_us: np.ndarray
    itemsize: int
    out_itemsize: int
    bytes_per_us: float

    def us(self, batch: np.ndarray, m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
        """float64: time of `batch` products [m, k] x [k, n]; any shapes that broadcast."""
        log2 = [np.log2(np.maximum(x, 1.0)) for x in (batch * m, n, k)]
        inside = [np.minimum(x, OCTAVES - 1.0) for x in log2]
        beyond = sum(x - y for x, y in zip(log2, inside, strict=True)) * np.log(2)
        low = [np.minimum(x.astype(int), OCTAVES - 2) for x in inside]
        share = [x - y for x, y in zip(inside, low, strict=True)]
        total: np.ndarray = np.asarray(beyond, np.float64)
        for corner in np.ndindex(2, 2, 2):
            weight = np.asarray(1.0)
            for side, part in zip(corner, share, strict=True):
                weight = weight * (part if side else 1 - part)
            total = total + weight * self.log_us[tuple(at + side for at, side in zip(low, corner, strict=True))]
        size = batch * (self.itemsize * (m * k + k * n) + self.out_itemsize * m * n)
        return np.maximum(np.exp(total), size / self.bytes_per_us)


def gemm_grid(hardware: HardwareProfile, dtype: str, itemsize: int, out_itemsize: int, clock: float) -> GemmGrid:
    """The grid for operands of `dtype`. Raises UnknownHardwareError if the profile states no peak for it."""
    m, n, k = np.meshgrid(*[2.0 ** np.arange(OCTAVES)] * 3, indexing="ij", sparse=True)
    flops, size = 2 * m * n * k, itemsize * (m * k + k * n) + out_itemsize * m * n
    peak = hardware.peak(dtype) * clock * hardware.gemm.dtype_rate.get(dtype, 1.0)
    us = roofline_us(hardware.gemm, flops, size, peak, hardware.hbm_bytes_per_s)
    us = (us + hardware.gemm.launch_us) * np.exp(surface(hardware.gemm))
    least = np.maximum(flops / hardware.peak(dtype), size / hardware.hbm_bytes_per_s) * 1e6
    return GemmGrid(np.maximum(lawful(np.log(us)), np.log(least)), itemsize, out_itemsize, hardware.hbm_bytes_per_s / 1e6)


def roofline_us(rule: GemmConstants, flops: np.ndarray, size: np.ndarray, flop_per_s: float, bytes_per_s: float) -> np.ndarray:
    """Smooth maximum of the compute and the memory bound, so that no kink decides a plan."""
    compute = flops / (flop_per_s * rule.compute_efficiency) * 1e6
    memory = size / (bytes_per_s * rule.memory_efficiency) * 1e6
    top = np.maximum(compute, memory)
    blend = (compute / top) ** rule.sharpness + (memory / top) ** rule.sharpness
    return np.asarray(top * blend ** (1 / rule.sharpness))


def surface(rule: GemmConstants) -> np.ndarray:
    """r [m, n, k] at powers of two: linear in the logs between its knots, flat outside."""
    knots = (rule.surface_m, rule.surface_n, rule.surface_k)
    weights = [
        np.stack([np.interp(np.arange(OCTAVES), np.log2(of_dim), row) for row in np.eye(len(of_dim))], 1) for of_dim in knots
    ]
    return np.einsum("ma,nb,kc,abc->mnk", *weights, np.array(rule.surface), optimize=True)


def lawful(log_us: np.ndarray) -> np.ndarray:
    """A table near this one that never falls along an axis and grows by 2.06 per octave at most: the middle between the
    smallest such table above and the largest below (both laws survive averaging)."""
    return (_above(log_us) - _above(-log_us[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]) / 2


def _above(log_us: np.ndarray) -> np.ndarray:
    for axis in range(log_us.ndim):
        octaves = np.arange(log_us.shape[axis]) * np.log(2 * SLACK)
        octaves = octaves.reshape([-1 if a == axis else 1 for a in range(log_us.ndim)])
        log_us = np.maximum.accumulate(log_us, axis)
        log_us = np.flip(np.maximum.accumulate(np.flip(log_us - octaves, axis), axis), axis) + octaves
    return log_us
