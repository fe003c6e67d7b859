"""The pairwise problem: which strategy for every node, with a price per strategy and a price per use.

One problem node per graph node. A tensor with several uses in one phase gets one more node, its *shared* placement: it costs
nothing, has one strategy per placement, the producer pays once to reach it, and every use starts from it (a narrower use
cuts from it for free). A parameter's gradient has one more use: it is stored in the parameter's placement.

A backward op that repeats a forward one on parameters alone (a cast) has *kept* strategies: it takes what the forward pass read,
in that very placement. One more edge says so, from the shared placement (or the only reader) in forward; the edge from the
parameter is then free, and the strategy costs the memory of what is kept.

A use that wants another placement than the shared one pays for it alone, even if another use wants the same. With two uses
that is never cheapest: sharing what both want costs less, as prices obey direct <= via. With more it could be only if going from
the shared placement to each of two others were cheaper than from one of these to the other.

The objective is the sum of `unary_us` over nodes and of table entries over edges: what is emitted, once each, but for such equal
private changes. These are merged when the plan is put together (`assemble.py`): carried out once, and told as `merged_us` of the
report. "The second of two equal ones is free" joins more than two nodes, so the pairwise objective cannot say it; bound and
`optimal` speak of the objective as it stands here, of which the plan's own time is at most `merged_us` less.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost import CostTable
from planner.errors import InfeasibleError
from planner.graph import FORWARD, JointGraph, TensorRef
from planner.redistribution import Routes
from planner.solving.consistency import make_consistent
from planner.solving.layout import EdgeSpec, Layout, flatten

GRADIENT_SLOT = -1
"""Operand slot of the use "stored as the gradient of this parameter"."""

SharedKey = tuple[TensorRef, str]


@dataclass(frozen=True, kw_only=True, eq=False)
class PairwiseProblem:
    """Data of the problem; strategies that no neighbour can ever serve are already gone.

    Attributes:
        layout: nodes in sweep order, edges, tables.
        unary_us: float64, flat over strategies, computation time.
        num_bytes: float64, flat over strategies, memory that the strategy keeps on a device.
        strategy_numbers: flat, the numbers of the surviving strategies (placement numbers for shared nodes).
        node_of: graph node -> problem node.
        shared_of: (tensor, phase) -> problem node of its shared placement.
    """

    layout: Layout
    unary_us: np.ndarray
    num_bytes: np.ndarray
    strategy_numbers: np.ndarray
    node_of: np.ndarray
    shared_of: Mapping[SharedKey, int]

    def value_us(self, choice: np.ndarray) -> float:
        """Price of a choice (one strategy per problem node), `inf` if a pair in it is impossible."""
        lay = self.layout
        return float(self.unary_us[lay.first[:-1] + choice].sum() + self.edge_us(choice).sum())

    def edge_us(self, choice: np.ndarray) -> np.ndarray:
        """float64 [edges]: price of every use."""
        lay = self.layout
        row = lay.pool[lay.port_u + choice[lay.edge_u]].astype(np.int64)
        column = lay.pool[lay.port_v + choice[lay.edge_v]]
        return lay.table[lay.table_at[lay.edge_table] + row * lay.table_size[lay.edge_table] + column]

    def chosen_numbers(self, choice: np.ndarray) -> np.ndarray:
        """int64 [problem nodes]: the strategy (or shared placement) number of each choice."""
        return self.strategy_numbers[self.layout.first[:-1] + choice]

    def numbers_at(self, node: int) -> np.ndarray:
        """Numbers of the surviving strategies of a problem node."""
        return self.strategy_numbers[self.layout.span(node)]

    def used_bytes(self, choice: np.ndarray) -> int:
        return round(float(self.num_bytes[self.layout.first[:-1] + choice].sum()))

    @property
    def num_strategies(self) -> int:
        return len(self.unary_us)


Use = tuple[int, int]
"""(consumer graph node, operand slot)"""


def uses_by_phase(costs: CostTable) -> dict[SharedKey, list[Use]]:
    """(tensor, phase) -> its uses in that phase, in graph order; gradient stores come last."""
    found: dict[SharedKey, list[Use]] = {}
    graph = costs.space.graph
    for consumer, node in enumerate(graph.nodes):
        for slot in costs.space.strategies[consumer].operand_slots:
            found.setdefault((node.operands[slot], node.phase), []).append((consumer, slot))
    for leaf, (ref, phase) in graph.stored.items():
        found.setdefault((ref, phase), []).append((leaf, GRADIENT_SLOT))
    return found


def sweep_order(graph: JointGraph, uses: Mapping[SharedKey, list[Use]]) -> list[int]:
    """Graph nodes in the order of sweeps: leaves (parameters, inputs) stand just before their first use."""
    first_reader: dict[int, int] = {}
    for (ref, _), found in uses.items():
        readers = [consumer for consumer, slot in found if slot != GRADIENT_SLOT]
        if readers:
            first_reader[ref.node] = min(first_reader.get(ref.node, len(graph.nodes)), *readers)

    def place(index: int) -> tuple[float, int]:
        leaf = not graph.nodes[index].operands
        return (first_reader[index] - 0.5 if leaf and index in first_reader else index, index)

    return sorted(range(len(graph.nodes)), key=place)


class _Draft:
    """Nodes and edges while they are being listed."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self.space = costs.space
        self.unary: list[np.ndarray] = []
        self.bytes: list[np.ndarray] = []
        self.numbers: list[np.ndarray] = []
        self.edges: list[EdgeSpec] = []
        self.tables: list[np.ndarray] = []
        self._table_number: dict[tuple[object, ...], int] = {}
        self._column: dict[tuple[int, int], np.ndarray] = {}
        self._identity: dict[int, np.ndarray] = {}
        self._translated: dict[tuple[int, int], np.ndarray] = {}
        self._nothing: dict[tuple[int, bytes], np.ndarray] = {}

    def add_node(self, unary: np.ndarray, num_bytes: np.ndarray, numbers: np.ndarray) -> int:
        self.unary.append(unary)
        self.bytes.append(num_bytes)
        self.numbers.append(numbers)
        return len(self.unary) - 1

    def identity(self, size: int) -> np.ndarray:
        return self._identity.setdefault(size, np.arange(size, dtype=np.int32))

    def output(self, ref: TensorRef) -> np.ndarray:
        return self._port(ref.node, ref.output)

    def operand(self, ref: TensorRef, consumer: int, slot: int) -> np.ndarray:
        """Placement numbers (in the lattice of `ref`) that the consumer's strategies require; the size of the lattice where they
        require nothing."""
        if slot == GRADIENT_SLOT:
            return self._stored(ref, consumer)
        strategies = self.space.strategies[consumer]
        port = self._port(consumer, strategies.num_outputs + strategies.operand_slots.index(slot))
        return port if strategies.kept is None else self._or_nothing(port, strategies.kept, len(self.space.lattice(ref)))

    def kept(self, node: int) -> np.ndarray:
        """Placement numbers that kept strategies take from forward; the size of the lattice for all others."""
        strategies = self.space.strategies[node]
        assert strategies.kept is not None, "nothing can be kept here"
        return self._or_nothing(self._port(node, 0), ~strategies.kept, len(self.space.lattice(TensorRef(node, 0))))

    def _or_nothing(self, port: np.ndarray, nothing: np.ndarray, number: int) -> np.ndarray:
        key = (id(port), nothing.tobytes())
        if key not in self._nothing:
            self._nothing[key] = np.where(nothing, np.int32(number), port)
        return self._nothing[key]

    def _stored(self, gradient: TensorRef, parameter: int) -> np.ndarray:
        """Placements of a parameter in the lattice of its gradient; strategies whose placement it lacks get -1."""
        lattices = self.space.lattice_of[TensorRef(parameter, 0)], self.space.lattice_of[gradient]
        own = self._port(parameter, 0)
        if lattices[0] == lattices[1]:
            return own
        key = (id(own), lattices[1])
        if key not in self._translated:
            parameter_lattice, gradient_lattice = (self.space.lattices[number] for number in lattices)
            self._translated[key] = gradient_lattice.index(parameter_lattice.codes)[own].astype(np.int32)
        return self._translated[key]

    def _port(self, node: int, column: int) -> np.ndarray:
        strategies = self.space.strategies[node]
        key = (id(strategies), column)
        if key not in self._column:
            self._column[key] = np.ascontiguousarray(strategies.columns[:, column])
        return self._column[key]

    def add_edge(
        self,
        source: int,
        source_port: np.ndarray,
        target: int,
        target_port: np.ndarray,
        routes: Routes,
        *,
        optional: bool = False,
    ) -> None:
        """A tensor goes from `source` to `target`; stored so that the earlier node comes first. `optional`: the target may
        require nothing, as one more placement that costs nothing to reach."""
        backwards = source > target
        key = (id(routes), backwards, optional)
        if key not in self._table_number:
            self._table_number[key] = len(self.tables)
            prices = _with_nothing(routes.table_us) if optional else routes.table_us
            self.tables.append(prices.T if backwards else prices)
        self._add(source, source_port, target, target_port, self._table_number[key])

    def keep(self, source: int, source_port: np.ndarray, target: int, target_port: np.ndarray, size: int) -> None:
        """Backward (`target`) can take what the forward pass read (of `size` placements): in the very placement, for nothing."""
        assert source < target, "forward comes first"
        key = ("kept", size)
        if key not in self._table_number:
            self._table_number[key] = len(self.tables)
            same = np.full((size, size), np.inf)
            np.fill_diagonal(same, 0.0)
            self.tables.append(_with_nothing(same))
        self._add(source, source_port, target, target_port, self._table_number[key])

    def _add(self, source: int, source_port: np.ndarray, target: int, target_port: np.ndarray, table: int) -> None:
        backwards = source > target
        if backwards:
            self.edges.append(EdgeSpec(target, source, target_port, source_port, table))
        else:
            self.edges.append(EdgeSpec(source, target, source_port, target_port, table))

    def tie(self, refs: Sequence[TensorRef], node_of: np.ndarray) -> None:
        """Equal placements for all tensors, as edges from each to the next in sweep order: nothing if equal, else impossible."""
        ordered = sorted(refs, key=lambda ref: node_of[ref.node])
        every = np.unique(np.concatenate([self.space.lattice(ref).codes for ref in ordered]), axis=0)
        number = {tuple(codes): i for i, codes in enumerate(every.tolist())}
        equal = np.full((len(every), len(every)), np.inf)
        np.fill_diagonal(equal, 0.0)
        table = len(self.tables)
        self.tables.append(equal)
        ports: dict[tuple[int, int], np.ndarray] = {}

        def port(ref: TensorRef) -> np.ndarray:
            own, lattice = self.output(ref), self.space.lattice_of[ref]
            if (id(own), lattice) not in ports:
                of_lattice = np.array([number[tuple(codes)] for codes in self.space.lattices[lattice].codes.tolist()], np.int32)
                ports[id(own), lattice] = of_lattice[own]
            return ports[id(own), lattice]

        for a, b in itertools.pairwise(ordered):
            self.edges.append(EdgeSpec(int(node_of[a.node]), int(node_of[b.node]), port(a), port(b), table))

    def drop_unplaced(self) -> None:
        """Drop strategies with placement number -1: their placement does not exist on the other side of an edge."""
        masks = [np.ones(len(values), np.bool_) for values in self.unary]
        for edge in self.edges:
            masks[edge.u] &= edge.port_u >= 0
            masks[edge.v] &= edge.port_v >= 0
        self.compact(masks)

    def compact(self, masks: list[np.ndarray]) -> None:
        """Keep only the strategies in the masks; equal cuts of equal arrays stay one array."""
        memo: dict[tuple[int, bytes], tuple[np.ndarray, np.ndarray]] = {}

        def cut(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
            if mask.all():
                return values
            key = (id(values), mask.tobytes())
            if key not in memo:
                memo[key] = (values[mask], values)  # the original is kept alive: its id is the key
            return memo[key][0]

        self.edges = [
            EdgeSpec(e.u, e.v, cut(e.port_u, masks[e.u]), cut(e.port_v, masks[e.v]), e.table) for e in self.edges
        ]  # fmt: skip
        for column in (self.unary, self.bytes, self.numbers):
            column[:] = [cut(values, mask) for values, mask in zip(column, masks, strict=True)]

    def layout(self) -> Layout:
        return flatten([len(values) for values in self.unary], self.edges, self.tables)


def _with_nothing(prices: np.ndarray) -> np.ndarray:
    """One more placement, which every other one reaches for nothing and none is reached from."""
    size = len(prices)
    found = np.full((size + 1, size + 1), np.inf)
    found[:size, :size] = prices
    found[:, size] = 0.0
    return found


def build_problem(costs: CostTable, ties: Sequence[Sequence[TensorRef]] = ()) -> PairwiseProblem:
    """List nodes and uses, then drop what arc consistency rules out. The tensors of each tie get the same placement.

    Raises:
        InfeasibleError: some node has no strategy that its neighbours can serve, whatever the constraints.
    """
    graph, uses = costs.space.graph, uses_by_phase(costs)
    draft = _Draft(costs)
    node_of = np.full(len(graph.nodes), -1, np.int64)
    shared_of: dict[SharedKey, int] = {}
    several: dict[int, list[SharedKey]] = {}
    for key, found in uses.items():
        if len(found) > 1:
            several.setdefault(key[0].node, []).append(key)
    for index in sweep_order(graph, uses):
        size = len(costs.space.strategies[index])
        terms = costs.memory.terms.get(index)
        num_bytes = np.zeros(size) if terms is None else terms.total
        node_of[index] = draft.add_node(costs.compute_us[index], num_bytes, draft.identity(size))
        for key in several.get(index, ()):
            size = len(costs.space.lattice(key[0]))
            shared_of[key] = draft.add_node(np.zeros(size), np.zeros(size), draft.identity(size))
    for key, found in uses.items():
        _add_uses(draft, key, found, node_of, shared_of)
    for node, ref in graph.kept_from.items():
        if costs.space.strategies[node].kept is not None:
            _add_keeping(draft, node, ref, uses[ref, FORWARD], node_of, shared_of)
    for tied in ties:
        draft.tie(tied, node_of)
    draft.drop_unplaced()
    raw = draft.layout()
    alive = np.ones(raw.first[-1], np.bool_)
    emptied = make_consistent(raw, alive)
    if emptied >= 0:
        where = next((graph.nodes[i].key for i in range(len(graph.nodes)) if node_of[i] == emptied), "a shared tensor")
        raise InfeasibleError(
            f"no strategy of {where} fits its neighbours on mesh {costs.space.mesh}",
            hint="Try another mesh, or other batch and sequence lengths.",
        )
    draft.compact([alive[raw.span(node)] for node in range(raw.num_nodes)])
    return PairwiseProblem(
        layout=draft.layout(),
        unary_us=np.concatenate(draft.unary),
        num_bytes=np.concatenate(draft.bytes),
        strategy_numbers=np.concatenate(draft.numbers).astype(np.int64),
        node_of=node_of,
        shared_of=shared_of,
    )


def _add_uses(draft: _Draft, key: SharedKey, found: list[Use], node_of: np.ndarray, shared_of: Mapping[SharedKey, int]) -> None:
    """Edges of one tensor in one phase: producer -> [shared ->] every use."""
    costs, ref = draft.costs, key[0]
    lattice = costs.space.lattice_of[ref]
    source, port = int(node_of[ref.node]), draft.output(ref)
    if key in shared_of:
        # If one use must not reduce, the way to the shared placement must not either: that use would come after it.
        routes = costs.routes[lattice]
        for consumer, slot in found:
            if (consumer, slot) in costs.unreduced:
                routes = costs.routes_of_use(lattice, consumer, slot)
        everything = draft.identity(len(costs.space.lattice(ref)))
        draft.add_edge(source, port, shared_of[key], everything, routes)
        source, port = shared_of[key], everything
    for consumer, slot in found:
        routes = costs.routes_of_use(lattice, consumer, slot)
        optional = slot != GRADIENT_SLOT and costs.space.strategies[consumer].kept is not None
        draft.add_edge(source, port, int(node_of[consumer]), draft.operand(ref, consumer, slot), routes, optional=optional)


def _add_keeping(
    draft: _Draft, node: int, ref: TensorRef, found: list[Use], node_of: np.ndarray, shared_of: Mapping[SharedKey, int]
) -> None:
    """The edge from what the forward pass reads of `ref`, its shared placement or that of its only use, to `node`."""
    size = len(draft.space.lattice(ref))
    if (ref, FORWARD) in shared_of:
        draft.keep(shared_of[ref, FORWARD], draft.identity(size), int(node_of[node]), draft.kept(node), size)
    else:
        consumer, slot = found[0]
        draft.keep(int(node_of[consumer]), draft.operand(ref, consumer, slot), int(node_of[node]), draft.kept(node), size)
