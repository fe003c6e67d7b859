"""The optimum by trying everything, straight from the cost table (it shares no code with the solvers)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost import CostTable
from planner.graph import FORWARD, TensorRef
from planner.redistribution import Routes


@dataclass(frozen=True)
class BestPlan:
    """`value_us` is `inf` if no plan exists. `strategy`: one optimal choice, strategy number per graph node."""

    value_us: float
    strategy: tuple[int, ...]
    used_bytes: float


Forbidden = tuple[str, str]
"""(collective, axes of a group joined by +), `*` for every kind or every axis."""


def brute_force(
    costs: CostTable,
    *,
    pins: Mapping[TensorRef, int] | None = None,
    accept: Callable[[tuple[int, ...]], bool] = lambda choice: True,
    forbidden: Sequence[Forbidden] = (),
    budget_bytes: float = np.inf,
    minimise_bytes: bool = False,
    once_per_target: bool = False,
) -> BestPlan:
    """Every combination of strategies, in one array with an axis per node; given those, the best shared placement of each
    (tensor, phase) by itself.

    `pins`: output placement numbers demanded. `accept` says of a choice (strategy number per node) whether it may be taken;
    `forbidden` collectives are not used. With `minimise_bytes` the objective is memory instead of time. With
    `once_per_target` uses that want the same placement make it once, whatever the shared placement is.
    """
    if forbidden:
        costs = _without(costs, forbidden)
    sizes = tuple(len(strategies) for strategies in costs.space.strategies)
    total, used = np.zeros(sizes), np.zeros(sizes)
    for node, us in enumerate(costs.compute_us):
        total += _along((node,), us, sizes)
    for node, terms in costs.memory.terms.items():
        used += _along((node,), terms.total, sizes)
    for (ref, phase), readers in _uses(costs).items():
        kept = [node for node, of in costs.space.graph.kept_from.items() if of == ref and phase == FORWARD]
        nodes = tuple(sorted({ref.node, *kept, *(consumer for consumer, _ in readers)}))
        total += _along(nodes, _use_us(costs, ref, readers, kept, nodes, once_per_target), sizes)
    for ref, number in (pins or {}).items():
        other = costs.space.strategies[ref.node].output(ref.output) != number
        total += _along((ref.node,), np.where(other, np.inf, 0.0), sizes)
    total[used > budget_bytes] = np.inf
    return _first(total, used if minimise_bytes else total, used, accept)


def _along(nodes: tuple[int, ...], table: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """A table over the strategies of some nodes (ascending), to be added to one over those of all nodes."""
    return np.asarray(table).reshape([size if node in nodes else 1 for node, size in enumerate(sizes)])


def _use_us(
    costs: CostTable, ref: TensorRef, readers: list[tuple[int, int]], kept: list[int], nodes: tuple[int, ...], once: bool
) -> np.ndarray:
    """Price of bringing one tensor to its readers in one phase, by the strategies of the nodes that have a say in it."""
    space = costs.space
    found = np.empty([len(space.strategies[node]) for node in nodes])
    memo: dict[tuple[object, ...], float] = {}
    for numbers in np.ndindex(found.shape):
        choice = dict(zip(nodes, numbers, strict=True))
        made = int(space.strategies[ref.node].output(ref.output)[choice[ref.node]])
        wanted = tuple(_wanted(costs, consumer, slot, choice) for consumer, slot in readers)
        read_as = _kept(costs, kept, choice)
        key = (made, wanted, read_as)
        if key not in memo:
            memo[key] = _tensor_us(costs, ref, made, readers, wanted, once, read_as)
        found[numbers] = memo[key]
    return found


def _first(total: np.ndarray, wanted: np.ndarray, used: np.ndarray, accept: Callable[[tuple[int, ...]], bool]) -> BestPlan:
    """The smallest of `wanted` that is accepted, among plans that exist."""
    order = np.argsort(np.where(np.isfinite(total), wanted, np.inf), axis=None, kind="stable")
    for number in order[: np.isfinite(total).sum()]:
        at = np.unravel_index(number, total.shape)
        choice = tuple(int(strategy) for strategy in at)
        if accept(choice):
            return BestPlan(float(total[at]), choice, float(used[at]))
    return BestPlan(np.inf, (), np.inf)


def _without(costs: CostTable, forbidden: Sequence[Forbidden]) -> CostTable:
    """The same prices where placement changes are the shortest paths over the moves that are left (Floyd and Warshall)."""

    def shortest(routes: Routes) -> Routes:
        table = np.full_like(routes.table_us, np.inf)
        np.fill_diagonal(table, 0.0)
        for group, us in zip(routes.groups, routes.move_us, strict=True):
            if group.kind is None or not any(_is_forbidden(f, str(group.kind), group.axes, costs) for f in forbidden):
                for source, target, price in zip(group.source, group.target, us, strict=True):
                    table[source, target] = min(table[source, target], price)
        for via in range(len(table)):
            table = np.minimum(table, table[:, via, None] + table[None, via, :])
        return replace(routes, table_us=table)

    return replace(
        costs,
        routes=tuple(shortest(routes) for routes in costs.routes),
        routes_without_reduction={lattice: shortest(r) for lattice, r in costs.routes_without_reduction.items()},
        routes_to_pending={lattice: shortest(r) for lattice, r in costs.routes_to_pending.items()},
    )


def _is_forbidden(forbidden: Forbidden, kind: str, axes: tuple[int, ...], costs: CostTable) -> bool:
    names = {costs.space.mesh.axis_names[axis] for axis in axes}
    return forbidden[0] in ("*", kind) and (forbidden[1] == "*" or set(forbidden[1].split("+")) <= names)


def _uses(costs: CostTable) -> dict[tuple[TensorRef, str], list[tuple[int, int]]]:
    found: dict[tuple[TensorRef, str], list[tuple[int, int]]] = {}
    for index, node in enumerate(costs.space.graph.nodes):
        for slot in costs.space.strategies[index].operand_slots:
            found.setdefault((node.operands[slot], node.phase), []).append((index, slot))
    for parameter in costs.space.graph.parameters:
        if parameter.gradient is not None:
            found.setdefault((parameter.gradient, "backward"), []).append((parameter.node, -1))
    return found


def _kept(costs: CostTable, nodes: Sequence[int], choice: Mapping[int, int]) -> frozenset[int]:
    """The placements in which backward nodes take what was read of their forward tensor."""
    found = set()
    for node in nodes:
        strategies = costs.space.strategies[node]
        if strategies.kept is not None and strategies.kept[choice[node]]:
            found.add(int(strategies.columns[choice[node], 0]))
    return frozenset(found)


def _wanted(costs: CostTable, consumer: int, slot: int, choice: Mapping[int, int]) -> int:
    """Placement number, -1 if the consumer takes what forward read and reads nothing."""
    strategies = costs.space.strategies[consumer]
    if slot != -1 and strategies.kept is not None and strategies.kept[choice[consumer]]:
        return -1
    column = strategies.output(0) if slot == -1 else strategies.operand(slot)
    return int(column[choice[consumer]])


def _tensor_us(
    costs: CostTable,
    ref: TensorRef,
    made: int,
    readers: list[tuple[int, int]],
    wanted: tuple[int, ...],
    once: bool,
    read_as: frozenset[int],
) -> float:
    """`read_as`: placements in which the tensor must be read (shared, if it has several readers), because it is kept so."""
    lattice = costs.space.lattice_of[ref]
    tables = [costs.routes_of_use(lattice, consumer, slot).table_us for consumer, slot in readers]
    if len(readers) == 1:
        if wanted[0] < 0:
            return 0.0
        return float(tables[0][made, wanted[0]]) if read_as <= {wanted[0]} else np.inf
    plain = not any(reader in costs.unreduced for reader in readers)
    first = (costs.routes[lattice] if plain else costs.routes_without_reduction[lattice]).table_us
    uses = list({(id(table), want) if once else number: (table, want)
                 for number, (table, want) in enumerate(zip(tables, wanted, strict=True))}.values())  # fmt: skip
    return min(
        float(first[made, shared]) + sum(float(table[shared, want]) for table, want in uses if want >= 0)
        if read_as <= {shared}
        else np.inf
        for shared in range(len(costs.space.lattices[lattice]))
    )
