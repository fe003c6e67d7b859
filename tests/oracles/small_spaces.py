"""Tiny random but legal strategy spaces with prices, made by hand from the nouns: no tracing, no rules, no hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from planner.cost import CostTable
from planner.graph import (
    BACKWARD,
    FORWARD,
    InitRule,
    Input,
    JointGraph,
    ModelRequest,
    Node,
    OperandRef,
    Parameter,
    TensorMeta,
    TensorRef,
)
from planner.memory import MemoryPolicy, MemoryTable, MemoryTerms
from planner.mesh import Mesh
from planner.placement import P
from planner.redistribution import CollectiveKind, MoveGroup, cheapest_routes
from planner.strategy import KernelShapes, Lattice, Strategies, StrategySpace

META = TensorMeta((8, 4), "float32")


def leaf(kind: str, name: str, meta: TensorMeta = META) -> Node:
    return Node(key=f"{kind}:{name}", op=kind, name=kind, kind=kind, phase=FORWARD, outputs=(meta,))


def op(key: str, operands: tuple[TensorRef, ...], *, phase: str = FORWARD, meta: TensorMeta = META, module: str = "") -> Node:
    """An op that reads `operands`; module defaults to the part of the key before `/`."""
    return Node(
        key=key, op="test.op.default", name="op", kind="op", phase=phase, operands=operands,
        args=tuple(OperandRef(i) for i in range(len(operands))), outputs=(meta,), module=module or key.partition("/")[0],
    )  # fmt: skip


def graph_of(nodes: list[Node], *, gradients: Mapping[int, TensorRef], loss: TensorRef, batch_dim: int | None = 0) -> JointGraph:
    """Parameters are the nodes of kind `param`; `gradients` says which tensor is the gradient of which."""
    parameters = tuple(
        Parameter(node=i, names=(n.key.split(":")[1],), gradient=gradients.get(i), init=InitRule("unknown"))
        for i, n in enumerate(nodes)
        if n.kind == "param"
    )
    inputs = tuple(Input(node=i, name=n.key.split(":")[1], batch_dim=batch_dim) for i, n in enumerate(nodes) if n.kind == "input")
    graph = JointGraph(
        request=ModelRequest(model="hand-made"), nodes=tuple(nodes), parameters=parameters, inputs=inputs, loss=loss
    )
    graph.check()
    return graph


def strategies(columns: list[tuple[int, ...]] | np.ndarray, num_operands: int) -> Strategies:
    """One row per strategy: placement number of the output, then of each operand."""
    table = np.array(columns, np.int32).reshape(-1, 1 + num_operands)
    return Strategies(table, 1, tuple(range(num_operands)), KernelShapes("pointwise", {}), "own:test")


def simple_price(rng: np.random.Generator | None = None) -> Callable[[MoveGroup], np.ndarray]:
    """µs per move: a start-up per kind plus a rate per byte; random rates if a generator is given."""
    base = {kind: 3.0 + i for i, kind in enumerate(CollectiveKind)}
    rate = 0.1 if rng is None else float(rng.uniform(0.02, 0.3))
    noise = 0.0 if rng is None else float(rng.uniform(0.0, 3.0))

    def price(group: MoveGroup) -> np.ndarray:
        if group.kind is None:
            return np.zeros(len(group.source))
        factor = 2.0 if group.kind is CollectiveKind.ALL_REDUCE else 1.0
        return base[group.kind] + noise * min(group.axes) + factor * rate * group.full_bytes

    return price


def costs_of(
    graph: JointGraph,
    mesh: Mesh,
    options: list[Strategies],
    compute_us: list[np.ndarray],
    *,
    lattices: Mapping[TensorMeta, Lattice] | None = None,
    num_bytes: Mapping[int, np.ndarray] | None = None,
    unreduced: frozenset[tuple[int, int]] = frozenset(),
    price: Callable[[MoveGroup], np.ndarray] | None = None,
) -> CostTable:
    """A cost table over one lattice per shape (all dims shardable, P allowed)."""
    price = price or simple_price()
    metas = list(dict.fromkeys(meta for node in graph.nodes for meta in node.outputs if meta is not None))
    known = {meta: full_lattice(meta, mesh) for meta in metas} | dict(lattices or {})
    ordered = tuple(known[meta] for meta in metas)
    space = StrategySpace(
        graph=graph,
        mesh=mesh,
        lattices=ordered,
        lattice_of={TensorRef(i, 0): metas.index(n.outputs[0]) for i, n in enumerate(graph.nodes) if n.outputs[0] is not None},
        strategies=tuple(options),
        replicated_for_lack_of_a_rule=(),
    )
    terms = {
        node: MemoryTerms(values.astype(float), np.zeros(len(values)), np.zeros(len(values)), np.zeros(len(values)))
        for node, values in (num_bytes or {}).items()
    }
    return CostTable(
        space=space,
        hardware_name="test",
        hardware_hash="0",
        compute_us=tuple(compute_us),
        routes=tuple(cheapest_routes(lattice, price) for lattice in ordered),
        routes_without_reduction={
            i: cheapest_routes(lattice, price, allow_reductions=False) for i, lattice in enumerate(ordered)
        },
        unreduced=unreduced,
        memory=MemoryTable(MemoryPolicy(), terms),
    )


def full_lattice(meta: TensorMeta, mesh: Mesh, *, partial: bool = True) -> Lattice:
    return Lattice.build(meta, mesh, dims=tuple(range(len(meta.shape))), partial_code=P if partial else None)


def random_costs(seed: int, *, num_ops: int = 5, options: int = 3, mesh: Mesh | None = None, tangled: bool = True) -> CostTable:
    """A random little training step: inputs, parameters, forward ops, backward ops, gradients; memory on parameters and some
    ops. About `options` strategies per node, so brute force stays possible."""
    rng = np.random.default_rng(seed)
    mesh = mesh or Mesh(axis_names=("dp", "tp"), axis_sizes=(2, 2)) if rng.random() < 0.7 else Mesh.parse("tp=2")
    num_parameters = int(rng.integers(1, 3))
    nodes = [leaf("input", "x")] + [leaf("param", f"w{i}") for i in range(num_parameters)]
    num_forward = max(1, num_ops // 2)
    for number in range(num_ops):
        count = int(rng.integers(1, 3))
        choose_from = len(nodes) if tangled else min(len(nodes), 4)
        operands = tuple(TensorRef(len(nodes) - 1 - int(rng.integers(0, choose_from)), 0) for _ in range(count))
        phase = FORWARD if number < num_forward else BACKWARD
        nodes.append(op(f"m{number}/op/{phase[:3]}#0", operands, phase=phase))
    loss = TensorRef(num_parameters + num_forward, 0)
    nodes.append(
        Node(key="output:loss", op="output", name="output", kind="output", phase=FORWARD, operands=(loss,), outputs=(META,))
    )
    first_backward = num_parameters + 1 + num_forward
    gradients = {
        i + 1: TensorRef(int(rng.integers(first_backward, len(nodes) - 1)), 0)
        for i in range(num_parameters)
        if first_backward < len(nodes) - 1
    }
    graph = graph_of(nodes, gradients=gradients, loss=loss)
    lattice = full_lattice(META, mesh)
    chosen = [_random_strategies(rng, lattice, node, options) for node in nodes]
    unreduced = frozenset(
        (i, slot)
        for i, node in enumerate(nodes)
        if node.phase == BACKWARD and node.is_op
        for slot in range(len(node.operands))
        if rng.random() < 0.15
    )
    num_bytes = {
        i: rng.integers(1, 50, len(chosen[i])) * 16
        for i, node in enumerate(nodes)
        if node.kind == "param" or (node.is_op and rng.random() < 0.3)
    }
    return costs_of(
        graph, mesh, chosen, [rng.uniform(0, 20, len(s)) for s in chosen],
        num_bytes=num_bytes, unreduced=unreduced, price=simple_price(rng),
    )  # fmt: skip


def keeping_costs(seed: int) -> CostTable:
    """A random little training step whose forward pass makes a tensor from a parameter alone, and whose backward pass makes the
    same again or takes what forward read, kept at the price of its bytes."""
    rng = np.random.default_rng([seed, 2])
    mesh = Mesh(axis_names=("dp", "tp"), axis_sizes=(2, 2)) if rng.random() < 0.7 else Mesh.parse("tp=2")
    x, w, made = TensorRef(0, 0), TensorRef(1, 0), TensorRef(2, 0)
    nodes = [leaf("input", "x"), leaf("param", "w"), op("cast/op/fwd#0", (w,))]
    readers = int(rng.integers(1, 3))
    for number in range(readers):
        nodes.append(op(f"m{number}/op/fwd#0", (made, TensorRef(len(nodes) - 1, 0) if number else x)))
    loss = TensorRef(len(nodes) - 1, 0)
    nodes.append(
        Node(key="output:loss", op="output", name="output", kind="output", phase=FORWARD, operands=(loss,), outputs=(META,))
    )
    again = TensorRef(len(nodes), 0)
    nodes.append(op("cast/op/bwd#0", (w,), phase=BACKWARD))
    others = [loss, x, w] if rng.random() < 0.5 else [loss]
    for number in range(int(rng.integers(1, 3))):
        nodes.append(op(f"b{number}/op/bwd#0", (again, others[int(rng.integers(len(others)))]), phase=BACKWARD))
    graph = graph_of(nodes, gradients={1: TensorRef(len(nodes) - 1, 0)}, loss=loss)
    lattice = full_lattice(META, mesh)
    chosen = [_random_strategies(rng, lattice, node, 2 if node.is_op else 3) for node in nodes]
    chosen[again.node] = chosen[again.node].with_kept(lattice)
    kept = chosen[again.node].kept
    assert kept is not None and graph.kept_from == {again.node: made}
    compute = [rng.uniform(0, 20, len(s)) for s in chosen]
    compute[again.node][kept] = float(rng.choice([0.0, 5.0]))
    of_node = np.where(kept, lattice.local_bytes[chosen[again.node].output(0)], 0.0)
    num_bytes = {1: rng.integers(1, 50, len(chosen[1])) * 16, again.node: of_node}
    return costs_of(graph, mesh, chosen, compute, num_bytes=num_bytes, price=simple_price(rng))


def with_pending_moves(costs: CostTable, seed: int) -> CostTable:
    """The same prices where about half of the uses may turn R into P, at a price."""
    rng = np.random.default_rng([seed, 1])
    uses = [(n, slot) for n, node in enumerate(costs.space.graph.nodes) if node.is_op for slot in range(len(node.operands))]
    chosen = frozenset(use for use in uses if use not in costs.unreduced and rng.random() < 0.5)
    routes = {}
    for number, known in enumerate(costs.routes):
        prices = {(g.axes, g.source.tobytes(), g.target.tobytes()): us for g, us in zip(known.groups, known.move_us, strict=True)}

        def price(group: MoveGroup, prices: dict[tuple[object, ...], np.ndarray] = prices) -> np.ndarray:
            as_before = prices.get((group.axes, group.source.tobytes(), group.target.tobytes()))
            return 1.0 + 0.01 * group.copy_bytes if as_before is None else as_before

        routes[number] = cheapest_routes(known.lattice, price, to_pending=True)
    return replace(costs, routes_to_pending=routes, made_pending=chosen)


def _random_strategies(rng: np.random.Generator, lattice: Lattice, node: Node, options: int) -> Strategies:
    whole = np.flatnonzero(~lattice.is_partial)
    columns = 1 + len(node.operands)
    rows = rng.integers(0, len(lattice), (options, columns))
    for column in range(columns):
        if (column == 0 and node.kind != "op") or rng.random() < 0.8:  # many pending sums would leave no plan at all
            rows[:, column] = rng.choice(whole, options)
    return strategies(np.unique(rows, axis=0), len(node.operands))
