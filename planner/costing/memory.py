"""Bytes that each node keeps on a device, per strategy: the linear terms of the memory budget.

Saved activations are the tensors of `JointGraph.saved_for_backward` in the placement in which they are produced; a parameter that
is kept from forward to backward counts in the placement in which the forward pass read it. Temporaries, other gathered
parameters, buffers and the allocator's slack are not in these terms.
"""

from __future__ import annotations

import numpy as np

from planner.graph import TensorRef
from planner.memory import MemoryPolicy, MemoryTable, MemoryTerms
from planner.strategy import Lattice, Strategies, StrategySpace


def memory_table(space: StrategySpace, policy: MemoryPolicy) -> MemoryTable:
    graph = space.graph
    saved: dict[int, list[int]] = {}
    for ref in graph.saved_for_backward:
        saved.setdefault(ref.node, []).append(ref.output)
    shared: dict[tuple[int, ...], MemoryTerms] = {}
    terms: dict[int, MemoryTerms] = {}
    for parameter in graph.parameters:
        strategies, number = space.strategies[parameter.node], space.lattice_of[TensorRef(parameter.node, 0)]
        trained = parameter.gradient is not None
        key: tuple[int, ...] = (-1, id(strategies), number, int(trained))
        if key not in shared:
            shared[key] = _parameter_terms(strategies, space.lattices[number], policy, trained)
        terms[parameter.node] = shared[key]
    for node, outputs in saved.items():
        strategies = space.strategies[node]
        lattices = [space.lattice_of[TensorRef(node, output)] for output in outputs]
        key = (id(strategies), *outputs, *lattices)
        if key not in shared:
            kept = [_local_bytes(strategies, o, space.lattices[n]) for o, n in zip(outputs, lattices, strict=True)]
            zero = np.zeros(len(strategies))
            shared[key] = MemoryTerms(zero, zero, zero, np.sum(kept, axis=0))
        terms[node] = shared[key]
    for node in graph.kept_from:
        strategies, number = space.strategies[node], space.lattice_of[TensorRef(node, 0)]
        if strategies.kept is not None:
            key = (-2, id(strategies), number)
            if key not in shared:
                zero = np.zeros(len(strategies))
                held = np.where(strategies.kept, _local_bytes(strategies, 0, space.lattices[number]), 0.0)
                shared[key] = MemoryTerms(zero, zero, zero, zero, held)
            terms[node] = shared[key]
    return MemoryTable(policy, terms)


def _local_bytes(strategies: Strategies, output: int, lattice: Lattice) -> np.ndarray:
    return lattice.local_bytes[strategies.output(output)]


def _parameter_terms(strategies: Strategies, lattice: Lattice, policy: MemoryPolicy, trained: bool) -> MemoryTerms:
    """Gradient and optimizer state lie where the parameter lies; a frozen parameter has neither."""
    stored = _local_bytes(strategies, 0, lattice)
    optimizer = stored / lattice.meta.itemsize * policy.optimizer_bytes_per_element
    zero = np.zeros(len(stored))
    return MemoryTerms(stored, stored if trained else zero, optimizer if trained else zero, zero)
