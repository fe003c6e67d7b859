"""A deep model solved from a shallow one: same optimum and proof as without, for models whose layers repeat, differ or lack."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from planner.cost import CostTable
from planner.graph import BACKWARD, FORWARD, Node, TensorRef
from planner.mesh import Mesh
from planner.solving.folding import Cut, Places, fold
from planner.solving.message_passing import Effort, MessagePassing
from planner.solving.problem import build_problem
from planner.solving.solve import Solver
from tests.oracles.small_spaces import META, costs_of, full_lattice, graph_of, leaf, op, strategies

MESH = Mesh.parse("dp=2,tp=2")
Kind = Callable[[int, int], int]
"""(layer, depth) -> which of several kinds of layer it is"""


def deep(depth: int, kind: Kind = lambda layer, depth: 0, *, seed: int = 0) -> CostTable:
    """x -> layers -> loss and back, with a table that every layer reads and a weight per layer. Layers of one kind have the same
    strategies and prices; another kind has one op more."""
    rng = np.random.default_rng(seed)
    nodes = [leaf("input", "x"), leaf("buffer", "table")]
    last, weights, outputs = TensorRef(0, 0), [], []
    for layer in range(depth):
        name = f"layers.{layer}"
        nodes.append(leaf("param", f"{name}.weight"))
        weights.append(len(nodes) - 1)
        for number in range(1 + kind(layer, depth)):
            nodes.append(op(f"{name}.fc/op{number}/fwd#0", (last, TensorRef(weights[-1], 0), TensorRef(1, 0))))
            last = TensorRef(len(nodes) - 1, 0)
        outputs.append(last)
    loss = last
    nodes.append(
        Node(key="output:loss", op="output", name="output", kind="output", phase=FORWARD, operands=(loss,), outputs=(META,))
    )
    gradients = {}
    for layer in reversed(range(depth)):
        operands = (last, outputs[layer], TensorRef(weights[layer], 0))
        nodes.append(op(f"layers.{layer}.fc/op0/bwd#0", operands, phase=BACKWARD))
        last = TensorRef(len(nodes) - 1, 0)
        gradients[weights[layer]] = last
    made: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    lattice = full_lattice(META, MESH)
    whole = np.flatnonzero(~lattice.is_partial)
    for node in nodes:
        name = node.key.partition("/")[2] or node.kind
        if name not in made:
            rows = rng.integers(0, len(lattice), (8, 1 + len(node.operands)))
            rows[:, 1:] = rng.choice(whole, (8, len(node.operands)))
            if node.kind != "op":
                rows[:, 0] = rng.choice(whole, 8)
            rows = np.unique(rows, axis=0)
            made[name] = rows, rng.uniform(0, 20, len(rows))
    keys = [node.key.partition("/")[2] or node.kind for node in nodes]
    options = [strategies(made[key][0], len(node.operands)) for key, node in zip(keys, nodes, strict=True)]
    return costs_of(graph_of(nodes, gradients=gradients, loss=loss), MESH, options, [made[key][1] for key in keys])


def cut_of(costs: CostTable) -> Cut | None:
    problem = build_problem(costs)
    return Cut.find(Places.of(costs, problem), problem.layout)


@pytest.mark.parametrize(
    ("depth", "kind", "expected"),
    [
        (12, lambda layer, depth: 0, (1, 1, 2)),
        (13, lambda layer, depth: layer % 2, (1, 2, 2)),
        (16, lambda layer, depth: int(layer < 3), (3, 1, 2)),  # other layers in front
        (12, lambda layer, depth: int(layer == 6), None),  # an odd one in the middle
        (4, lambda layer, depth: 0, None),  # nothing to save
    ],
)
def test_cut_finds_what_repeats(depth: int, kind: Kind, expected: tuple[int, int, int] | None) -> None:
    cut = cut_of(deep(depth, kind))
    assert (cut if cut is None else (cut.head, cut.period, cut.tail)) == expected
    if cut is not None:
        kept = [layer for layer in range(depth) if cut.keeps(layer)]
        assert [cut.folded(layer) for layer in kept] == list(range(len(kept)))
        assert cut.left_out % cut.period == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [lambda layer, depth: 0, lambda layer, depth: layer % 2], ids=["equal", "alternating"])
def test_same_optimum_as_from_nothing(kind: Kind, seed: int) -> None:
    costs = deep(13, kind, seed=seed)
    found = Solver(costs).solve(exact=False)
    plain = MessagePassing(build_problem(costs)).run(Effort())
    assert plain.bound_us <= found.report.objective_us * (1 + 1e-9)
    assert found.report.bound_us <= plain.value_us * (1 + 1e-9)
    if plain.proved:
        assert found.report.status == "optimal"
        assert found.report.objective_us == pytest.approx(plain.value_us, rel=2e-6)


def test_every_edge_and_node_of_equal_layers_is_stood_for_by_its_like() -> None:
    costs = deep(13)
    problem = build_problem(costs)
    folding = fold(problem, Places.of(costs, problem))
    assert folding is not None
    assert (folding.edge_from >= 0).all() and (folding.node_from >= 0).all()
    lay, shallow = problem.layout, folding.problem.layout
    assert (shallow.edge_u < shallow.edge_v).all()
    assert (np.diff(lay.first) == np.diff(shallow.first)[folding.node_from]).all()
    for edge, source in enumerate(folding.edge_from):
        assert (lay.table_of(edge) == shallow.table_of(int(source))).all()
        for mine, other in zip(lay.ports(edge), shallow.ports(int(source)), strict=True):
            assert (mine == other).all()


@pytest.mark.parametrize("seed", range(4))
def test_bound_holds_when_prices_differ_from_layer_to_layer(seed: int) -> None:
    """The start is only worse then, never wrong."""
    costs = deep(12, seed=seed)
    problem = build_problem(costs)
    folding = fold(problem, Places.of(costs, problem))
    assert folding is not None
    cost = problem.unary_us + np.random.default_rng(seed).uniform(0, 10, len(problem.unary_us))
    plain, folded = MessagePassing(problem), MessagePassing(problem)
    plain.set_costs(cost)
    folded.set_costs(cost)
    best = plain.run(Effort())
    found = folded.run(Effort(max_sweeps=2), folding.start(folded, Effort()))
    assert found.bound_us <= best.value_us * (1 + 1e-9)
    assert best.bound_us <= found.value_us * (1 + 1e-9)
