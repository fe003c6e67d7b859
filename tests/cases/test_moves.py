"""What a plan moves: once per tensor and placement, in the type that is said, and added up right over split words and labels."""

from __future__ import annotations

import torch

from planner.commands.describe import details
from planner.constraint import Pin
from planner.errors import InfeasibleError, PlannerError
from planner.graph import BACKWARD, FORWARD, JointGraph, TensorRef
from planner.mesh import Mesh
from planner.placement import parse, text
from planner.plan import Plan, Redistribution
from planner.redistribution import CollectiveKind
from planner.tracing.sources import find_factory
from planner.workbench import Workbench
from tests.cases.test_soundness import case, ops, rows
from tests.oracles.interpret import run
from tests.oracles.simulated_shards import same_numbers
from tests.oracles.strategies import wrong_of_node


def pinned(graph: JointGraph, mesh: str, **pins: str) -> Plan:
    """`pins`: where (`__` for a dot) -> placements."""
    bench = Workbench.build(graph, Mesh.parse(mesh))
    asked = [Pin(where=where.replace("__", "."), placements=parse(placed, bench.mesh)) for where, placed in pins.items()]
    return bench.solve((*bench.default_constraints(), *asked))


def moves_of(plan: Plan, key: str, phase: str) -> list[Redistribution]:
    return [r for r in plan.redistributions if r.tensor[0] == key and r.phase == phase]


def kinds(moves: list[Redistribution]) -> list[str]:
    return [str(step.collective.kind) for r in moves for step in r.steps if step.collective is not None]


# ---- one move for several readers -----------------------------------------------------------------------------------------
def readers_split_by_output(name: str) -> tuple[JointGraph, Plan]:
    """The state is made split by rows; every reader's weight is split by output, so it needs the state whole."""
    graph = case(name)
    bench = Workbench.build(graph, Mesh.parse("tp=8"))
    (state,) = (node.key for node in ops(graph, "aten.tanh.default"))
    pins = {"input:x": "S(0)", "state.weight": "R", state: "S(0)"}
    for node in graph.nodes:
        if node.kind == "param" and node.key.startswith("param:readers"):
            pins[node.key.removeprefix("param:")] = "S(0)"
        if node.name == "linear" and node.module.startswith("readers"):
            pins[node.key] = "S(1)"
    asked = [Pin(where=where, placements=parse(placed, bench.mesh)) for where, placed in pins.items()]
    return graph, bench.solve((*bench.default_constraints(), *asked))


def test_a_state_is_gathered_once_however_many_read_it() -> None:
    found = {}
    for name in ("one_state_one_reader", "one_state_many_readers"):
        graph, plan = readers_split_by_output(name)
        (state,) = (node.key for node in ops(graph, "aten.tanh.default"))
        gathers = kinds(moves_of(plan, state, FORWARD))
        found[name] = gathers
        assert gathers == ["all_gather"], name
        (step,) = (s for r in moves_of(plan, state, FORWARD) for s in r.steps if s.collective is not None)
        assert step.collective is not None and step.collective.full_bytes == 24 * 48 * 4
    assert found["one_state_one_reader"] == found["one_state_many_readers"]


def test_pending_gradients_are_added_before_they_are_reduced() -> None:
    graph, plan = readers_split_by_output("one_state_many_readers")
    (state,) = (node for node in graph.nodes if node.op == "aten.tanh.default" and node.phase == FORWARD)
    sized = [
        r
        for r in plan.redistributions
        if r.phase == BACKWARD and graph.meta(TensorRef(graph.node_by_key[r.tensor[0]], r.tensor[1])).shape == (24, 48)
        and any(k in ("reduce_scatter", "all_reduce") for k in kinds([r]))
    ]  # fmt: skip
    assert state.outputs[0] is not None and len(sized) == 1, [r.tensor for r in sized]


def test_what_is_listed_adds_up_to_the_objective() -> None:
    for name, mesh in (
        ("one_state_many_readers", "dp=2,tp=4"),
        ("words_without_labels", "dp=2,tp=5"),
        ("shared_table", "dp=2,tp=4"),
    ):
        bench = Workbench.build(case(name), Mesh.parse(mesh))
        plan = bench.solve(bench.default_constraints())
        by_phase = {phase: sum(r.us for r in plan.redistributions if r.phase == phase) for phase in (FORWARD, BACKWARD)}
        listed = sum(choice.compute_us for choice in plan.choices.values()) + sum(by_phase.values())
        assert abs(listed - plan.objective_us) <= 1e-6 * plan.objective_us
        assert abs(sum(by_phase.values()) - plan.comm_us) <= 1e-6 * max(1.0, plan.comm_us)


def test_a_tensor_that_meets_itself_is_reduced_once() -> None:
    graph = case("square_and_double")
    plan = pinned(graph, "tp=2", **{"input:x": "S(1)", "dense.weight": "S(1)"})
    (product,) = (node.key for node in graph.nodes if node.name == "linear")
    reduced = [kind for kind in kinds(moves_of(plan, product, FORWARD)) if kind in ("all_reduce", "reduce_scatter")]
    assert len(reduced) <= 1
    (square,) = (node for node in ops(graph, "aten.mul.Tensor") if node.operands[0] == node.operands[1] and node.module == "")
    choice = plan.choices[square.key]
    both = [text(placed or ()) for placed in choice.operands]
    assert both in ([placed] * 2 for placed in ("R", "S(0)", "S(1)")) or sorted(both) == ["P", "R"]


# ---- names that mean one tensor, and several tensors that look like one -----------------------------------------------------
def test_a_pin_by_either_name_of_a_tied_weight_is_the_same_plan() -> None:
    graph = case("shared_table")
    plans = [pinned(graph, "dp=2,tp=4", **{name: "S(0)R"}) for name in ("table__weight", "scores__weight")]
    assert plans[0].objective_us == plans[1].objective_us
    assert [text(plan.choices["param:table.weight"].outputs[0] or ()) for plan in plans] == ["S(0)R"] * 2


def test_two_names_of_one_tensor_cannot_be_pinned_apart() -> None:
    try:
        pinned(case("shared_table"), "dp=2,tp=4", table__weight="S(0)R", scores__weight="RS(0)")
    except PlannerError as error:
        assert isinstance(error, InfeasibleError) or "table.weight" in error.message
        told = error.message + " ".join(getattr(error, "conflicts", ()))
        assert "table.weight" in told and "scores.weight" in told
    else:
        raise AssertionError("one tensor in two placements")


def test_a_pin_on_one_of_two_equal_inputs_leaves_the_other_free() -> None:
    plan = pinned(case("repeated_argument"), "x=4", **{"input:left": "R"})
    assert text(plan.choices["input:left"].outputs[0] or ()) == "R"
    bench = Workbench.build(case("repeated_argument"), Mesh.parse("x=4"))
    assert {text(placed) for placed in bench.legal("input:right")} >= {"R", "S(0)", "S(1)"}


def test_a_pin_on_a_leaf_of_a_nested_argument_acts_on_it_alone() -> None:
    graph = case("nested_arguments")
    free, plan = pinned(graph, "x=4"), pinned(graph, "x=4", **{"input:sample.known.base": "S(1)"})
    assert text(plan.choices["input:sample.known.base"].outputs[0] or ()) == "S(1)"
    assert plan.objective_us >= free.objective_us
    assert {item.name for item in graph.inputs} == {"sample.signal", "sample.known.base", "gate", "offset"}


# ---- words and labels -------------------------------------------------------------------------------------------------------
def test_a_table_split_by_words_gives_a_pending_sum_that_is_reduced_before_relu() -> None:
    graph = case("words_without_labels")
    plan = pinned(graph, "dp=2,tp=5", table__weight="RS(0)", scores__weight="RS(0)")
    (lookup,) = ops(graph, "aten.embedding.default")
    space = Workbench.build(graph, Mesh.parse("tp=5")).space
    assert ("S(0)", "R", "P") in rows(space, lookup)
    assert not any("P" in row for row in rows(space, ops(graph, "aten.relu.default")[0]))
    assert not any(row[1] == "P" for row in rows(space, lookup)), "numbers of words are never pending"
    assert lookup.key in details(plan) and "embedding" in lookup.key


def test_the_loss_divides_by_the_labels_of_all_parts() -> None:
    """No label in the first half of the batch: the count of labels is a sum over the parts, taken before the division."""
    graph = case("words_without_labels")
    factory = find_factory(graph.request.model)
    module, (words, labels) = factory()
    for lost in (labels, labels.index_fill(0, torch.tensor([0, 1]), -100)):
        expected = module(words, lost)
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        found, _ = run(graph, parameters, {"words": words, "labels": lost})
        assert same_numbers(found, expected.detach())
        assert torch.isfinite(found)


def test_a_split_vocabulary_keeps_maximum_and_sum_apart() -> None:
    graph = case("words_without_labels")
    space = Workbench.build(graph, Mesh.parse("tp=5")).space
    over_words = [
        node for node in graph.nodes if node.op in ("aten.amax.default", "aten.sum.dim_IntList") and node.phase == FORWARD
    ]
    marks = {node.op: {row[-1] for row in rows(space, node) if row[0] == "S(1)"} for node in over_words}
    assert "P(max)" in marks["aten.amax.default"] and "P" not in marks["aten.amax.default"]
    assert "P(max)" not in marks["aten.sum.dim_IntList"]
    for node in over_words:
        index = graph.node_by_key[node.key]
        strategies = space.strategies[index]
        assert not wrong_of_node(space, index, strategies, range(len(strategies)))  # type: ignore[arg-type]


# ---- types --------------------------------------------------------------------------------------------------------------
def test_a_gather_follows_the_cast_and_every_reduction_says_its_type() -> None:
    graph = case("product_in_bfloat16")
    plan = pinned(graph, "dp=4", **{"input:x": "S(0)", "weight": "S(0)"})
    gathered = [
        step.collective
        for r in plan.redistributions
        for step in r.steps
        if step.collective is not None and step.collective.kind is CollectiveKind.ALL_GATHER and r.phase == FORWARD
        and graph.meta(TensorRef(graph.node_by_key[r.tensor[0]], r.tensor[1])).shape == (20, 20)
    ]  # fmt: skip
    assert len(gathered) == 1 and gathered[0].dtype == "bfloat16" and gathered[0].full_bytes == 20 * 20 * 2
    plan = pinned(case("two_large_convolutions"), "dp=4")
    reduced = [s.collective for r in plan.redistributions for s in r.steps if s.collective is not None and s.collective.reduce_op]
    assert reduced and all(c.dtype == "float32" and c.reduce_op == "sum" for c in reduced)


def test_a_lack_of_a_rule_is_told_apart_from_copies_that_were_chosen() -> None:
    graph = case("two_large_convolutions")
    bench = Workbench.build(graph, Mesh.parse("dp=4"))
    plan = bench.solve(bench.default_constraints())
    assert plan.replicated_for_lack_of_a_rule == ()
    for node in ops(graph, "aten.convolution.default"):
        assert text(plan.choices[node.key].outputs[0] or ()) == "S(0)", "the batch is split, not copied"
