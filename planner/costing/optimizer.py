"""Time of the optimizer's update, as a function of where a parameter is stored: what makes a replicated parameter dear."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.graph import JointGraph
from planner.hardware import HardwareProfile
from planner.memory import MemoryTable, MemoryTerms


def optimizer_us(graph: JointGraph, memory: MemoryTable, hardware: HardwareProfile) -> Mapping[int, np.ndarray]:
    """Parameter node -> float64 [strategies]: one fused pass over all parameters that reads parameter, gradient and state and
    writes parameter and state (28 B per fp32 element with AdamW, 12 B with SGD), at the efficiency of pointwise kernels.

    Gradient clipping is not in it.
    """
    if memory.policy.optimizer == "none":
        return {}
    shared: dict[int, np.ndarray] = {}
    found = {}
    for parameter in graph.parameters:
        if parameter.gradient is not None:
            terms = memory.terms[parameter.node]
            if id(terms) not in shared:
                shared[id(terms)] = _moved_bytes(terms) / (hardware.pointwise.efficiency * hardware.hbm_bytes_per_s) * 1e6
                shared[id(terms)].setflags(write=False)
            found[parameter.node] = shared[id(terms)]
    return found


def _moved_bytes(terms: MemoryTerms) -> np.ndarray:
    return 2 * (terms.parameter_bytes + terms.optimizer_bytes) + terms.gradient_bytes
