"""Time of a user-controlled region: what was counted inside and what its author states; both guesses, the inside is unknown.

FLOPs cost as one square product of as many FLOPs, operands and outputs are read and written once, stated communication is priced
like any other and added up. Nothing is known of copies, small products, or communication that was not stated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.costing.collective import MeshCollectives
from planner.hardware import HardwareProfile
from planner.redistribution import CollectiveKind
from planner.strategy import KernelShapes, StrategySpace


def inside_us(kernel: KernelShapes, square_us: Callable[[np.ndarray], np.ndarray], hardware: HardwareProfile) -> np.ndarray:
    """float64 [strategies]: without communication. `square_us` prices a product of m = n = k."""
    flops = kernel.dims["flops"]
    moved = kernel.dims["operand_bytes"].sum(1) + kernel.dims["output_bytes"].sum(1)
    memory_us = moved / (hardware.pointwise.efficiency * hardware.hbm_bytes_per_s) * 1e6
    return np.where(flops > 0, square_us(np.cbrt(np.maximum(flops, 2.0) / 2)), hardware.pointwise.launch_us) + memory_us


def with_stated(space: StrategySpace, compute_us: Sequence[np.ndarray], collectives: MeshCollectives) -> Iterator[np.ndarray]:
    """Times per node, those of regions with the communication that their authors state; equal arrays stay one object."""
    made: dict[tuple[int, int], np.ndarray] = {}
    for strategies, us in zip(space.strategies, compute_us, strict=True):
        kernel, key = strategies.kernel, (id(strategies), id(us))
        if kernel.kind == "region" and key not in made:
            made[key] = us + _stated_us(kernel, collectives)
            made[key].setflags(write=False)
        yield made.get(key, us)


def _stated_us(kernel: KernelShapes, collectives: MeshCollectives) -> np.ndarray:
    total = np.zeros(len(kernel.dims["flops"]))
    for number, (kind, axes) in enumerate(kernel.fields["sent"]):
        total += collectives.us(CollectiveKind(kind), axes, kernel.dims["sent_bytes"][:, number], kernel.dtype)
    return total
