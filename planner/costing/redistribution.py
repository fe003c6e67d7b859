"""Price of the moves that change a tensor's placement: collectives plus the copies around them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.costing.collective import MeshCollectives
from planner.hardware import HardwareProfile
from planner.redistribution import MoveGroup


def copy_us(hardware: HardwareProfile, copy_bytes: np.ndarray) -> np.ndarray:
    """Time of one copy kernel that reads and writes `copy_bytes` together; 0 where nothing is copied (a view)."""
    us = copy_bytes / (hardware.pointwise.efficiency * hardware.hbm_bytes_per_s) * 1e6 + hardware.pointwise.launch_us
    return np.where(copy_bytes > 0, us, 0.0)


def move_price(hardware: HardwareProfile, collectives: MeshCollectives, dtype: str) -> Callable[[MoveGroup], np.ndarray]:
    """The `price` that `planner.redistribution.cheapest_routes` takes, for tensors of one dtype."""

    def price(group: MoveGroup) -> np.ndarray:
        us = copy_us(hardware, group.copy_bytes)
        if group.kind is not None:
            us = us + collectives.us(group.kind, group.axes, group.full_bytes, dtype)
        return us

    return price
