"""A deep model folded to a few of its layers: where message passing on the whole model starts.

Equal layers of a deep model end with equal messages. So the first and the last layers are taken out of the problem and joined
to a shallow one; it is solved, and each of its messages is copied to every layer that is like it. Bounds hold for any
messages: nothing is tied and nothing is assumed, a layer that differs only has a worse start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost import CostTable
from planner.graph import layer_of, without_layer
from planner.solving.consistency import make_consistent
from planner.solving.layout import EdgeSpec, Layout, flatten
from planner.solving.message_passing import Effort, MessagePassing, Outcome
from planner.solving.problem import PairwiseProblem

OUTSIDE = -1
"""Layer number of nodes that lie in no layer."""

_MAX_HEAD, _MAX_PERIOD, _TAIL = 4, 4, 2

Address = int
"""Number of a node's name without its layer: the same in all layers."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where problem nodes lie: `layer` int64 [nodes], 0, 1, ... or `OUTSIDE`; `address` int64 [nodes]."""

    layer: np.ndarray
    address: np.ndarray

    @classmethod
    def of(cls, costs: CostTable, problem: PairwiseProblem) -> Places:
        """Leaves go with their name, shared placements with their producer."""
        layer = np.full(problem.layout.num_nodes, OUTSIDE, np.int64)
        address = np.zeros(problem.layout.num_nodes, np.int64)
        names: dict[tuple[object, ...], Address] = {}
        numbers, keys = [], []
        for index, node in enumerate(costs.space.graph.nodes):
            found = layer_of(node.module or node.key.partition(":")[2])
            numbers.append(OUTSIDE if found is None else found)
            keys.append(node.key if found is None else without_layer(node.key))
            at = problem.node_of[index]
            layer[at], address[at] = numbers[-1], names.setdefault((keys[-1],), len(names))
        for (ref, phase), at in problem.shared_of.items():
            layer[at] = numbers[ref.node]
            address[at] = names.setdefault((keys[ref.node], ref.output, phase), len(names))
        return cls(layer, address)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Layers kept: the first `head + period` and the last `tail` of `depth`. What is left out repeats with the period, so the
    first layer of the tail can follow the last one of the front."""

    head: int
    period: int
    tail: int
    depth: int

    @property
    def front(self) -> int:
        return self.head + self.period

    @property
    def left_out(self) -> int:
        return self.depth - self.front - self.tail

    def keeps(self, layer: int) -> bool:
        return layer < self.front or layer >= self.depth - self.tail

    def folded(self, layer: int) -> int:
        """Number, among the kept layers, of the one that stands for a layer."""
        if layer < self.front:
            return layer
        if layer >= self.depth - self.tail:
            return layer - self.left_out
        return self.head + (layer - self.head) % self.period

    @classmethod
    def find(cls, places: Places, layout: Layout) -> Cut | None:
        """The smallest cut that leaves out at least half of the layers; None if layers do not repeat."""
        depth = int(places.layer.max(initial=OUTSIDE)) + 1
        sizes = np.diff(layout.first)
        contents: list[set[tuple[int, int]]] = [set() for _ in range(depth)]
        for layer, address, size in zip(places.layer.tolist(), places.address.tolist(), sizes.tolist(), strict=True):
            if layer != OUTSIDE:
                contents[layer].add((address, size))
        for head in range(1, _MAX_HEAD + 1):
            for period in range(1, _MAX_PERIOD + 1):
                repeats = all(contents[i] == contents[i + period] for i in range(head, depth - 1 - period))
                tail = _TAIL + (depth - head - _TAIL) % period
                cut = cls(head=head, period=period, tail=tail, depth=depth)
                if repeats and cut.left_out >= depth / 2:
                    return cut
        return None


@dataclass(frozen=True, eq=False)
class Folding:
    """The shallow problem and what its parts stand for.

    Attributes:
        problem: the shallow problem; its prices are set with `strategies`.
        strategies: int64 [strategies of the shallow problem], the entry of the whole problem that each is.
        node_from: int64 [whole nodes], shallow node that stands for a node, -1 = none.
        edge_from: int64 [whole edges], shallow edge that stands for an edge, -1 = none.
    """

    problem: PairwiseProblem
    strategies: np.ndarray
    node_from: np.ndarray
    edge_from: np.ndarray

    def solve(self, whole: MessagePassing, effort: Effort) -> tuple[MessagePassing, Outcome] | None:
        """The shallow problem at the whole problem's prices; None if the kept layers do not fit together."""
        lay, cost = self.problem.layout, whole.cost_us[self.strategies]
        alive = np.isfinite(cost)
        if make_consistent(lay, alive) >= 0:
            return None
        passing = MessagePassing(self.problem, whole.nudges_us[self.strategies])
        passing.set_costs(np.where(alive, cost, np.inf))
        return passing, passing.run(effort)

    def start(self, whole: MessagePassing, effort: Effort) -> np.ndarray | None:
        """Solve the shallow problem at the present prices and copy its messages to the whole one. -> a plan to begin with"""
        solved = self.solve(whole, effort)
        if solved is None:
            return None
        shallow, outcome = solved
        _copy_messages(self.edge_from, shallow, whole)
        return self._spread(outcome.choice, whole)

    def _spread(self, choice: np.ndarray, whole: MessagePassing) -> np.ndarray:
        """A shallow plan for the whole problem; strategies that are ruled out there become living ones."""
        first = whole.layout.first[:-1]
        least = np.minimum.reduceat(
            np.where(np.isfinite(whole.cost_us), np.arange(len(whole.cost_us)), len(whole.cost_us)), first
        )
        plan = np.where(self.node_from >= 0, choice[self.node_from], 0)
        return np.where(np.isfinite(whole.cost_us[first + plan]), plan, least - first)


def _copy_messages(edge_from: np.ndarray, shallow: MessagePassing, whole: MessagePassing) -> None:
    at, source_at = whole.layout.message_at, shallow.layout.message_at
    stands = np.flatnonzero(edge_from >= 0)
    for edge, source in zip(stands.tolist(), edge_from[stands].tolist(), strict=True):
        target, origin = slice(at[edge], at[edge + 1]), slice(source_at[source], source_at[source + 1])
        whole.messages.forward[target] = shallow.messages.forward[origin]
        whole.messages.backward[target] = shallow.messages.backward[origin]
    whole.mark_stale()


EdgeName = tuple[int, int, int, int, int]
"""Address of u, address of v, layer of u, layer of v, number among the edges for which these are equal."""


def fold(problem: PairwiseProblem, places: Places) -> Folding | None:
    """The folding of a problem with many equal layers; None for others."""
    lay = problem.layout
    cut = Cut.find(places, lay)
    if cut is None:
        return None
    kept = np.array([layer == OUTSIDE or cut.keeps(layer) for layer in places.layer.tolist()])
    nodes = np.flatnonzero(kept)
    number = np.full(lay.num_nodes, -1, np.int64)
    number[nodes] = np.arange(len(nodes))
    names = list(_edge_names(places, lay))
    joined = _joined_edges(lay, cut, kept, names)
    strategies = np.concatenate([np.arange(lay.first[node], lay.first[node + 1]) for node in nodes])
    shallow = replace(
        problem,
        layout=_shallow_layout(lay, nodes, number, list(joined.values())),
        unary_us=problem.unary_us[strategies],
        num_bytes=problem.num_bytes[strategies],
        strategy_numbers=problem.strategy_numbers[strategies],
        node_of=np.zeros(0, np.int64),
        shared_of={},
    )
    edge_of = {name: i for i, name in enumerate(joined)}
    table = [int(lay.edge_table[edge]) for edge, _ in joined.values()]
    edge_from = np.array([edge_of.get(_folded(name, cut), -1) for name in names], np.int64)
    for edge, source in enumerate(edge_from.tolist()):
        if source >= 0 and table[source] != lay.edge_table[edge]:
            edge_from[edge] = -1
    return Folding(shallow, strategies, _node_from(lay, places, cut, number), edge_from)


def _edge_names(places: Places, lay: Layout) -> Iterator[EdgeName]:
    seen: dict[tuple[int, int, int, int], int] = {}
    u, v = lay.edge_u, lay.edge_v
    columns = (places.address[u], places.address[v], places.layer[u], places.layer[v])
    for ends in zip(*(column.tolist() for column in columns), strict=True):
        seen[ends] = seen.get(ends, -1) + 1
        yield (*ends, seen[ends])


def _folded(name: EdgeName, cut: Cut) -> EdgeName:
    """The name of the shallow edge that stands for an edge. Edges from layer to layer stay such."""
    address_u, address_v, u, v, count = name
    if OUTSIDE not in (u, v) and abs(u - v) <= 1:
        lower = min(u, v)
        step = cut.folded(lower) - lower
        return address_u, address_v, u + step, v + step, count
    u, v = (layer if layer == OUTSIDE else cut.folded(layer) for layer in (u, v))
    return address_u, address_v, u, v, count


def _joined_edges(lay: Layout, cut: Cut, kept: np.ndarray, names: Sequence[EdgeName]) -> dict[EdgeName, tuple[int, int]]:
    """Shallow edges: name -> the whole edges that give its u side and its v side. They differ where the front meets the tail."""
    edge_of = {name: edge for edge, name in enumerate(names)}
    found: dict[EdgeName, tuple[int, int]] = {}
    for edge, name in enumerate(names):
        if kept[lay.edge_u[edge]] and kept[lay.edge_v[edge]]:
            found[_folded(name, cut)] = edge, edge
            continue
        *addresses, u, v, count = name
        if sorted((u, v)) != [cut.front - 1, cut.front]:
            continue
        other = edge_of.get((*addresses, u + cut.left_out, v + cut.left_out, count), -1)  # type: ignore[arg-type]
        if other >= 0 and lay.edge_table[other] == lay.edge_table[edge]:
            found[_folded(name, cut)] = (edge, other) if u < v else (other, edge)
    return found


def _shallow_layout(lay: Layout, nodes: np.ndarray, number: np.ndarray, joined: Sequence[tuple[int, int]]) -> Layout:
    tables: dict[int, int] = {}
    specs = []
    for u_side, v_side in joined:
        table = tables.setdefault(int(lay.edge_table[u_side]), len(tables))
        u, v = int(number[lay.edge_u[u_side]]), int(number[lay.edge_v[v_side]])
        specs.append(EdgeSpec(u, v, lay.ports(u_side)[0], lay.ports(v_side)[1], table))
    at, size = lay.table_at, lay.table_size
    arrays = [lay.table[at[t] : at[t + 1]].reshape(size[t], size[t]) for t in tables]
    return flatten(np.diff(lay.first)[nodes].tolist(), specs, arrays)


def _node_from(lay: Layout, places: Places, cut: Cut, number: np.ndarray) -> np.ndarray:
    """Shallow node that stands for each node: that of the same name in the layer that stands for its layer."""
    sizes = np.diff(lay.first)
    node_of: dict[tuple[int, int, int], int] = {}
    wheres = list(zip(places.address.tolist(), places.layer.tolist(), sizes.tolist(), strict=True))
    for node, (address, layer, size) in enumerate(wheres):
        if number[node] >= 0:
            node_of[address, layer if layer == OUTSIDE else cut.folded(layer), size] = int(number[node])
    found = [node_of.get((a, layer if layer == OUTSIDE else cut.folded(layer), size), -1) for a, layer, size in wheres]
    return np.array(found, np.int64)
