"""Strategy space × hardware profile -> cost table: the only place where quantities become microseconds.

The objective this feeds is serial: no overlap of compute and communication is modelled, so it is an upper bound on a step of
the same kernels and collectives.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.cost import CostTable
from planner.costing.collective import mesh_collectives
from planner.costing.compute import TIMELESS_KINDS, Kernels
from planner.costing.fusion import Traffic, fused_traffic
from planner.costing.memory import memory_table
from planner.costing.optimizer import optimizer_us
from planner.costing.pending import uses_made_pending
from planner.costing.redistribution import move_price
from planner.costing.region import with_stated
from planner.errors import InputError
from planner.graph import JointGraph, TensorRef
from planner.hardware import HardwareProfile
from planner.memory import MemoryPolicy
from planner.redistribution import cheapest_routes
from planner.strategy import Strategies, StrategySpace

LOW_PRECISION = ("bfloat16", "float16")
CAST_OP = "aten._to_copy.default"


def estimate_costs(
    space: StrategySpace,
    hardware: HardwareProfile,
    *,
    policy: MemoryPolicy | None = None,
    gpus_per_node: int | None = None,
    compiled: bool = True,
) -> CostTable:
    """Price every strategy and every placement change once per distinct piece of work.

    `policy` defaults to AdamW, `gpus_per_node` to the profile's own. `compiled` False prices eager PyTorch, where neighbouring
    pointwise ops are kernels of their own.
    """
    per_node = hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
    if per_node < 1:
        raise InputError(f"{per_node} GPUs per node", hint="It is a number of 1 or more.")
    collectives = mesh_collectives(hardware, space.mesh, per_node)
    prices = [move_price(hardware, collectives, lattice.meta.dtype) for lattice in space.lattices]
    routes = tuple(cheapest_routes(lattice, price) for lattice, price in zip(space.lattices, prices, strict=True))
    unreduced = unreduced_uses(space.graph)
    made_pending = uses_made_pending(space) - unreduced
    held, added = (
        sorted({space.lattice_of[space.graph.nodes[node].operands[slot]] for node, slot in uses})
        for uses in (unreduced, made_pending)
    )
    memory = memory_table(space, policy or MemoryPolicy())
    update_us = optimizer_us(space.graph, memory, hardware)
    return CostTable(
        space=space,
        hardware_name=hardware.name,
        hardware_hash=hardware.content_hash,
        compute_us=tuple(
            update_us.get(node, us)
            for node, us in enumerate(with_stated(space, compute_us(space, hardware, compiled=compiled), collectives))
        ),
        routes=routes,
        routes_without_reduction={
            number: cheapest_routes(space.lattices[number], prices[number], allow_reductions=False) for number in held
        },
        unreduced=unreduced,
        routes_to_pending={number: cheapest_routes(space.lattices[number], prices[number], to_pending=True) for number in added},
        made_pending=made_pending,
        memory=memory,
        gpus_per_node=per_node,
    )


def compute_us(space: StrategySpace, hardware: HardwareProfile, *, compiled: bool = True) -> tuple[np.ndarray, ...]:
    """Per node float64 [strategies]; nodes with the same strategies and the same traffic share one array."""
    prices = Kernels(hardware)
    shared: dict[tuple[int, Traffic], np.ndarray] = {}
    found = []
    for strategies, traffic in zip(space.strategies, fused_traffic(space, compiled=compiled), strict=True):
        key = (id(strategies), traffic)
        if key not in shared:
            timeless = strategies.kernel.kind in TIMELESS_KINDS
            us = np.zeros(len(strategies)) if timeless else prices.us(strategies.kernel, traffic)
            if strategies.kept is not None and not timeless:
                us = np.where(strategies.kept, _kept_us(prices, strategies, traffic), us)
            assert us.shape == (len(strategies),) and np.isfinite(us).all(), strategies.kernel.kind
            us.setflags(write=False)
            shared[key] = us
        found.append(shared[key])
    return tuple(found)


def _kept_us(prices: Kernels, strategies: Strategies, traffic: Traffic) -> np.ndarray | float:
    """float64 [strategies]: time of taking what the forward pass had. A kernel of its own is saved; as part of a larger one
    the result is read like what it is made from, and the forward pass must write what it otherwise would not: an upper bound."""
    if not traffic.joins_others:
        return 0.0
    return prices.us(strategies.kernel, replace(traffic, writes=tuple(share + 1.0 for share in traffic.writes)))


def unreduced_uses(graph: JointGraph) -> frozenset[tuple[int, int]]:
    """Uses where a pending sum must stay pending: a low-precision gradient on its way to the cast that stores it wider.

    With `bf16-mixed` precision gradients are summed over devices in the parameter's dtype, so the sum is taken after the cast.
    """
    if graph.request.precision != "bf16-mixed":
        return frozenset()
    found = set()
    for parameter in graph.parameters:
        if parameter.gradient is None:
            continue
        node = graph.nodes[parameter.gradient.node]
        if node.op != CAST_OP or not node.operands:
            continue
        source, target = graph.meta(node.operands[0]), graph.meta(TensorRef(parameter.gradient.node, 0))
        if source.dtype in LOW_PRECISION and target.is_floating and target.itemsize > source.itemsize:
            found.add((parameter.gradient.node, 0))
    return frozenset(found)
