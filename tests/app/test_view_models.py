"""What pages say, without a page: pins, changes, status, inspector, the Setup form."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.components import markup
from app.view_models import changes, demands, inspector, pins, proofs, setup_form, status
from app.view_models.pins import PinHistory
from app.view_models.setup_form import SetupForm
from planner import InvalidConstraintError, ModelRequest, Pin, Plan, PlanRequest, resolve
from planner.mesh import Mesh
from planner.placement import parse
from tests.app.synthetic import MESH, WQ, make_plan, small_graph

GRAPH = small_graph()
PLAN = make_plan(GRAPH)
PIN = Pin(where="layers.*.attention.wq", placements=parse("S(0)R"))


# ---- pins ---------------------------------------------------------------------------------------------------------------


def test_undo_and_redo_return_to_the_same_pins():
    one = PinHistory().change((PIN,))
    assert one.change(()).undo() == replace(one, future=((),))
    assert one.undo().redo().pins == (PIN,)
    assert PinHistory().undo() == PinHistory() == PinHistory().redo()


def test_a_change_forgets_what_was_undone():
    history = PinHistory().change((PIN,)).undo().change((replace(PIN, where="layers.0"),))
    assert history.future == ()


def test_a_second_pin_at_the_same_place_replaces_the_first():
    other = replace(PIN, placements=parse("RR"))
    assert demands.added((PIN,), other) == (other,)


def test_a_linear_offers_its_module_output_and_its_weight():
    own, weight = pins.targets(GRAPH, WQ)
    assert (own.where, own.everywhere, own.key) == ("layers.0.attention.wq", "layers.*.attention.wq", WQ)
    assert (weight.where, weight.everywhere) == ("layers.0.attention.wq.weight", "layers.*.attention.wq.weight")


@pytest.mark.parametrize("key", [WQ, "layers.1.attention.wq/cast/fwd#0", "param:layers.2.attention.wo.weight", "input:tokens",
                                 "output:loss", "layers.3.attention.wq/linear_weight_grad/bwd#0"])  # fmt: skip
def test_where_of_every_target_means_exactly_the_tensor_shown(key):
    target = pins.targets(GRAPH, key)[0]
    assert [GRAPH.nodes[ref.node].key for ref in resolve(target.where, GRAPH)] == [target.key]
    assert target.key in [GRAPH.nodes[ref.node].key for ref in resolve(target.everywhere, GRAPH)]


def test_a_stored_gradient_is_pinned_by_its_parameter():
    assert pins.targets(GRAPH, "grad:layers.0.attention.wq.weight")[0].where == "layers.0.attention.wq.weight"


def test_an_unknown_key_has_no_targets():
    assert pins.targets(GRAPH, "nowhere/mul/fwd#0") == ()


def test_all_layers_means_one_tensor_per_layer():
    assert pins.count_matches(GRAPH, "layers.*.attention.wq") == 4


def test_orphaned_pins_are_kept_and_explained():
    lost = replace(PIN, where="layers.*.attention.wz")
    keys, orphans = pins.pinned_keys(GRAPH, (PIN, lost))
    assert len(keys) == 4 and "Nearest" in orphans[lost]


def test_the_log_brings_back_history_plan_and_budget():
    changes_of_pins = [pins.pins_event(found) for found in ((), (PIN,), ())]
    events = [pins.plan_event(PLAN, None, GRAPH, 2**30), *changes_of_pins, {"event": "undo"}]
    draft = pins.replay(json.loads(json.dumps(events)))
    assert draft.history.pins == (PIN,) and draft.history.redo().pins == () and draft.history.undo().pins == ()
    assert (draft.plan, draft.graph, draft.memory_bytes) == (PLAN.plan_id, GRAPH.fingerprint, 2**30)


@pytest.mark.parametrize("event", [{}, {"event": "boom"}, {"event": "pins"}, {"event": "plan", "plan": 1}])
def test_a_damaged_log_is_an_error_with_a_hint(event):
    with pytest.raises(InvalidConstraintError) as raised:
        pins.replay([event])
    assert raised.value.hint


# ---- changes and status -------------------------------------------------------------------------------------------------


def test_changes_are_grouped_over_layers():
    changed = changes.grouped(PLAN, make_plan(GRAPH, MESH, (PIN,)))
    assert changed[0].name == "layers.*.attention.wq/linear/fwd#0" and changed[0].count == 4
    assert (changed[0].before, changed[0].after, changed[0].first) == ("S(0)S(1)", "S(0)R", WQ)


def test_a_changed_parameter_marks_its_stored_gradient_too():
    pin = Pin(where="layers.0.attention.wq.weight", placements=parse("RR"))
    changed = changes.changed_keys(GRAPH, PLAN, make_plan(GRAPH, MESH, (pin,)))
    assert changed["grad:layers.0.attention.wq.weight"] == "S(0)S(1)"


@pytest.mark.parametrize("budget, words, tone", [(80 * 2**30, "fits, 72.0 GiB free", "good"), (6 * 2**30, "2.0 GiB over", "bad")])
def test_the_verdict_says_by_how_much(budget, words, tone):
    assert status.verdict(make_plan(GRAPH, memory_bytes=budget)) == (words, tone)


def test_optimal_is_only_said_when_it_is_proved_and_nothing_changed():
    assert status.state(PLAN, (), infeasible=False)[0] == "optimal"
    assert status.state(PLAN, (PIN,), infeasible=False)[0] == "stale: 1 pin changed"
    unproved = replace(PLAN, report=replace(PLAN.report, status="feasible", bound_us=0.99 * PLAN.objective_us))
    assert status.state(unproved, (), infeasible=False)[0] == "within 1 %, not proved"
    assert status.state(unproved, (), infeasible=False, proving=True)[0] == "within 1 %, proof running"
    assert "infeasible" in status.state(PLAN, (PIN,), infeasible=True)[0]


def test_every_number_of_the_strip_has_a_source_and_a_signed_difference():
    solved = make_plan(GRAPH, MESH, (PIN,))
    strip = status.strip(solved, PLAN, (PIN,))
    assert all(q.source and q.unit for q in strip.quantities)
    assert [q.label for q in strip.quantities] == ["step", "compute", "comm", "peak memory", "traffic dp", "traffic tp"]
    step = strip.quantities[0]
    assert "no overlap" in step.source and step.delta_text == "▲ +0.250"
    assert strip.quantities[3].delta_text == ""


# ---- proofs -------------------------------------------------------------------------------------------------------------


def with_report(plan: Plan, objective_us: float, bound_us: float) -> Plan:
    status_now = "optimal" if bound_us == objective_us else "feasible"
    return replace(plan, report=replace(plan.report, status=status_now, objective_us=objective_us, bound_us=bound_us))


def test_a_proof_of_the_same_value_keeps_the_plan_that_is_shown():
    first = with_report(PLAN, 1000.0, 990.0)
    plan, note = proofs.settle(first, with_report(make_plan(GRAPH, MESH, (PIN,)), 1000.0, 1000.0))
    assert plan.choices is first.choices and plan.report.status == "optimal" and "proved optimal" in note


def test_a_better_plan_takes_over_and_says_by_how_much():
    better = with_report(PLAN, 900.0, 900.0)
    plan, note = proofs.settle(with_report(PLAN, 2900.0, 800.0), better)
    assert plan is better and "2.00 ms faster" in note and "proved optimal" in note


def test_a_search_without_a_proof_keeps_the_better_bound():
    plan, note = proofs.settle(with_report(PLAN, 1000.0, 980.0), with_report(PLAN, 1001.0, 990.0))
    assert (plan.report.bound_us, plan.report.status) == (990.0, "feasible") and "within 1 %" in note


# ---- inspector ----------------------------------------------------------------------------------------------------------


def test_the_inspector_names_shapes_placements_and_redistributions():
    seen = inspector.inspect(GRAPH, PLAN, WQ)
    assert seen is not None and seen.source == "model.py:42"
    weight = seen.operands[1]
    assert weight.placement == "RR" and weight.source == "S(0)R" and weight.us > 0
    assert weight.steps[0].startswith("all_gather dp ")
    assert seen.outputs[0].local == "8,16,64"


def test_the_inspector_shows_where_a_gradient_is_reduced():
    seen = inspector.inspect(GRAPH, PLAN, "grad:layers.0.attention.wq.weight")
    assert seen is not None and seen.operands[0].steps[0].startswith("reduce_scatter dp")
    assert seen.operands[0].placement == "S(0)S(1)"


@pytest.mark.parametrize("key", [node.key for node in GRAPH.nodes] + ["grad:layers.0.attention.wo.weight"])
def test_every_box_can_be_inspected(key):
    seen = inspector.inspect(GRAPH, PLAN, key)
    assert seen is not None and seen.title


def test_unknown_boxes_are_none():
    assert inspector.inspect(GRAPH, PLAN, "nowhere/mul/fwd#0") is None
    assert inspector.inspect(GRAPH, PLAN, "grad:nowhere") is None


# ---- the Setup form -----------------------------------------------------------------------------------------------------


def test_a_good_form_is_a_request():
    result = setup_form.read(SetupForm(batch="64", layers="2", memory="80GiB", time_limit="10"))
    assert result.errors == {} and result.request is not None
    assert result.request.model.batch == 64 and result.request.memory_bytes == 80 * 2**30


@pytest.mark.parametrize("field, value, word", [
    ("mesh", "dp8", "axis=size"), ("mesh", "", "axis=size"), ("mesh", "dp=8,dp=8", "repeat"), ("batch", "0", "whole number"),
    ("batch", "12", "Nearest batch sizes"), ("layers", "two", "whole number"), ("memory", "80 apples", "unit"),
    ("time_limit", "soon", "seconds"), ("custom_model", "/nowhere/model.py:make", "no file"),
    ("custom_model", "model.py", "factory"),
])  # fmt: skip
def test_each_mistake_is_named_with_what_to_do(field, value, word):
    result = setup_form.read(replace(SetupForm(), **{field: value}))
    assert result.request is None and list(result.errors) == [field] and word in result.errors[field]


def test_all_mistakes_are_named_at_once():
    assert set(setup_form.read(SetupForm(mesh="x", batch="-", memory="?")).errors) == {"mesh", "batch", "memory"}


def test_the_form_of_a_plan_asks_for_that_plan():
    form = setup_form.form_of(PLAN, None, ("llama3-tiny",))
    request = setup_form.read(form).request
    assert request is not None and request.model == PLAN.request and request.mesh == PLAN.mesh
    assert setup_form.stages_to_run(request, PLAN)[0] != "trace"
    for how in ("auto", "none", "full", "full:3"):
        again = setup_form.read(setup_form.form_of(replace(PLAN, checkpoint=how), None, ("llama3-tiny",))).request
        assert again is not None and again.checkpoint == how


def test_other_sizes_need_a_new_trace():
    request = PlanRequest(model=ModelRequest(model="llama3-tiny", batch=8), mesh=Mesh.parse("dp=8"))
    assert setup_form.stages_to_run(request, PLAN)[0] == "trace"


# ---- markup -------------------------------------------------------------------------------------------------------------


def test_names_never_become_markup():
    hostile = '<img src=x onerror="alert(1)">'
    row = inspector.TensorRow(name=hostile, key="", shape=hostile, local="", placement="S(0)R", steps=(hostile,))
    for text in (markup.tensor_table((row,), hostile), markup.demand_row(hostile, hostile, ("RR",), hostile, hostile),
                 markup.change_row(hostile, "RR", "S(0)R", 2)):  # fmt: skip
        assert "<img" not in text and "&lt;img" in text
    assert markup.plain("![x](http://example.org/a.png)").startswith("\\!\\[x\\]\\(")


def test_chips_keep_their_text():
    assert markup.chips("S(0)RP(max)").count('class="chip') == 3 and "P(max)" in markup.chips("S(0)RP(max)")


def test_a_long_path_does_not_fill_the_strip():
    assert status.shortened("llama3-8b") == "llama3-8b"
    short = status.shortened("/home/somebody/experiments/autumn/transformers/mymodel.py:make")
    assert len(short) == status.LONGEST_NAME and short.startswith("…") and short.endswith("/mymodel.py:make")
