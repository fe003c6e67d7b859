"""Parameters, inputs and outputs: what is one tensor, what is several, and what must not get lost."""

from __future__ import annotations

from planner.graph import TensorRef
from planner.mesh import Mesh
from planner.pipeline import Workbench
from planner.placement import text
from planner.plan import Plan
from tests.cases.test_soundness import case


def best(name: str, mesh: str) -> Plan:
    bench = Workbench.build(case(name), Mesh.parse(mesh))
    return bench.solve(bench.default_constraints())


def test_tied_weights_are_one_tensor() -> None:
    graph = case("tied_lm")
    assert [parameter.names for parameter in graph.parameters] == [("embed.weight", "head.weight"), ("mid.weight",)]
    assert sum(graph.meta(TensorRef(p.node, 0)).num_bytes for p in graph.parameters) == 5120


def test_unused_frozen_and_integer_parameters_stay() -> None:
    graph = case("spare_parts")
    assert {p.name for p in graph.parameters} == {
        "used.weight", "used.bias", "spare.weight", "spare.bias", "frozen", "order",
    }  # fmt: skip
    assert {p.name for p in graph.parameters if p.gradient is not None} == {"used.weight", "used.bias"}
    order = graph.meta(TensorRef(graph.node_by_key["param:order"], 0))
    assert order.dtype == "int64"


def test_inputs_are_listed_by_path_whatever_their_container() -> None:
    graph = case("named_inputs")
    assert {item.name: item.batch_dim for item in graph.inputs} == {
        "batch.x": 0, "batch.extra.y": 0, "scale": 0, "shift": None,
    }  # fmt: skip
    plan = best("named_inputs", "dp=4")
    assert text(plan.choices["input:scale"].outputs[0] or ()) == "S(0)"
    assert text(plan.choices["input:shift"].outputs[0] or ()) == "R"


def test_one_object_passed_twice_is_two_inputs() -> None:
    assert [item.name for item in case("same_input_twice").inputs] == ["a", "b"]


def test_outputs_that_are_positions_none_or_inputs_have_no_gradient() -> None:
    graph = case("many_outputs")
    assert graph.stand_in_loss
    assert {p.name for p in graph.parameters if p.gradient is not None} == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert not any(node.op.startswith("aten.argmax") for node in graph.nodes), "nothing trained depends on it"


def test_one_move_of_a_tensor_is_paid_once() -> None:
    for name in ("reuse", "many_outputs", "tied_lm"):
        plan = best(name, "dp=2,tp=2")
        shared = [(r.tensor, r.phase, r.target) for r in plan.redistributions]
        assert len(shared) == len(set(shared)), name
