"""View-models, charts and page of Communication: what is shown adds up to the plan."""

from __future__ import annotations

import bisect
import json
from dataclasses import replace

import pytest

from app import opening, state
from app.charts import communication as charts
from app.view_models import communication, timeline
from app.view_models.communication import OUTSIDE, Call, Filter
from app.view_models.overlapped import Overlapped, overlapped
from app.view_models.overlapped import quantities as overlapped_quantities
from planner import JointGraph, Plan, hardware_profile, planned_graph
from planner.costing.timeline import Timeline
from planner.forecast import forecast
from tests.app.conftest import run
from tests.app.synthetic import WQ, make_plan, small_graph


@pytest.fixture(scope="module", params=["made up", "demo"])
def case(request: pytest.FixtureRequest) -> tuple[JointGraph, Plan]:
    if request.param == "made up":
        graph = small_graph()
        return graph, make_plan(graph)
    plan = Plan.load(opening.DEMO_PLAN)
    return planned_graph(plan, JointGraph.load(opening.DEMO_GRAPH)), plan


@pytest.fixture(scope="module")
def calls(case: tuple[JointGraph, Plan]) -> tuple[Call, ...]:
    return communication.calls_of(*case)


def test_calls_are_those_of_the_plan(case, calls):
    _, plan = case
    found: dict[str, dict[str, int]] = {}
    counts: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
    for call in calls:
        kinds = found.setdefault(call.axis, {})
        kinds[call.kind] = kinds.get(call.kind, 0) + call.num_bytes
        label = f"{call.kind}@{call.axis}"
        counts[call.phase][label] = counts[call.phase].get(label, 0) + 1
    assert found == plan.comm_bytes and counts == plan.collective_counts
    assert sum(call.us for call in calls) + communication.local_us(plan) == pytest.approx(plan.comm_us, rel=1e-12)


def test_every_call_has_a_box_in_the_graph(case, calls):
    drawn = state.DrawnGraph(case[0])
    assert {call.box for call in calls} <= set(drawn.keys)


@pytest.mark.parametrize("unit", communication.UNITS)
def test_bars_tree_and_strip_add_up(calls, unit):
    whole = pytest.approx(communication.total(calls, unit), rel=1e-9)
    for by in communication.GROUPINGS:
        rows = communication.bars(calls, by, unit)
        assert sum(sum(kinds.values()) for kinds in rows.values()) == whole
    tree = communication.tree(calls, unit)
    assert tree[()] == whole
    for path, value in tree.items():
        children = [v for p, v in tree.items() if p[:-1] == path and len(p) == len(path) + 1]
        assert not children or sum(children) == pytest.approx(value, rel=1e-9)
    assert sum(sum(row.values()) for row in communication.heat(calls, unit).values()) == whole


def test_many_modules_share_a_row(calls):
    one = calls[0]
    many = [replace(one, module=f"part{n}.x") for n in range(30)]
    rows = communication.bars(many, "module", "count", most=5)
    assert len(rows) == 6 and list(rows)[-1] == "25 other modules" and sum(rows["25 other modules"].values()) == 25


def test_layers_come_in_order(calls):
    names = communication.layers_of([replace(calls[0], layer=n) for n in (10, None, 2)])
    assert names == (OUTSIDE, "layer 2", "layer 10")
    strip = communication.heat([replace(calls[0], axis="dp", layer=n) for n in (10, None, None)], "count")
    assert communication.only_layers(strip) == {"dp": {"layer 10": 1.0}}
    assert communication.heat_text(strip, "count").endswith("1 calls, layer 10 over dp. Outside layers, calls: dp 2.")
    rows = communication.bars([replace(calls[0], axis="dp", layer=n) for n in (10, None, 2)], "layer", "count")
    assert list(rows) == [f"dp: {OUTSIDE}", "dp: layer 2", "dp: layer 10"]


def test_hotspots_and_flows_hold_every_call_once(calls):
    for groups in (communication.hotspots(calls), communication.flows(calls)):
        assert sum(group.count for group in groups) == len(calls)
        assert sum(group.num_bytes for group in groups) == sum(call.num_bytes for call in calls)
        assert sum(group.us for group in groups) == pytest.approx(sum(call.us for call in calls))
    spots = communication.hotspots(calls)
    assert [spot.us for spot in spots] == sorted((spot.us for spot in spots), reverse=True)


def test_bus_bandwidth_is_that_of_nccl_tests(calls):
    """8 ranks, 8 GB in 1 s: all-reduce carries 2 * 7/8 of it over a link, the others 7/8."""
    for kind, wanted in (("all_reduce", 14e9), ("all_gather", 7e9), ("reduce_scatter", 7e9), ("all_to_all", 7e9)):
        (spot,) = communication.hotspots([replace(calls[0], kind=kind, ranks=8, num_bytes=8 * 10**9, us=1e6)])
        assert spot.bus_bytes_per_s == pytest.approx(wanted)


def test_filters_split_the_calls(calls):
    for field, of in (("phase", "phase"), ("axis", "axis"), ("kind", "kind"), ("layer", "layer_name"), ("module", "module_name")):
        values = {getattr(call, of) for call in calls}
        parts = [Filter(**{field: value}).keep(calls) for value in values]
        assert sum(map(len, parts)) == len(calls) and all(parts)
    assert Filter().keep(calls) == calls


def test_every_number_says_its_unit_and_source(case, calls):
    for quantity in communication.quantities(case[1], calls):
        assert quantity.unit and len(quantity.source) > 20
    assert any(case[1].hardware_name in q.source for q in communication.quantities(case[1], calls))


def test_prices_of_collectives_say_rule_error_and_source(case):
    plan = case[1]
    found = communication.price_sources(plan)
    spent = sum(step.us for r in plan.redistributions for step in r.steps if step.collective is not None)
    assert sum(quantity.value for quantity in found) * 1000 == pytest.approx(spent)
    assert all("%" in quantity.source and plan.hardware_name in quantity.source for quantity in found)
    assert communication.price_sources(replace(plan, hardware_name="abacus")) == ()


def test_small_numbers_stay_visible():
    assert [communication.short(v) for v in (0.0, 3.0, 1234.567, 0.0123, 1e-5)] == ["0", "3", "1,234.57", "0.012", "<0.001"]


# ---- timeline -----------------------------------------------------------------------------------------------------------


def test_the_timeline_is_serial_and_complete(case):
    graph, plan = case
    events = timeline.serial(graph, plan)
    assert sum(event.us for event in events) == pytest.approx(plan.compute_us + plan.comm_us)
    clock = 0.0
    for event in events:
        assert event.begin_us == pytest.approx(clock, abs=1e-3)
        clock += event.us
    assert sum(span.us for span in timeline.spans(events)) == pytest.approx(clock)
    assert len(timeline.lanes(events)) == 1 + len(plan.comm_bytes)
    phases = [timeline.PHASES.index(event.phase) for event in events]
    assert phases == sorted(phases), "forward, backward, optimizer"


def test_nothing_is_redistributed_before_it_is_made_or_after_it_is_read(case):
    graph, plan = case
    ready = {}
    for event in timeline.serial(graph, plan):
        if "tensor" in event.detail:
            made = ready.get(event.detail["tensor"])
            assert made is None or made <= event.begin_us + 1e-6
            assert event.key not in ready or event.key == event.detail["tensor"], "the reader ran already"
        else:
            ready[event.key] = event.begin_us + event.us


def test_the_chrome_trace_has_every_event_with_its_bytes_and_placements(case):
    graph, plan = case
    events = timeline.serial(graph, plan)
    text = timeline.chrome_trace(events, plan)
    assert text == timeline.chrome_trace(timeline.serial(graph, plan), plan)
    rows = [row for row in json.loads(text)["traceEvents"] if row["ph"] == "X"]
    assert len(rows) == len(events)
    assert sum(row["args"].get("bytes", 0) for row in rows) == sum(sum(k.values()) for k in plan.comm_bytes.values())
    assert all(row["args"]["op"] and ("placements" in row["args"] or row["args"]["to"]) for row in rows)
    assert "no overlap" in json.loads(text)["otherData"]["kind"]


# ---- communication beside compute ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forecast_case() -> tuple[JointGraph, Plan, Timeline, Overlapped]:
    plan = Plan.load(opening.DEMO_PLAN)
    graph = planned_graph(plan, JointGraph.load(opening.DEMO_GRAPH))
    found = forecast(plan, graph, hardware_profile(plan.hardware_name)).timeline
    return graph, plan, found, overlapped(graph, plan, found)


def test_exposed_time_adds_up_to_the_forecast(forecast_case):
    graph, plan, found, shown = forecast_case
    assert shown.step_us == found.step_us < plan.objective_us
    assert shown.exposed_total_us == pytest.approx(found.exposed_total_us)
    assert sum(shown.exposed_us.values()) == pytest.approx(found.exposed_total_us)
    calls = communication.calls_of(graph, plan)
    spots = communication.hotspots(calls, shown.of_calls)
    assert sum(spot.exposed_us for spot in spots) == pytest.approx(found.exposed_total_us)
    assert all(0 <= spot.exposed_us <= 1.5 * spot.us for spot in spots), "contention makes calls longer, not much"
    per_kind = dict.fromkeys(found.exposed_us, 0.0)
    for call, us in shown.of_calls.items():
        if us:
            per_kind[f"{call.kind}@{call.axis}"] += us
    assert per_kind == pytest.approx(dict(found.exposed_us))
    assert overlapped_quantities(shown, plan)[0].text == f"{found.step_us / 1000:,.2f} ms"


def test_what_is_drawn_as_exposed_is_when_compute_stands_still(forecast_case):
    _, _, found, shown = forecast_case
    spans = timeline.spans(shown.events)
    lanes = timeline.lanes(shown.events)
    assert lanes[0] == timeline.COMPUTE and all(", " in lane for lane in lanes[1:])
    computing = sorted((e.begin_us, e.begin_us + e.us) for e in shown.events if e.lane == timeline.COMPUTE)
    starts = [begin for begin, _ in computing]
    for span in spans:
        if span.is_exposed:
            middle = span.begin_us + span.us / 2
            before = bisect.bisect_right(starts, middle) - 1
            assert before < 0 or computing[before][1] <= middle + 1e-6
    drawn = sum(span.us for span in spans if span.is_exposed)
    assert drawn == pytest.approx(found.exposed_total_us, rel=0.05), "up to gaps that are the CPU's"
    for lane in lanes[1:]:
        events = [event for event in shown.events if event.lane == lane]
        assert sum(s.us for s in spans if s.lane == lane) == pytest.approx(sum(e.us for e in events))
    assert max(event.begin_us + event.us for event in shown.events) == pytest.approx(found.step_us)


def test_the_trace_of_the_schedule_says_what_is_exposed(forecast_case):
    graph, plan, found, shown = forecast_case
    data = json.loads(timeline.chrome_trace(shown.events, plan, timeline.OVERLAPPED_KIND))
    rows = [row for row in data["traceEvents"] if row["ph"] == "X"]
    assert len(rows) == sum(1 for action in found.actions.actions if action.us > 0)
    assert sum(row["args"].get("exposed_us", 0.0) for row in rows) == pytest.approx(found.exposed_total_us, abs=1.0)
    assert {row["args"]["op"] for row in rows} - {""} <= set(graph.node_by_key)
    assert "overlapped" in data["otherData"]["kind"] and "Overlap model" in shown.model


def test_figures_show_the_numbers(case, calls):
    rows = communication.bars(calls, "collective", "ms")
    figure = charts.bars(rows, "ms")
    assert sum(sum(trace.x) for trace in figure.data if trace.type == "bar") == pytest.approx(communication.total(calls, "ms"))
    icicle = charts.icicle(communication.tree(calls, "ms"), "ms").data[0]
    assert icicle.values[0] == pytest.approx(communication.total(calls, "ms"))
    assert set(icicle.parents) - {""} <= set(icicle.ids) and len(set(icicle.ids)) == len(icicle.ids)


# ---- the page -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(open_app):
    at = open_app()
    at.switch_page("views/communication.py")
    return run(at)


def texts(at) -> str:
    return " ".join(item.body for item in at.get("html"))


def test_the_page_shows_strip_sums_and_hotspots(page):
    plan = page.session_state["session"].document.plan
    assert "Plan status" in texts(page)
    calls = communication.calls_of(page.session_state["session"].document.shown, plan)
    for quantity in communication.quantities(plan, calls):
        assert quantity.text in texts(page)
    assert len(page.dataframe[0].value) == len(communication.hotspots(calls))


def test_phase_unit_and_filter_change_what_is_listed(page):
    before = len(page.dataframe[0].value)
    page.button_group(key="comm_phase").set_value("forward")
    page.button_group(key="comm_unit").set_value("ms")
    page.button_group(key="comm_by").set_value("layer")
    run(page)
    assert 0 < len(page.dataframe[0].value) < before and set(page.dataframe[0].value["phase"]) == {"forward"}
    page.selectbox(key="comm_kind").set_value("reduce_scatter")
    run(page)
    assert "No collective passes" in page.info[0].value
    page.button(key="comm_clear").click()
    run(page)
    assert page.selectbox(key="comm_kind").value == "all" and page.dataframe


def filters(page) -> list[str]:
    return [page.selectbox(key=f"comm_{name}").value for name in ("axis", "kind", "layer", "module")]


def test_a_click_in_the_icicle_filters_and_one_more_goes_back_up(page):
    point = {"selection": {"points": [{"id": "dp|all_gather|layer 2"}]}}
    page.session_state["comm_icicle_0"] = point
    run(page)
    assert filters(page) == ["dp", "all_gather", "layer 2", "all"] and set(page.dataframe[0].value["axis"]) == {"dp"}
    page.session_state["comm_icicle_1"] = point
    run(page)
    assert filters(page) == ["dp", "all_gather", "all", "all"]
    page.session_state["comm_icicle_2"] = {"selection": {"points": [{"id": "all"}]}}
    run(page)
    assert filters(page) == ["all"] * 4


def test_both_views_and_the_flows_draw(page):
    assert "bus GB/s" in texts(page) and any("darkest" in caption.value.replace("\\", "") for caption in page.caption)
    page.button_group(key="comm_view").set_value("Timeline")
    run(page)
    assert any("serial, no overlap" in caption.value for caption in page.caption) and page.get("download_button")
    assert any("No overlapped forecast" in caption.value for caption in page.caption), "a made-up plan has made-up prices"
    assert "exposed ms" not in page.dataframe[0].value


def test_a_plan_is_drawn_as_scheduled_and_in_series(open_app, forecast_case, monkeypatch):
    graph, plan, _, shown = forecast_case
    at = open_app()
    found = at.session_state["session"]
    found.document = replace(found.document, graph=graph, plan=plan)
    monkeypatch.setattr(state, "overlapped", lambda graph, plan: shown)
    at.switch_page("views/communication.py")
    run(at)
    assert sum(at.dataframe[0].value["exposed ms"]) > 0
    at.button_group(key="comm_view").set_value("Timeline")
    run(at)
    assert any("Overlap model" in caption.value for caption in at.caption) and "exposed dp" in texts(at)
    at.button_group(key="comm_order").set_value("in series")
    run(at)
    assert any("serial, no overlap" in caption.value for caption in at.caption)


def test_a_click_in_the_timeline_selects_its_op(page):
    page.button_group(key="comm_view").set_value("Timeline")
    run(page)
    page.session_state["comm_timeline"] = {"selection": {"points": [{"customdata": ["", "", WQ]}]}}
    run(page)
    assert page.session_state["session"].selected == WQ


def test_a_row_selects_its_op_and_leads_to_the_explorer(page):
    page.session_state["comm_spots"] = {"selection": {"rows": [1], "columns": [], "cells": []}}
    run(page)
    found = page.session_state["session"]
    calls = communication.calls_of(found.document.shown, found.document.plan)
    assert found.selected == communication.hotspots(calls)[1].box
    page.button(key="comm_show").click()
    run(page)
    assert page.session_state["page"] == "Explorer" and found.selected == page.session_state["session"].selected


@pytest.mark.parametrize("name", ["communication", "memory"])
def test_without_a_plan_the_page_leads_to_setup_and_demo(open_app, monkeypatch, name):
    with monkeypatch.context() as missing:
        missing.setattr(opening, "demo_available", lambda: False)
        at = open_app()
    at.switch_page(f"views/{name}.py")
    run(at)
    assert "Setup page" in at.info[0].value and at.button(key="no_plan_setup")
    at.button(key="no_plan_demo").click()
    run(at)
    assert at.session_state["session"].document is not None and not at.info
