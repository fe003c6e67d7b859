"""The two messages of the plan graph: the browser can rebuild what Python knows, and they stay small."""

from __future__ import annotations

import json

import pytest

from app.view_models import changes, op_table
from app.view_models.graph_messages import DrawnGraph, loose_groups, marked, plan_message
from planner import Pin
from planner.placement import parse
from tests.app.synthetic import MESH, WQ, make_plan, small_graph

GRAPH = small_graph()
PLAN = make_plan(GRAPH)
DRAWN = DrawnGraph(GRAPH)


def rebuilt_key(topology: dict, i: int) -> str:
    """The rule of graph_model.js."""
    ops = topology["ops"]
    if str(i) in topology["odd_keys"]:
        return topology["odd_keys"][str(i)]
    module, name = topology["modules"][ops["module"][i]], topology["names"][ops["name"][i]]
    return f"{module + '/' if module else ''}{name}/{'bwd' if ops['backward'][i] else 'fwd'}#{ops['ordinal'][i]}"


def test_every_key_can_be_rebuilt_from_the_columns():
    topology = DRAWN.topology
    assert [rebuilt_key(topology, i) for i in range(len(DRAWN.keys))] == DRAWN.keys
    assert len(set(DRAWN.keys)) == len(DRAWN.keys)


def test_keys_of_ordinary_ops_are_not_sent():
    ops = [i for i, node in enumerate(GRAPH.nodes) if node.is_op and node.module]
    assert not {str(i) for i in ops} & set(DRAWN.topology["odd_keys"])


def test_each_stored_gradient_is_a_box_in_the_backward_column():
    stored = [key for key in DRAWN.keys if key.startswith("grad:")]
    assert stored == [f"grad:{p.name}" for p in GRAPH.parameters if p.gradient]
    first = DRAWN.keys.index(stored[0])
    assert DRAWN.topology["ops"]["backward"][first] == 1


def test_identical_layers_share_a_structure_and_others_do_not():
    repeats = DRAWN.topology["repeats"]
    assert set(repeats) == {f"layers.{i}" for i in range(4)} and len(set(repeats.values())) == 1
    wider = DrawnGraph(small_graph(width=128)).topology["repeats"]
    assert wider["layers.0"] != repeats["layers.0"]


def test_every_redistribution_of_the_plan_is_on_an_edge_and_all_its_time_is_counted_once():
    message = marked(plan_message(DRAWN, PLAN))
    assert len(message["redistributions"]["edge"]) == len(PLAN.redistributions)
    assert sum(message["comm_us"]) == pytest.approx(PLAN.comm_us, abs=0.1 * len(PLAN.redistributions))
    axes = {message["redistributions"]["axis"][k] for k in range(len(PLAN.redistributions))}
    assert axes == {0, 1}


def test_memory_heat_adds_up_to_parameters_gradients_and_optimizer_state():
    message = marked(plan_message(DRAWN, PLAN))
    at = DRAWN.keys.index("param:layers.0.attention.wq.weight")
    elements = 64 * 64 // 64  # S(0)S(1) on 8 x 8
    assert message["memory_mib"][at] == round(elements * (4 + 8) / 2**20, 1)


def test_pins_and_base_change_the_overlay_and_never_the_topology():
    pinned = make_plan(GRAPH, MESH, (Pin(where="layers.*.attention.wq", placements=parse("S(0)R")),))
    base = changes.changed_keys(GRAPH, PLAN, pinned)
    message = marked(plan_message(DRAWN, pinned), pins={WQ: "S(0)R"}, base=base)
    assert message["base"][WQ] == "S(0)S(1)" and message["pins"] == {WQ: "S(0)R"}
    assert message["hash"] != marked(plan_message(DRAWN, PLAN))["hash"]
    assert DrawnGraph(GRAPH).topology["hash"] == DRAWN.topology["hash"]


def test_ops_outside_modules_are_boxed_by_what_they_belong_to():
    groups = loose_groups(GRAPH)
    assert set(groups.values()) <= {"loss", "ops"} or all(name.startswith("line ") for name in groups.values())


def test_hostile_names_travel_as_plain_strings():
    hostile = '<img src=x onerror="alert(1)">\n\'"'
    graph = small_graph(1)
    nodes = list(graph.nodes)
    from dataclasses import replace

    nodes[2] = replace(nodes[2], key=f"{hostile}/mul/fwd#0", module=hostile)
    drawn = DrawnGraph(replace(graph, nodes=tuple(nodes)))
    assert [rebuilt_key(drawn.topology, i) for i in range(len(drawn.keys))] == drawn.keys
    assert hostile in json.loads(json.dumps(drawn.topology))["modules"]


def test_the_payload_of_ten_thousand_ops_stays_within_its_budget():
    graph = small_graph(500)
    drawn = DrawnGraph(graph)
    assert len(drawn.keys) > 9_000
    messages = (drawn.topology, marked(plan_message(drawn, make_plan(graph))))
    size = sum(len(json.dumps(message, separators=(",", ":"))) for message in messages)
    print(f"{len(drawn.keys):,} boxes, {size / 1e6:.2f} MB")
    assert size < 700_000


def test_the_op_table_has_a_row_for_every_box():
    columns = op_table.columns(DRAWN, marked(plan_message(DRAWN, PLAN)), PLAN)
    assert {len(values) for values in columns.values()} == {len(DRAWN.keys)}
    assert columns["placement"][DRAWN.keys.index(WQ)] == "S(0)S(1)"


def test_pins_change_the_marks_of_the_message_alone():
    drawn_once = plan_message(DRAWN, PLAN)
    plain, pinned = marked(drawn_once, pins={}, base={}), marked(drawn_once, pins={WQ: "S(0)R"}, base={WQ: "RR"})
    assert plain["hash"] != pinned["hash"] and pinned == marked(plan_message(DRAWN, PLAN), pins={WQ: "S(0)R"}, base={WQ: "RR"})
    assert {k: v for k, v in plain.items() if k not in ("hash", "pins", "base")} == {
        k: v for k, v in drawn_once.items() if k != "hash"
    }
