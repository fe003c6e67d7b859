"""Which candidates are sound: every row of every op of these models, and the rows that must or must not be there."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.enumerating.enumerate import enumerate_strategies, rule_rows
from planner.enumerating.registry import OpSignature
from planner.errors import UnsupportedOpError
from planner.exporting.script import write_script
from planner.exporting.verify import export_verified
from planner.graph import FORWARD, JointGraph, ModelRequest, Node, TensorRef
from planner.mesh import Mesh
from planner.placement import P, R, codes_text, shard_code
from planner.strategy import StrategySpace
from planner.torch_compat import DTensorRules
from planner.tracing.trace import trace
from planner.workbench import Workbench
from tests.oracles.random_plan import random_plan
from tests.oracles.strategies import wrong_strategies

MODELS = (
    "shared_table", "untrained_parts", "repeated_argument", "nested_arguments", "outputs_of_every_kind", "heads_alone",
    "heads_in_groups", "complex_rotation", "after_two_products", "square_and_double", "product_in_bfloat16", "pickings",
    "cut_and_join", "two_convolutions", "writes", "writes_and_dropout", "moving_average",
    "words_without_labels",
)  # fmt: skip


def case(name: str) -> JointGraph:
    return trace(ModelRequest(model=f"{Path(__file__).with_name('models.py')}:{name}", precision="as-traced"))


def rows(space: StrategySpace, node: Node) -> set[tuple[str, ...]]:
    """(operands..., output 0) of every strategy, as text."""
    index = space.graph.node_by_key[node.key]
    strategies = space.strategies[index]
    found = set()
    for number in range(len(strategies)):
        operands = [
            codes_text(space.lattice(ref).codes[strategies.operand(slot)[number]]) for slot, ref in enumerate(node.operands)
        ]
        out = codes_text(space.lattice(TensorRef(index, 0)).codes[strategies.output(0)[number]])
        found.add((*operands, out))
    return found


def ops(graph: JointGraph, name: str, phase: str = FORWARD) -> list[Node]:
    return [node for node in graph.nodes if node.is_op and node.op == name and node.phase == phase]


@pytest.mark.parametrize("name", MODELS)
def test_every_candidate_is_sound_and_no_op_lacks_a_rule(name: str) -> None:
    space = enumerate_strategies(case(name), Mesh.parse("dp=2,tp=2"))
    wrong, tried = wrong_strategies(space, most_per_op=30)
    assert tried > 50 and not wrong, "\n".join(wrong)
    assert space.replicated_for_lack_of_a_rule == ()


@pytest.mark.parametrize("name", MODELS)
def test_every_legal_plan_can_be_written(name: str) -> None:
    graph = case(name)
    bench = Workbench.build(graph, Mesh.parse("dp=2,tp=2"))
    for seed in range(4):
        assert write_script(random_plan(bench.costs, seed), graph, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_optimum_and_a_random_plan_equal_the_module(name: str) -> None:
    graph = case(name)
    bench = Workbench.build(graph, Mesh.parse("dp=2,tp=2"))
    for plan in (bench.solve(bench.default_constraints()), random_plan(bench.costs, 1)):
        numbers = export_verified(plan, graph, None).report["numbers"]
        assert numbers["reference"]["largest_error"] <= 1e-5 and numbers["check"]["counts"] == "as planned"


# ---- attention ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "mesh", "heads"), [("heads_alone", "tp=4", True), ("heads_alone", "tp=3", False)])
def test_attention_is_split_by_batch_and_by_heads_that_divide(name: str, mesh: str, heads: bool) -> None:
    graph = case(name)
    space = enumerate_strategies(graph, Mesh.parse(mesh))
    for node in graph.nodes:
        if "flash_attention" in node.op:
            split = {row[0] for row in rows(space, node)}
            assert ("S(1)" in split) == heads
            assert not split & {"S(2)", "S(3)", "P"}
            assert all(len({code for code in row if code}) == 1 for row in rows(space, node))


def test_grouped_heads_are_split_only_together() -> None:
    """2 key heads over 4: never q alone."""
    graph = case("heads_in_groups")
    space = enumerate_strategies(graph, Mesh.parse("tp=4"))
    (node,) = (node for node in graph.nodes if node.op.endswith("flash_attention_for_cpu.default"))
    shapes = {graph.meta(ref).shape[1] for ref in node.operands}
    for q, k, v, _ in rows(space, node):
        assert q == k == v
    assert shapes == {8} or not any(row[0] == "S(1)" for row in rows(space, node))


# ---- pending sums -------------------------------------------------------------------------------------------------------
def test_what_is_linear_takes_a_pending_sum_and_nothing_else_does() -> None:
    graph = case("after_two_products")
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    for name, passes in (("aten.mul.Tensor", True), ("aten.relu.default", False), ("aten.amax.default", False)):
        for node in ops(graph, name):
            if len(node.operands) == 1:
                assert any(row[0] == "P" for row in rows(space, node)) == passes, node.key
    for node in ops(graph, "aten.tanh.default") + ops(graph, "aten.sqrt.default"):
        assert all("P" not in row for row in rows(space, node)), node.key


def test_a_bias_beside_a_pending_product_is_added_once() -> None:
    graph = case("after_two_products")
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    bias = graph.node_by_key["param:narrow.bias"]
    (node,) = (node for node in ops(graph, "aten.add.Tensor") if any(ref.node == bias for ref in node.operands))
    assert {row for row in rows(space, node) if "P" in row} == {("P", "P", "P")}


def test_a_tensor_times_itself_is_not_pending() -> None:
    graph = case("square_and_double")
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    (square,) = (node for node in ops(graph, "aten.mul.Tensor") if node.operands[0] == node.operands[1] and node.module == "")
    (double,) = (node for node in ops(graph, "aten.add.Tensor") if node.operands[0] == node.operands[1])
    assert ("P", "P", "P") not in rows(space, square) and ("P", "P", "P") in rows(space, double)
    assert ("P", "R", "P") not in rows(space, double)


def test_casts_keep_every_placement() -> None:
    graph = case("product_in_bfloat16")
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    for node in (node for node in graph.nodes if node.op == "aten._to_copy.default"):
        assert all(row[0] == row[1] for row in rows(space, node))
    backward = [node for node in graph.nodes if node.op == "aten._to_copy.default" and node.phase != FORWARD and node.operands]
    assert any({("P", "P"), ("R", "R"), ("S(0)", "S(0)")} <= rows(space, node) for node in backward)


# ---- indices and pieces -------------------------------------------------------------------------------------------------
def test_negative_and_list_indices() -> None:
    graph = case("pickings")
    space = enumerate_strategies(graph, Mesh.parse("dp=2"))
    picked, first = ops(graph, "aten.select.int")
    assert rows(space, picked) == {("R", "R"), ("P", "P"), ("S(0)", "S(0)"), ("S(2)", "S(1)")}
    assert rows(space, first) == {("R", "R"), ("P", "P"), ("S(1)", "S(0)"), ("S(2)", "S(1)")}
    (cut,) = ops(graph, "aten.slice.Tensor")
    assert ("S(0)", "S(0)") in rows(space, cut) and ("S(2)", "S(2)") not in rows(space, cut)
    for listed in ops(graph, "aten.index.Tensor"):
        found = rows(space, listed)
        assert {("S(0)", "R", "S(0)"), ("S(2)", "R", "S(2)")} <= found
        assert not any(row[0] == "S(1)" for row in found)


def test_joining_and_cutting_along_a_split_dim_is_not_local() -> None:
    graph = case("cut_and_join")
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    front, back = ops(graph, "aten.stack.default")
    assert ("S(0)", "S(0)", "S(1)") in rows(space, front) and ("S(0)", "S(0)", "S(0)") in rows(space, back)
    columns, below = ops(graph, "aten.cat.default")
    assert ("S(0)", "S(0)", "S(0)") in rows(space, columns) and ("S(0)", "S(0)", "S(0)") not in rows(space, below)
    for node in ops(graph, "aten.slice.Tensor"):
        assert not any(row[0] == "S(1)" for row in rows(space, node)), node.key


# ---- convolution --------------------------------------------------------------------------------------------------------
def test_convolution_is_split_like_a_product_and_windows_are_whole() -> None:
    graph = case("two_convolutions")
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    first, second = ops(graph, "aten.convolution.default")
    assert {("S(0)", "R", "R", "S(0)"), ("R", "S(0)", "S(0)", "S(1)"), ("S(1)", "S(1)", "P", "P")} <= rows(space, second)
    assert not any(row[0] in ("S(2)", "S(3)") for row in rows(space, second))
    assert not any(row[0] == "S(1)" for row in rows(space, first)), "3 channels do not split over 2"


# ---- random numbers and writes ------------------------------------------------------------------------------------------
def test_dropout_keeps_every_placement() -> None:
    """The mask is a function of global positions: a part of the tensor gets its part of the mask, a pending sum the whole."""
    graph = case("writes_and_dropout")
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    (thin,) = ops(graph, "planner.dropout.default")
    assert {("R", "R"), ("P", "P")} <= rows(space, thin) and all(given == made for given, made in rows(space, thin))
    signature = OpSignature.of(thin, graph)
    assert set(rule_rows(signature, DTensorRules.load()).rows) == {(code, code) for code in (R, P, shard_code(0), shard_code(1))}


def test_other_random_numbers_are_refused_by_module_and_line() -> None:
    with pytest.raises(UnsupportedOpError, match=r"draws random numbers \(in jitter, models.py:\d+\)"):
        case("jittered")


def test_a_written_buffer_leaves_the_step_with_its_new_value() -> None:
    graph = case("moving_average")
    (average,) = graph.buffers
    assert average.update is not None and graph.nodes[average.update.node].op.startswith("aten.lerp")
