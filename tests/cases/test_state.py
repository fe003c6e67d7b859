"""Parameters, inputs and outputs: what is one tensor, what is several, and what must not get lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.graph import ModelRequest, TensorRef
from planner.mesh import Mesh
from planner.placement import text
from planner.plan import Plan
from planner.workbench import Workbench
from tests.cases.test_soundness import MODELS, case
from tests.planner.tracing.common import largest_error


def best(name: str, mesh: str) -> Plan:
    bench = Workbench.build(case(name), Mesh.parse(mesh))
    return bench.solve(bench.default_constraints())


def test_tied_weights_are_one_tensor() -> None:
    graph = case("shared_table")
    assert [parameter.names for parameter in graph.parameters] == [("table.weight", "scores.weight"), ("mix.weight",)]
    assert sum(graph.meta(TensorRef(p.node, 0)).num_bytes for p in graph.parameters) == 4 * (48 * 20 + 20 * 20)


def test_unused_frozen_and_integer_parameters_stay() -> None:
    graph = case("untrained_parts")
    assert {p.name for p in graph.parameters} == {
        "trained.weight", "trained.bias", "unread.weight", "unread.bias", "gain", "columns",
    }  # fmt: skip
    assert {p.name for p in graph.parameters if p.gradient is not None} == {"trained.weight", "trained.bias"}
    columns = graph.meta(TensorRef(graph.node_by_key["param:columns"], 0))
    assert columns.dtype == "int64"


def test_memory_counts_what_is_never_read() -> None:
    graph, plan = case("untrained_parts"), best("untrained_parts", "dp=1")
    every = sum(graph.meta(TensorRef(p.node, 0)).num_bytes for p in graph.parameters)
    unread = sum(graph.meta(TensorRef(p.node, 0)).num_bytes for p in graph.parameters if p.name.startswith("unread."))
    trained = sum(graph.meta(TensorRef(p.node, 0)).num_bytes for p in graph.parameters if p.gradient is not None)
    assert unread == 4 * (12 * 24 + 24) and plan.memory.parameter_bytes == every
    assert plan.memory.gradient_bytes == trained and plan.memory.optimizer_bytes == 2 * trained


def test_keywords_in_another_order_are_the_same_plan() -> None:
    """`gate` [8, 1] may be split by samples, `offset` [20] is none of them, in whatever order they are given."""
    plans = [best(name, "dp=4") for name in ("nested_arguments", "nested_arguments_in_another_order")]
    placed = [{key: choice.outputs for key, choice in plan.choices.items() if key.startswith("input:")} for plan in plans]
    assert placed[0] == placed[1] and plans[0].objective_us == plans[1].objective_us


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("writes_and_dropout", "moving_average", "writes")])
def test_traced_gradients_are_those_of_autograd(name: str) -> None:
    """Sums over several outputs, tied names and repeated uses included; absent where the module has none."""
    path = Path(__file__).with_name("models.py")
    assert largest_error(ModelRequest(model=f"{path}:{name}", precision="as-traced")) < 2e-5


def test_inputs_are_listed_by_path_whatever_their_container() -> None:
    graph = case("nested_arguments")
    assert {item.name: item.batch_dim for item in graph.inputs} == {
        "sample.signal": 0, "sample.known.base": 0, "gate": 0, "offset": None,
    }  # fmt: skip
    plan = best("nested_arguments", "dp=4")
    assert text(plan.choices["input:gate"].outputs[0] or ()) == "S(0)"
    assert text(plan.choices["input:offset"].outputs[0] or ()) == "R"


def test_one_object_passed_twice_is_two_inputs() -> None:
    assert [item.name for item in case("repeated_argument").inputs] == ["left", "right"]


def test_outputs_that_are_positions_none_or_inputs_have_no_gradient() -> None:
    graph = case("outputs_of_every_kind")
    assert graph.stand_in_loss
    assert {p.name for p in graph.parameters if p.gradient is not None} == {
        "encode.weight", "encode.bias", "decode.weight", "decode.bias",
    }  # fmt: skip
    assert not any(node.op.startswith("aten.argmax") for node in graph.nodes), "nothing trained depends on it"


def test_one_move_of_a_tensor_is_paid_once() -> None:
    for name in ("square_and_double", "outputs_of_every_kind", "shared_table"):
        plan = best(name, "dp=2,tp=2")
        shared = [(r.tensor, r.phase, r.target) for r in plan.redistributions]
        assert len(shared) == len(set(shared)), name
