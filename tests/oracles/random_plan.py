"""Random legal plans: any strategy of every node that the tensors can reach, any shared layouts in between.

An exporter has to carry out every legal plan, not only good ones; these reach layouts that no optimum would ever use.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from planner.constraint import Constraint
from planner.cost import CostTable
from planner.graph import FORWARD, Node, TensorRef, without_layer
from planner.plan import Plan, SolveReport
from planner.redistribution import Routes
from planner.solving.assemble import GRADIENT_STORE, assemble, price_redistributions, uses_by_phase
from planner.solving.solve import Solution

STAY = 0.35
"""Share of nodes that take a strategy at random among those that need no redistribution of their operands, if there is one."""


Draw = Callable[[int], np.random.Generator]
"""node number -> where to draw its choices from"""


def random_plan(costs: CostTable, seed: int, *, constraints: tuple[Constraint, ...] = (), layers_alike: bool = False) -> Plan:
    """A legal plan drawn at random; `constraints` are only recorded.

    With `layers_alike` the same op draws the same in all layers; so layers differ only where other tensors reach them.
    """
    nodes = costs.space.graph.nodes
    one = np.random.default_rng(seed)

    def by_name(node: int) -> np.random.Generator:
        return np.random.default_rng([seed, zlib.crc32(_name(nodes[node]).encode())])

    draw: Draw = by_name if layers_alike else lambda node: one
    strategy, shared = _strategies(costs, draw)
    shared = {**_shared(costs, strategy, draw, shared), **shared}
    compute = sum(float(us[strategy[node]]) for node, us in enumerate(costs.compute_us))
    objective = compute + price_redistributions(costs, strategy, shared)
    report = SolveReport(status="feasible", objective_us=objective, bound_us=0.0, method=f"random, seed {seed}", seconds=0.0)
    return assemble(costs, Solution(strategy=strategy, shared=shared, report=report), constraints)


def _name(node: Node) -> str:
    """The key without its layer's number; keys count ops of a module, so it is the same in all layers."""
    head, slash, rest = node.key.partition("/")
    return without_layer(head.rpartition(":")[2]) + slash + rest


Shared = dict[tuple[TensorRef, str], int]


def _strategies(costs: CostTable, draw: Draw) -> tuple[np.ndarray, Shared]:
    """And the shared placements of tensors that may be kept: what is kept is what the forward pass reads."""
    space, graph = costs.space, costs.space.graph
    shared: Shared = {}
    chosen = np.full(len(graph.nodes), -1, np.int64)
    stores: dict[TensorRef, list[int]] = {}
    for parameter in graph.parameters:
        if parameter.gradient is not None:
            stores.setdefault(parameter.gradient, []).append(parameter.node)
    for index, node in enumerate(graph.nodes):
        strategies = space.strategies[index]
        legal = np.ones(len(strategies), bool)
        free = np.ones(len(strategies), bool)
        for slot in strategies.operand_slots:
            ref = node.operands[slot]
            made = _made(costs, chosen, ref)
            wanted = strategies.operand(slot)
            legal &= np.isfinite(costs.routes_of_use(space.lattice_of[ref], index, slot).table_us[made, wanted])
            free &= wanted == made
        if strategies.kept is not None:
            taken = strategies.output(0) == _read_in_forward(costs, chosen, graph.kept_from[index], shared, draw)
            legal, free = (np.where(strategies.kept, taken, mask) for mask in (legal, free))
        for output, meta in enumerate(node.outputs):
            for parameter in stores.get(TensorRef(index, output), []) if meta is not None else []:
                stored = _made(costs, chosen, TensorRef(parameter, 0))
                routes = costs.routes[space.lattice_of[TensorRef(index, output)]]
                legal &= np.isfinite(routes.table_us[strategies.output(output), stored])
        assert legal.any(), f"no legal strategy of {node.key} after random choices before it"
        generator = draw(index)
        pool = legal & free if (legal & free).any() and generator.random() < STAY else legal
        chosen[index] = generator.choice(np.flatnonzero(pool))
    return chosen, shared


def _read_in_forward(costs: CostTable, chosen: np.ndarray, ref: TensorRef, shared: Shared, draw: Draw) -> int:
    """Placement in which the forward pass reads a tensor; a shared one is drawn when it is first asked for."""
    uses = uses_by_phase(costs)[ref, FORWARD]
    if len(uses) == 1:
        return _wanted(costs, chosen, *uses[0])
    if (ref, FORWARD) not in shared:
        shared[ref, FORWARD] = _one_shared(costs, chosen, ref, FORWARD, uses, draw)
    return shared[ref, FORWARD]


def _made(costs: CostTable, chosen: np.ndarray, ref: TensorRef) -> int:
    return int(costs.space.strategies[ref.node].output(ref.output)[chosen[ref.node]])


def _shared(costs: CostTable, chosen: np.ndarray, draw: Draw, known: Shared) -> Shared:
    return {
        key: _one_shared(costs, chosen, *key, uses, draw)
        for key, uses in uses_by_phase(costs).items()
        if len(uses) > 1 and key not in known
    }


def _one_shared(costs: CostTable, chosen: np.ndarray, ref: TensorRef, phase: str, uses: list[tuple[int, int]], draw: Draw) -> int:
    space = costs.space
    lattice = space.lattice_of[ref]
    made = _made(costs, chosen, ref)
    reachable = np.isfinite(_routes_to_shared(costs, lattice, uses).table_us[made])
    for consumer, slot in uses:
        if slot == GRADIENT_STORE or not space.strategies[consumer].is_kept(int(chosen[consumer])):
            wanted = _wanted(costs, chosen, consumer, slot)
            reachable &= np.isfinite(costs.routes_of_use(lattice, consumer, slot).table_us[:, wanted])
    assert reachable[made], (space.graph.nodes[ref.node].key, phase)
    generator = draw(ref.node)
    return made if generator.random() < STAY else int(generator.choice(np.flatnonzero(reachable)))


def _routes_to_shared(costs: CostTable, lattice: int, uses: list[tuple[int, int]]) -> Routes:
    unreduced = any(use in costs.unreduced for use in uses)
    return costs.routes_without_reduction[lattice] if unreduced else costs.routes[lattice]


def _wanted(costs: CostTable, chosen: np.ndarray, consumer: int, slot: int) -> int:
    strategies = costs.space.strategies[consumer]
    column = strategies.output(0) if slot == GRADIENT_STORE else strategies.operand(slot)
    return int(column[chosen[consumer]])
