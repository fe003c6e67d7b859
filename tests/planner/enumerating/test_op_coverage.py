"""Rules over many operators: nothing lacks a rule unnoticed, and every row equals the op on whole tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner.tracing.experts
import planner.tracing.region  # noqa: F401  registers their operators
from planner.enumerating.enumerate import enumerate_strategies
from planner.enumerating.registry import FACTORY_OPS, RULES
from planner.exporting.script import write_script
from planner.exporting.verify import export_verified
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.tracing.trace import trace
from planner.workbench import Workbench
from tests.oracles.random_plan import random_plan
from tests.oracles.strategies import wrong_strategies
from tests.planner.enumerating.test_one_op import CALLS

ALL_OPS = ModelRequest(model=f"{Path(__file__).with_name('op_models.py')}:all_ops", precision="as-traced")

EQUAL_TO_OTHERS = FACTORY_OPS | {"aten.max_pool2d_with_indices_backward.default", "aten.avg_pool2d_backward.default"}
"""Factories share one rule; pooling backward runs among the models."""
WITH_TESTS_OF_THEIR_OWN = frozenset(op for op in RULES if op.startswith("planner.")) - {"planner.einsum.default"}


@pytest.fixture(scope="module")
def graph() -> JointGraph:
    """Every operator of `op_models` in one graph."""
    return trace(ALL_OPS)


@pytest.fixture(scope="module")
def bench(graph: JointGraph) -> Workbench:
    return Workbench.build(graph, Mesh.parse("dp=2,tp=2"))


def test_every_rule_of_our_own_is_run_somewhere(graph: JointGraph) -> None:
    models = {node.op for node in graph.nodes if node.is_op}
    assert set(RULES) - models - {op for op, *_ in CALLS} - EQUAL_TO_OTHERS - WITH_TESTS_OF_THEIR_OWN == set()


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_every_row_equals_the_op_on_whole_tensors(graph: JointGraph, request: pytest.FixtureRequest, mesh: str) -> None:
    space = request.getfixturevalue("bench").space if mesh == "dp=2,tp=2" else enumerate_strategies(graph, Mesh.parse(mesh))
    wrong, tried = wrong_strategies(space, most_per_op=12)
    assert tried > 2000
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_every_row_on_three_axes(graph: JointGraph) -> None:
    wrong, _ = wrong_strategies(enumerate_strategies(graph, Mesh.parse("a=2,b=2,c=2")), most_per_op=40)
    assert not wrong, "\n".join(wrong)


def test_no_op_lacks_a_rule(graph: JointGraph, bench: Workbench) -> None:
    assert {graph.nodes[graph.node_by_key[key]].op for key in bench.space.replicated_for_lack_of_a_rule} == set()


@pytest.mark.parametrize("seed", [1, 2])
def test_every_op_can_be_written_in_any_legal_layout(graph: JointGraph, bench: Workbench, seed: int) -> None:
    assert write_script(random_plan(bench.costs, seed), graph, None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_plans_of_all_ops_equal_the_module(graph: JointGraph, bench: Workbench, seed: int) -> None:
    numbers = export_verified(random_plan(bench.costs, seed), graph, None).report["numbers"]
    assert numbers["reference"]["largest_error"] <= 1e-5
