"""Prices of a strategy space on one hardware profile: µs per strategy, µs per placement change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from planner.memory import MemoryTable
from planner.redistribution import Routes
from planner.strategy import StrategySpace


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTable:
    """What the solver adds up.

    Attributes:
        hardware_name, hardware_hash: the profile, and the hash of its content (a plan stores both).
        compute_us: per node float64 [strategies]; nodes with equal work share one array.
        routes: per lattice the price and the way of every placement change.
        routes_without_reduction: the same where a pending sum must stay pending (only lattices that need it).
        unreduced: (consumer node, operand slot) of uses that take `routes_without_reduction`: the casts of low-precision
            gradients to their parameter's dtype, when gradients are to be reduced in that dtype.
        routes_to_pending: the same as `routes` with the local move R -> P (only lattices that need it).
        made_pending: (consumer node, operand slot) of uses that take `routes_to_pending`, see `costing/pending.py`.
        memory: bytes per strategy.
        gpus_per_node: devices that share the fast links of one node.
    """

    space: StrategySpace
    hardware_name: str
    hardware_hash: str
    compute_us: tuple[np.ndarray, ...]
    routes: tuple[Routes, ...]
    routes_without_reduction: Mapping[int, Routes]
    unreduced: frozenset[tuple[int, int]]
    memory: MemoryTable
    gpus_per_node: int = 8
    routes_to_pending: Mapping[int, Routes] = field(default_factory=dict)
    made_pending: frozenset[tuple[int, int]] = frozenset()

    def routes_of_use(self, lattice: int, consumer: int, slot: int) -> Routes:
        if (consumer, slot) in self.unreduced:
            return self.routes_without_reduction[lattice]
        return self.routes_to_pending[lattice] if (consumer, slot) in self.made_pending else self.routes[lattice]
