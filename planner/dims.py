"""What the dims of a model's tensors are, read off the legal strategies: samples, sequence, features, experts, vocabulary.

Dims that some op shards together have one *colour* (rows of a product and of its factor, heads through a view). Names of
modules and parameters play no part: a colour is known by what products with parameters do with it.

    features in, out    a product with a weight contracts one colour (in) and makes another (out)
    inner, outer        colours that are made by one product and contracted by another, told apart so that every weight has at
                        most one inner dim: heads and feed-forward widths are inner, the residual stream is outer
    experts             a colour that weight, operand and result of a product have in common
    sequence            what products leave alone, apart from the samples
    vocabulary          a colour that is looked up by index: rows of an embedding table, logits at the labels
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.graph import FORWARD, JointGraph, Node, TensorRef
from planner.placement import P_MAX, S0, P, R, parse, to_codes
from planner.region import REGION, REGION_BACKWARD, Region
from planner.strategy import StrategySpace

PENDING = frozenset({P, P_MAX})

Row = tuple[int, ...]
"""Placement codes of one mesh axis: outputs, then the operands that are read."""


@dataclass(frozen=True)
class Product:
    """A forward product of an activation with a weight (a parameter, or what is made of parameters alone).

    Attributes:
        contracted, made, common, free: colours of the dims that vanish, that the weight brings, that weight and activation
            share and keep, and that only the activation has.
    """

    node: int
    weight: TensorRef
    contracted: frozenset[int]
    made: frozenset[int]
    common: frozenset[int]
    free: frozenset[int]


class _Joined:
    """Union-find over numbers."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, at: int) -> int:
        parent = self.parent
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    def join(self, a: int, b: int) -> None:
        self.parent[self.find(a)] = self.find(b)


@dataclass(frozen=True, eq=False)
class DimRoles:
    """Colours of all dims of a model and what they are.

    Attributes:
        colours: tensor -> colour of each of its dims.
        rows: per graph node, its one-axis rows, also those that the mesh is too large for.
        pending: per mesh axis, the tensors that some op can leave with a pending sum there.
        reads_input, reads_parameter: bool per graph node: what it is computed from.
    """

    space: StrategySpace
    colours: Mapping[TensorRef, tuple[int, ...]]
    rows: Sequence[frozenset[Row]]
    pending: Sequence[frozenset[TensorRef]]
    reads_input: Sequence[bool]
    reads_parameter: Sequence[bool]

    @classmethod
    def of(cls, space: StrategySpace) -> DimRoles:
        graph = space.graph
        known: dict[tuple[int, ...], tuple[list[frozenset[Row]], frozenset[Row]]] = {}
        present, rows = [], []
        for node in range(len(graph.nodes)):
            key = (id(space.strategies[node]), *(space.lattice_of.get(ref, -1) for ref in _ports(space, node)))
            if key not in known:
                possible = rows_by_axis(space, node)
                known[key] = possible, banned_rows(space, node).union(*possible)
            present.append(known[key][0])
            rows.append(known[key][1])
        pending = [_pending(space, [of_axes[axis] for of_axes in present]) for axis in range(space.mesh.num_axes)]
        return cls(space, _colours(space, rows), rows, pending, *_sources(graph))

    def dims(self, ref: TensorRef, wanted: frozenset[int]) -> tuple[int, ...]:
        """Dims of a tensor whose colour is among those wanted."""
        return tuple(dim for dim, colour in enumerate(self.colours[ref]) if colour in wanted)

    def is_weight(self, ref: TensorRef) -> bool:
        """Made of parameters, and of nothing that the data loader delivers."""
        return self.reads_parameter[ref.node] and not self.reads_input[ref.node]

    def is_constant(self, ref: TensorRef) -> bool:
        return not self.reads_parameter[ref.node] and not self.reads_input[ref.node]

    # ---- what colours are -----------------------------------------------------------------------------------------
    @cached_property
    def samples(self) -> frozenset[int]:
        found = (self.colours[TensorRef(i.node, 0)][i.batch_dim] for i in self.space.graph.inputs if i.batch_dim is not None)
        return frozenset(found)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        found = []
        for node, entry in enumerate(self.space.graph.nodes):
            if not entry.is_op or entry.phase != FORWARD:
                continue
            slots = self.space.strategies[node].operand_slots
            weights = [slot for slot in slots if self.is_weight(entry.operands[slot])]
            others = [slot for slot in slots if self.reads_input[entry.operands[slot].node]]
            if len(weights) == 1 and len(others) == 1:
                product = self._product(node, weights[0], others[0])
                if product.contracted:
                    found.append(product)
        return tuple(found)

    def _product(self, node: int, weight: int, other: int) -> Product:
        entry, strategies = self.space.graph.nodes[node], self.space.strategies[node]
        colours = self.colours[entry.operands[weight]], self.colours[entry.operands[other]]
        at = [strategies.num_outputs + strategies.operand_slots.index(slot) for slot in (weight, other)]
        kinds: dict[str, set[int]] = {"contracted": set(), "made": set(), "common": set(), "free": set()}
        for row in self.rows[node]:
            out, mine, theirs = row[0], row[at[0]], row[at[1]]
            if mine >= S0 and theirs >= S0 and out == P:
                kinds["contracted"].add(colours[0][mine - S0])
            elif mine >= S0 and theirs >= S0 and out >= S0:
                kinds["common"].add(colours[0][mine - S0])
            elif mine >= S0 and theirs == R and out >= S0:
                kinds["made"].add(colours[0][mine - S0])
            elif mine == R and theirs >= S0 and out >= S0:
                kinds["free"].add(colours[1][theirs - S0])
        return Product(node, entry.operands[weight], **{name: frozenset(found) for name, found in kinds.items()})

    @cached_property
    def experts(self) -> frozenset[int]:
        return frozenset().union(*(product.common for product in self.products)) - self.samples

    @cached_property
    def sequence(self) -> frozenset[int]:
        free: frozenset[int] = frozenset().union(*(product.free for product in self.products if not product.common))
        return free - self.samples - self.experts

    @cached_property
    def _sides(self) -> tuple[frozenset[int], frozenset[int]]:
        """Inner and outer colours: along products sides alternate, beginning with the colour that most products touch as an
        outer one. A colour that would stand on both sides is outer."""
        made: frozenset[int] = frozenset().union(*(product.made for product in self.products))
        contracted: frozenset[int] = frozenset().union(*(product.contracted for product in self.products))
        paired = (made & contracted) - self.samples - self.experts - self.sequence
        beside: dict[int, list[int]] = {colour: [] for colour in paired}
        for product in self.products:
            for a in product.contracted & paired:
                for b in product.made & paired:
                    beside[a].append(b)
                    beside[b].append(a)
        inner: dict[int, bool] = {}
        for start in sorted(paired, key=lambda colour: (-len(beside[colour]), colour)):
            if start in inner:
                continue
            inner[start] = False
            queue = deque([start])
            while queue:
                here = queue.popleft()
                for there in beside[here]:
                    if there not in inner:
                        inner[there] = not inner[here]
                        queue.append(there)
                    elif inner[there] and inner[here]:
                        inner[there] = False
        return frozenset(c for c in inner if inner[c]), frozenset(c for c in inner if not inner[c])

    @property
    def inner(self) -> frozenset[int]:
        return self._sides[0]

    @property
    def outer(self) -> frozenset[int]:
        return self._sides[1]

    @cached_property
    def vocabulary(self) -> frozenset[int]:
        made: frozenset[int] = frozenset().union(*(product.made for product in self.products))
        found: set[int] = set()
        for node, entry in enumerate(self.space.graph.nodes):
            if entry.is_op and entry.phase == FORWARD and len(self.space.strategies[node].operand_slots) > 1:
                for ref, dim in self._looked_up(node):
                    colour = self.colours[ref][dim]
                    if colour in made or self.is_weight(ref):
                        found.add(colour)
        return frozenset(found) - self.samples - self.experts - self.sequence - self.inner - self.outer

    def _looked_up(self, node: int) -> Iterator[tuple[TensorRef, int]]:
        """(operand, dim) that integers from the data index."""
        graph, strategies = self.space.graph, self.space.strategies[node]
        refs = [graph.nodes[node].operands[slot] for slot in strategies.operand_slots]
        if not any(self.reads_input[ref.node] for ref in refs if not graph.meta(ref).is_floating):
            return
        for row in self.rows[node]:
            operands = row[strategies.num_outputs :]
            sharded = [i for i, code in enumerate(operands) if code >= S0]
            if row[0] == P and len(sharded) == 1 and all(c == R for i, c in enumerate(operands) if i != sharded[0]):
                yield refs[sharded[0]], operands[sharded[0]] - S0


def _ports(space: StrategySpace, node: int) -> list[TensorRef]:
    """The tensors of the columns of a node's strategies."""
    entry, strategies = space.graph.nodes[node], space.strategies[node]
    outputs = [TensorRef(node, output) for output in range(strategies.num_outputs)]
    return outputs + [entry.operands[slot] for slot in strategies.operand_slots]


def rows_by_axis(space: StrategySpace, node: int) -> list[frozenset[Row]]:
    """Rows of a node's rule that each axis of the mesh allows."""
    mesh, codes = space.mesh, codes_of_ports(space, node)
    found = []
    for axis in range(mesh.num_axes):
        others = [other for other in range(mesh.num_axes) if other != axis]
        alone = (codes[:, :, others] == R).all((1, 2))
        chosen = codes[alone] if alone.any() else codes  # a user-controlled region may be fixed on other axes
        found.append(frozenset(map(tuple, np.unique(chosen[:, :, axis], axis=0).tolist())))
    return found


def banned_rows(space: StrategySpace, node: int) -> frozenset[Row]:
    """Rows that only the size of some axis forbids."""
    return frozenset(to_codes(parse(row.replace(",", ""))) for row in {b.row for b in space.strategies[node].banned})


def codes_of_ports(space: StrategySpace, node: int) -> np.ndarray:
    """int8 [strategies, ports, axes]: placement codes of outputs and operands; unused outputs are R."""
    strategies = space.strategies[node]
    found = np.zeros((len(strategies), strategies.columns.shape[1], space.mesh.num_axes), np.int8)
    for column, ref in enumerate(_ports(space, node)):
        if ref in space.lattice_of:
            found[:, column] = space.lattice(ref).codes[strategies.columns[:, column]]
    return found


def _colours(space: StrategySpace, rows: Sequence[frozenset[Row]]) -> dict[TensorRef, tuple[int, ...]]:
    graph = space.graph
    first: dict[TensorRef, int] = {}
    count = 0
    for ref in space.lattice_of:
        first[ref] = count
        count += len(graph.meta(ref).shape)
    joined = _Joined(count)
    for node in range(len(graph.nodes)):
        starts = [first.get(ref, -1) for ref in _ports(space, node)]
        for row in _alike(graph.nodes[node]) or rows[node]:
            dims = [start + code - S0 for start, code in zip(starts, row, strict=True) if start >= 0 and code >= S0]
            for dim in dims[1:]:
                joined.join(dim, dims[0])
    for parameter in graph.parameters:
        if parameter.gradient is not None:
            for dim in range(len(graph.meta(parameter.gradient).shape)):
                joined.join(first[parameter.gradient] + dim, first[TensorRef(parameter.node, 0)] + dim)
    return {ref: tuple(joined.find(at + dim) for dim in range(len(graph.meta(ref).shape))) for ref, at in first.items()}


def _alike(node: Node) -> list[Row]:
    """Rows of a user-controlled region whose splits mean one thing; empty for other ops, whose rows all do."""
    if node.op not in (REGION, REGION_BACKWARD):
        return []
    region = Region.loads(node.args[0])
    return [region.ports(row, None if node.op == REGION else node.args[3]) for row in region.alike]


def _pending(space: StrategySpace, rows: Sequence[frozenset[Row]]) -> frozenset[TensorRef]:
    found: set[TensorRef] = set()
    for node in range(len(space.graph.nodes)):
        ports, outputs = _ports(space, node), space.strategies[node].num_outputs
        for row in rows[node]:
            if all(code not in PENDING or ref in found for ref, code in zip(ports[outputs:], row[outputs:], strict=True)):
                found |= {ref for ref, code in zip(ports[:outputs], row, strict=False) if code in PENDING}
    return frozenset(found)


def _sources(graph: JointGraph) -> tuple[list[bool], list[bool]]:
    reads_input: list[bool] = []
    reads_parameter: list[bool] = []
    for node in graph.nodes:
        reads_input.append(node.kind in ("input", "tangent") or any(reads_input[ref.node] for ref in node.operands))
        reads_parameter.append(node.kind == "param" or any(reads_parameter[ref.node] for ref in node.operands))
    return reads_input, reads_parameter
