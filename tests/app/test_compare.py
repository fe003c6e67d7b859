"""Comparing plans: differences add up, groups and pins mean the same tensors, unlike plans are refused."""

import math
from dataclasses import replace

import pytest

from app.charts.pareto import pareto_chart
from app.charts.waterfall import waterfall
from app.view_models import compare, hardware_change, sweep_table
from app.view_models.pins import pinned_keys
from planner import JointGraph, Mesh, Pin, Plan, diff, hardware_profile
from planner.sweep import Entry
from tests.app.synthetic import MESH, make_plan, small_graph

GRAPH = small_graph()


def plan_with(*pins: str, graph: JointGraph = GRAPH) -> Plan:
    made = make_plan(graph, MESH, tuple(Pin.parse(pin, MESH) for pin in pins))
    total = made.compute_us + made.comm_us  # no extra for pins: the parts of a real plan add up to its time
    return replace(made, report=replace(made.report, objective_us=total, bound_us=total))


def slower(plan: Plan, part: str, us: float) -> Plan:
    """With more time for computation in all ops whose key holds `part`."""
    choices = {key: replace(choice, compute_us=choice.compute_us + us * (part in key)) for key, choice in plan.choices.items()}
    made = replace(plan, choices=choices)
    return replace(made, report=replace(made.report, objective_us=made.compute_us + made.comm_us))


BASE = plan_with()
PLANS = {
    "pinned": plan_with("layers.*.attention.wq=RR"),
    "one module slower": slower(BASE, "attention.wo", 3.25),
    "many modules": slower(slower(plan_with("layers.1.attention.wo=S(0)R"), "norm", 0.7), "fwd", -1.3),
    "equal": BASE,
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("most", [2, 3, 14])
@pytest.mark.parametrize("depth", [1, 4])
def test_the_waterfall_adds_up_to_the_difference_of_step_times(name: str, most: int, depth: int) -> None:
    rows = compare.by_module(BASE, PLANS[name], depth=depth, most=most)
    difference = PLANS[name].objective_us - BASE.objective_us
    assert math.fsum(row.us for row in rows) == pytest.approx(difference, abs=1e-6)
    assert len(rows) <= most
    back = compare.by_module(PLANS[name], BASE, depth=depth, most=most)
    assert math.fsum(row.us for row in back) == pytest.approx(-difference, abs=1e-6)


def test_costs_are_all_of_a_plan() -> None:
    found = compare.costs(BASE)
    assert math.fsum(cost.us for cost in found.values()) == pytest.approx(BASE.objective_us)
    assert math.fsum(cost.comm_us for cost in found.values()) == pytest.approx(BASE.comm_us)


def test_a_difference_is_told_where_it_is() -> None:
    (row,) = compare.by_module(BASE, slower(BASE, "attention.wo/linear/fwd", 3.25))
    assert row.name == "layers.*.attention.wo" and row.compute_us == pytest.approx(4 * 3.25) and abs(row.comm_us) < 1e-6


@pytest.mark.parametrize(
    "key, module",
    [
        ("layers.3.attention.wq/linear/fwd#0", "layers.*.attention.wq"), ("cross_entropy/fwd#0", compare.NOWHERE),
        ("param:layers.3.attention.wq.weight", "layers.*.attention.wq"), ("input:tokens", compare.NOWHERE),
        ("output:loss", compare.NOWHERE),
    ],
)  # fmt: skip
def test_modules_of_keys(key: str, module: str) -> None:
    assert compare.module_of(key) == module


def test_groups_hold_every_change_once() -> None:
    other = plan_with("layers.*.attention.wq=RR", "layers.2.attention.wo=S(0)R")
    groups = compare.changed(BASE, other)
    keys = [key for group in groups for key in group.keys]
    assert sorted(keys) == sorted(change.key for change in diff(BASE, other)) and len(set(keys)) == len(keys)
    assert {len(group.keys) for group in groups} == {1, 4}
    assert [abs(group.us) for group in groups] == sorted((abs(group.us) for group in groups), reverse=True)


@pytest.mark.parametrize("pin", ["layers.*.attention.wq=RR", "layers.2.attention.wo=S(0)R", "layers.*.attention.wo.weight=RR"])
@pytest.mark.parametrize("side", ["A", "B"])
def test_pins_of_a_group_hold_just_its_tensors(pin: str, side: str) -> None:
    (group,) = compare.changed(BASE, plan_with(pin))
    pins = compare.pins_for(group, side, GRAPH, BASE, ())
    marked, orphans = pinned_keys(GRAPH, pins)
    assert set(marked) == set(group.keys) and not orphans
    wanted = group.before if side == "A" else group.after
    assert all(wanted in text for text in marked.values())
    assert len(pins) == (1 if "*" in pin else len(group.keys))


def test_parameters_that_differ_come_first() -> None:
    columns = compare.parameters(BASE, plan_with("layers.2.attention.wo.weight=RR"))
    assert columns[""][0] == "differs" and set(columns[""][1:]) == {""}
    assert columns["parameter"][0] == "layers.*.attention.wo.weight" and columns["×"][0] == "×1"
    assert sum(int(text[1:]) for text in columns["×"]) == len(GRAPH.parameters) + 1  # the embedding has no gradient here


def test_sides_show_constraints_with_their_notes_differences_first() -> None:
    other = make_plan(GRAPH, MESH, (Pin(where="layers.*.attention.wq", placements=MESH_RR, note="kernel needs it"),))
    rows = compare.sides(BASE, other)
    assert [row.differs for row in rows] == sorted((row.differs for row in rows), reverse=True)
    pin = next(row for row in rows if row.what.startswith("pin "))
    assert (pin.a, pin.b) == ("no", "yes (kernel needs it)")


MESH_RR = Pin.parse("x=RR", MESH).placements


def test_plans_of_other_models_or_sizes_are_refused() -> None:
    other_model = replace(BASE, request=replace(BASE.request, model="mlp"))
    other_size = make_plan(small_graph(2))
    assert "mlp" in compare.refusal(BASE, other_model)
    assert "layers 4" in compare.refusal(BASE, other_size) and "layers 2" in compare.refusal(BASE, other_size)
    assert compare.refusal(BASE, PLANS["pinned"]) == ""


def test_what_else_differs_is_said() -> None:
    mesh = Mesh(axis_names=("dp", "tp"), axis_sizes=(16, 4))
    other = replace(make_plan(GRAPH, mesh), hardware_name="h200")
    other = replace(other, report=replace(other.report, status="feasible", bound_us=0.9 * other.objective_us))
    text = " ".join(compare.cautions(BASE, other))
    assert "meshes differ" in text and "h200" in text and "within 10 %" in text
    assert compare.cautions(BASE, PLANS["pinned"]) == ()
    assert "has changed" in compare.cautions(BASE, replace(BASE, hardware_hash="1"))[0]


# ---- charts, sweep, hardware --------------------------------------------------------------------------------------------


def test_names_in_charts_are_text() -> None:
    rows = (compare.ModuleDelta(name="<b onclick=x>&", compute_us=-5.0, comm_us=1.0),)
    figure = waterfall(rows).to_dict()
    assert figure["layout"]["yaxis"]["ticktext"][0] == "&lt;b onclick=x&gt;&amp;"
    assert figure["data"][0]["text"][0].startswith("-") and figure["data"][0]["text"][-1].startswith("-")


def entry(mesh: str, us: float, peak: int) -> Entry:
    return Entry(mesh=mesh, status="optimal", objective_us=us, bound_us=us, gap=0.0, compute_us=us, comm_us=0.0, peak_bytes=peak)


def test_the_sweep_table_is_sorted_and_says_why_there_is_no_plan() -> None:
    rows = [(entry("dp=4,tp=2", 5.0, 9), None), (Entry(mesh="dp=8", status="infeasible", reason="too big"), None),
            (entry("dp=2,tp=4", 4.0, 10), None), (entry("dp=1,tp=8", 9.0, 10), None)]  # fmt: skip
    entries = sweep_table.ordered_entries(rows)
    columns = sweep_table.columns(entries)
    assert columns["mesh"] == ["dp=2,tp=4", "dp=4,tp=2", "dp=1,tp=8", "dp=8"]
    assert columns["best"] == ["not beaten", "not beaten", "", ""]
    assert columns["proof"][-1] == "does not fit" and columns["reason"][-1] == "too big" and columns["step ms"][-1] is None
    front, beaten = pareto_chart(entries, 80 * 2**30).data
    assert list(front.customdata) == ["dp=2,tp=4", "dp=4,tp=2"] and list(beaten.customdata) == ["dp=1,tp=8"]


def test_changed_constants_are_those_that_differ() -> None:
    h100, fast = hardware_profile("h100_sxm"), hardware_profile("h100_sxm+roce_8x400g")
    changes = hardware_change.changed_constants(h100, fast)
    assert any(change.after.endswith("other values") for change in changes)
    assert all(change.name.startswith("fabric.") and change.source for change in changes)
    assert hardware_change.changed_constants(h100, h100) == ()
    names = {change.name for change in hardware_change.changed_constants(h100, hardware_profile("h200"))}
    assert "memory.hbm_bytes" in names and "peak.bfloat16" not in names


@pytest.mark.parametrize("limit, lines", [(2 * 10**10, 1), (80 * 2**30, 0), (None, 0)])
def test_a_far_memory_limit_is_told_in_text(limit: int | None, lines: int) -> None:
    figure = pareto_chart([entry("dp=4,tp=2", 5e5, 16 * 2**30), entry("dp=8", 6e5, 15 * 2**30)], limit).to_dict()
    texts = [note["text"] for note in figure["layout"].get("annotations", ())]
    assert len(figure["layout"].get("shapes", ())) == lines and len(texts) == (limit is not None)
    low, high = figure["layout"]["yaxis"]["range"]
    assert low < 15 and high > 16 and (not lines or high > 2e10 / 2**30)
