"""View-models, charts and page of Memory: what is listed adds up to what the plan counts."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest

from app import opening
from app.charts import memory as charts
from app.view_models import memory
from app.view_models.device_grid import MOST_SHOWN, grid
from app.view_models.pins import PinHistory
from planner import JointGraph, MemoryBudget, Mesh, Pin, Plan, planned_graph
from planner.placement import local_shape, parse
from tests.app.conftest import run
from tests.app.synthetic import WQ


@pytest.fixture(scope="module")
def traced() -> JointGraph:
    return JointGraph.load(opening.DEMO_GRAPH)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.load(opening.DEMO_PLAN)


@pytest.fixture(scope="module")
def shown(traced: JointGraph, plan: Plan) -> JointGraph:
    return planned_graph(plan, traced)


@pytest.fixture(scope="module")
def rows(shown: JointGraph, plan: Plan) -> tuple[memory.Held, ...]:
    return memory.held(shown, plan)


def test_tensors_add_up_to_the_planned_bytes(rows, plan):
    for category, num_bytes in memory.categories(plan):
        assert memory.total(rows, category) == num_bytes
    assert sum(row.num_bytes for row in rows) == plan.memory.peak_bytes
    assert sum(group.num_bytes for group in memory.grouped(rows)) == plan.memory.peak_bytes
    assert sum(group.count for group in memory.grouped(rows)) == len(rows)


@pytest.mark.parametrize("by", ["module", "layer"])
def test_saved_activations_add_up(rows, plan, by):
    found = memory.saved_by(rows, by)
    assert sum(found.values()) == plan.memory.activation_bytes
    if by == "layer":
        assert list(found) == ["outside layers", *(f"layer {n}" for n in range(32))]


def test_the_curve_peaks_at_the_planned_peak_at_the_turn(rows, shown, plan):
    curve = memory.live(shown, rows)
    assert curve.peak_bytes == plan.memory.peak_bytes
    held = plan.memory.activation_bytes + plan.memory.kept_parameter_bytes
    assert curve.constant_bytes == plan.memory.peak_bytes - held and plan.memory.kept_parameter_bytes > 0
    assert curve.num_bytes[-1] == 0 and list(curve.nodes) == sorted(curve.nodes)
    assert curve.peak_node <= curve.backward


def test_lives_begin_in_forward_and_end_in_backward(rows, shown):
    for row in rows:
        if row.born is not None:
            assert shown.nodes[row.born].phase == "forward" and shown.nodes[row.dies].phase == "backward"
            assert row.born_key == shown.nodes[row.born].key


def test_every_number_says_its_unit_and_source(plan):
    found = {q.label: q for q in memory.quantities(plan)}
    assert found["peak memory"].text == f"{plan.memory.peak_bytes / 2**30:,.2f} GiB"
    assert "budget" in found and "hardware profile" in found["usable memory of the device"].source
    assert all(quantity.unit and len(quantity.source) > 20 for quantity in found.values())


def test_an_unknown_profile_says_nothing_of_the_device(plan):
    other = replace(plan, hardware_name="abacus")
    assert "abacus" in memory.device_problem(other) and memory.usable_bytes(other) is None
    assert not any("device" in q.label for q in memory.quantities(other))


def test_checkpointing_keeps_less_for_more_time(traced, plan):
    options = memory.checkpoint_options(traced, plan)
    assert [option.count for option in options] == [0, 8, 16, 24, 32]
    for less, more in itertools.pairwise(options):
        assert more.activation_bytes < less.activation_bytes and more.extra_us > less.extra_us
    now = next(option for option in options if option.count == len(plan.checkpointed))
    assert (now.activation_bytes, now.peak_bytes) == (plan.memory.activation_bytes, plan.memory.peak_bytes)
    assert (options[0].policy, options[2].policy) == ("none", "full:16")


def test_the_figures_mark_limit_and_peak(rows, shown, plan):
    figure = charts.live(memory.live(shown, rows), 77 * 2**30)
    words = " ".join(str(note.text) for note in figure.layout.annotations)
    assert "budget 77.0 GiB" in words and f"peak {plan.memory.peak_bytes / 2**30:,.2f} GiB" in words
    far = charts.live(memory.live(shown, rows), 770 * 2**30)
    assert "far above" in " ".join(str(note.text) for note in far.layout.annotations) and far.layout.yaxis.range[1] < 100
    bars = charts.categories(memory.categories(plan), {"budget": 77 * 2**30})
    assert sum(sum(bar.x) for bar in bars.data) == pytest.approx(plan.memory.peak_bytes / 2**30)


# ---- which device holds what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["RR", "S(0)R", "RS(1)", "S(0)S(0)", "S(1)S(0)", "S(0)S(1)"])
def test_slices_cover_the_tensor_as_often_as_it_is_held(written):
    mesh, shape = Mesh(axis_names=("dp", "tp"), axis_sizes=(2, 4)), (8, 16)
    found = grid(shape, parse(written, mesh), mesh)
    cells = [cell for _, row in found.rows for cell in row]
    assert [cell.rank for cell in cells] == list(range(8))
    held = [[0] * 16 for _ in range(8)]
    for cell in cells:
        (a, b), (c, d) = cell.slices
        assert (b - a, d - c) == local_shape(shape, parse(written, mesh), mesh)
        for i, j in itertools.product(range(a, b), range(c, d)):
            held[i][j] += 1
    assert {count for line in held for count in line} == {found.copies} and found.distinct * found.copies == 8
    assert len({cell.number for cell in cells}) == found.distinct


def test_the_outermost_axis_splits_first():
    mesh = Mesh(axis_names=("dp", "tp"), axis_sizes=(2, 2))
    (_, first), (_, second) = grid((8,), parse("S(0)S(0)", mesh), mesh).rows
    assert [cell.text((8,)) for cell in (*first, *second)] == ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]


def test_pending_sums_and_whole_tensors_say_so():
    mesh = Mesh(axis_names=("dp", "tp"), axis_sizes=(2, 2))
    found = grid((8, 4), parse("PR", mesh), mesh)
    assert found.rows[1][1][0].part == "P dp 1" and found.rows[1][1][0].text((8, 4)) == "[:, :]"
    assert "whole tensor" in found.summary and grid((), parse("RR", mesh), mesh).rows[0][1][0].text(()) == "[]"


def test_large_meshes_are_cut_with_their_ends_shown():
    mesh = Mesh(axis_names=("pp", "dp", "tp"), axis_sizes=(4, 16, 64))
    found = grid((64, 64), parse("RS(0)S(1)", mesh), mesh)
    assert len(found.rows) == len(found.columns) == MOST_SHOWN
    assert found.rows[-1][1][-1].rank == math.prod(mesh.axis_sizes) - 1 and found.rows[-1][0] == "pp 3 dp 15"
    assert found.devices == 4096 and found.copies == 4


# ---- the page -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(open_app):
    at = open_app()
    at.switch_page("views/memory.py")
    return run(at)


def texts(at) -> str:
    return " ".join(item.body for item in at.get("html"))


def test_the_page_says_whether_it_fits_and_what_counts(page):
    assert "Plan status" in texts(page)
    assert "Fits, 72.0 GiB free" in texts(page) and "8.00 GiB of a budget of 80.00 GiB" in texts(page)
    assert any("Not counted" in caption.value for caption in page.caption)
    assert len(page.dataframe[0].value) > 5 and "rank 0" in texts(page)


def test_a_row_selects_its_tensor_and_leads_to_the_explorer(page):
    page.session_state["mem_tensors_True"] = {"selection": {"rows": [0], "columns": [], "cells": []}}
    run(page)
    found = page.session_state["session"]
    rows = memory.held(found.document.shown, found.document.plan)
    assert found.selected == memory.grouped(rows)[0].first.key
    page.button(key="mem_show").click()
    run(page)
    assert page.session_state["page"] == "Explorer"


def test_a_click_in_the_curve_selects_its_op_and_shows_who_holds_it(page):
    page.session_state["mem_live"] = {"selection": {"points": [{"customdata": WQ}]}}
    run(page)
    assert page.session_state["session"].selected == WQ and f"<code>{WQ}</code>" in texts(page)


def test_alike_layers_can_be_listed_one_by_one(page):
    before = len(page.dataframe[0].value)
    page.toggle(key="mem_group").set_value(False)
    page.button_group(key="mem_by").set_value("layer")
    run(page)
    assert len(page.dataframe[0].value) > before and set(page.dataframe[0].value["×"]) == {1}


def test_a_plan_that_does_not_fit_comes_with_advice(page):
    found = page.session_state["session"]
    plan = found.document.plan
    pin = Pin.parse("layers.*.attention.wq=S(0)R # kernel", plan.mesh)
    tight = tuple(c for c in plan.constraints if not isinstance(c, MemoryBudget)) + (MemoryBudget(num_bytes=2**30),)
    over = replace(plan, constraints=tight)
    found.document = replace(found.document, plan=over, memory_bytes=2**30, history=PinHistory(pins=(pin,)))
    run(page)
    assert "7.0 GiB over" in texts(page) and any("layers**" in text.value for text in page.markdown)
    page.button(key="mem_plan_4").click()
    run(page)
    running = page.session_state["session"].running
    assert running is not None and running.request.checkpoint == "full:4" and running.request.memory_bytes == 2**30
    deadline = time.monotonic() + 120
    while page.session_state["session"].running is not None and time.monotonic() < deadline:
        time.sleep(0.05)
        run(page)
    document = page.session_state["session"].document
    assert document.history.pins == (pin,) and document.plan.pins == (pin,) and document.memory_bytes == 2**30
