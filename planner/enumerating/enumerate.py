"""Graph and mesh -> all strategies of all nodes. Identical ops are enumerated once and shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import planner.enumerating.rules  # noqa: F401 - fills the registry
from planner.enumerating.dtensor_rules import rows_from_dtensor
from planner.enumerating.expand import expand, leaf_strategies
from planner.enumerating.registry import FACTORY_OPS, RULES, OpSignature, Row
from planner.enumerating.rules.region import REGION_OPS, no_strategy, rows_of_axes
from planner.enumerating.useful_dims import useful_dims
from planner.graph import JointGraph, Node, TensorMeta, TensorRef
from planner.mesh import Mesh
from planner.placement import P_MAX, P, R
from planner.strategy import Lattice, Strategies, StrategySpace
from planner.torch_compat import DTensorRules

MAX_OPS = frozenset({"aten.amax.default", "aten.max.dim"})
"""Ops whose output over a sharded dim is a pending maximum, not a pending sum."""


@dataclass(frozen=True)
class RuleRows:
    """One-axis rows of a signature and where they come from (`own:<family>`, `dtensor`, `none`)."""

    rows: tuple[Row, ...]
    rule: str


def enumerate_strategies(graph: JointGraph, mesh: Mesh) -> StrategySpace:
    """All legal strategies of every node on the mesh. Changes nothing it is given.

    Raises:
        InputError: the contract of a user-controlled region does not fit the mesh.
    """
    slots = [_edge_slots(node) for node in graph.nodes]
    distinct: dict[OpSignature, int] = {}
    numbers = [distinct.setdefault(OpSignature.of(node, graph), len(distinct)) if node.is_op else -1 for node in graph.nodes]
    signatures = list(distinct)
    tables = DTensorRules.load()
    rows = [rule_rows(signature, tables) for signature in signatures]
    per_node = [None if number < 0 else rows[number] for number in numbers]
    dims = useful_dims(graph, [None if found is None else found.rows for found in per_node], slots)
    lattices, lattice_of = _lattices(graph, mesh, dims)
    shared: dict[tuple[object, ...], Strategies] = {}
    strategies = []
    for index, node in enumerate(graph.nodes):
        outputs = [lattice_of.get(TensorRef(index, output), -1) for output in range(len(node.outputs))]
        ports = [*outputs, *(lattice_of[node.operands[slot]] for slot in slots[index])]
        key = (numbers[index], node.kind, tuple(ports))
        if key not in shared:
            signature = signatures[numbers[index]] if node.is_op else None
            shared[key] = _node_strategies(node, signature, per_node[index], ports, lattices, slots[index], mesh)
        strategies.append(shared[key])
    _offer_keeping(graph, strategies, lattices, lattice_of)
    return StrategySpace(
        graph=graph,
        mesh=mesh,
        lattices=tuple(lattices),
        lattice_of=lattice_of,
        strategies=tuple(strategies),
        replicated_for_lack_of_a_rule=tuple(
            node.key for node, found in zip(graph.nodes, per_node, strict=True) if found is not None and found.rule == "none"
        ),
    )


def _offer_keeping(
    graph: JointGraph, strategies: list[Strategies], lattices: list[Lattice], lattice_of: Mapping[TensorRef, int]
) -> None:
    """Let ops that backward repeats take what forward had, where both have the same placements."""
    known: dict[int, Strategies] = {}
    for node, ref in graph.kept_from.items():
        own, number = strategies[node], lattice_of[TensorRef(node, 0)]
        if number == lattice_of[ref] and own.operand_slots:
            strategies[node] = known.setdefault(id(own), own.with_kept(lattices[number]))


def rule_rows(signature: OpSignature, tables: DTensorRules) -> RuleRows:
    """One-axis rows: our own rule first, then DTensor's, else replicated. Pending sums of integers are left out, and P(max)
    is kept only where a maximum makes it: nothing takes it in unreduced."""
    is_factory = signature.op in FACTORY_OPS
    width = len(signature.outputs) + (0 if is_factory else len(signature.operands))
    if signature.op in RULES:
        function, family = RULES[signature.op]
        rows, source = function(signature), f"own:{family}"
    else:
        found = rows_from_dtensor(signature, tables)
        rows, source = (found, "dtensor") if found else ([(R,) * width], "none")
    metas = [*signature.outputs, *(() if is_factory else signature.operands)]
    assert all(len(row) == width for row in rows), (signature.op, width)
    outputs = len(signature.outputs)
    kept = [row for row in rows if P_MAX not in row[outputs:] and (P_MAX not in row or signature.op in MAX_OPS)]
    kept = [row for row in kept if all(_fits(code, meta) for code, meta in zip(row, metas, strict=True))]
    return RuleRows(tuple(dict.fromkeys([(R,) * width, *kept])), source)


def _fits(code: int, meta: TensorMeta | None) -> bool:
    return meta is None or code not in (P, P_MAX) or meta.is_floating


def _edge_slots(node: Node) -> tuple[int, ...]:
    """Operands that are read. Factory ops only look at the shape of theirs."""
    return () if node.op in FACTORY_OPS else tuple(range(len(node.operands)))


def _lattices(
    graph: JointGraph, mesh: Mesh, dims: Mapping[TensorRef, tuple[int, ...]]
) -> tuple[list[Lattice], dict[TensorRef, int]]:
    """One lattice per distinct (meta, dims, kind of pending reduction)."""
    lattices: list[Lattice] = []
    numbers: dict[tuple[object, ...], int] = {}
    lattice_of: dict[TensorRef, int] = {}
    for index, node in enumerate(graph.nodes):
        for output, meta in enumerate(node.outputs):
            if meta is None:
                continue
            ref = TensorRef(index, output)
            partial = None if not meta.is_floating else P_MAX if node.op in MAX_OPS else P
            key = (meta, dims[ref], partial)
            if key not in numbers:
                numbers[key] = len(lattices)
                lattices.append(Lattice.build(meta, mesh, dims=dims[ref], partial_code=partial))
            lattice_of[ref] = numbers[key]
    return lattices, lattice_of


def _node_strategies(
    node: Node,
    signature: OpSignature | None,
    found: RuleRows | None,
    ports: list[int],
    lattices: list[Lattice],
    slots: tuple[int, ...],
    mesh: Mesh,
) -> Strategies:
    if signature is None or found is None:
        return leaf_strategies(lattices[ports[0]], replicated_only=node.kind == "tangent", operand=node.kind == "output")
    of_ports = [None if p < 0 else lattices[p] for p in ports]
    if signature.op not in REGION_OPS:
        return expand(signature, found.rows, found.rule, of_ports, slots, mesh)
    strategies = expand(signature, found.rows, found.rule, of_ports, slots, mesh, rows_of_axes(signature, mesh))
    if not len(strategies):
        raise no_strategy(signature, mesh, [banned.reason for banned in strategies.banned])
    return strategies
