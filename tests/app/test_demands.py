"""Demands of every kind in the app: a plan that was made with them is opened, edited, solved again and stored with them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

from app import opening
from app.engine import OpenSpec, PlannerEngine, Progress
from app.view_models import demands, pins, status
from planner import (
    Allow,
    Forbid,
    ForbidCollective,
    MemoryBudget,
    Mesh,
    ModelRequest,
    Pin,
    Recipe,
    ReshardAfterForward,
    SamePlacement,
)
from planner.placement import parse
from tests.app.conftest import run
from tests.app.synthetic import MESH, WQ, make_plan, small_graph
from tests.app.test_pages import address, document, press, session, solve, strip_text

GRAPH = small_graph()
WHERE = "layers.*.attention.wq"
KINDS = (
    Pin(where="layers.0.attention.wo", placements=parse("RR"), note="why"),
    Allow(where=WHERE, options=(parse("S(0)R"), parse("RR")), note="why"),
    Forbid(where="layers.*.attention.wo", options=(parse("S(1)R"),), note="why"),
    ForbidCollective(collective="all_to_all", axis="dp", note="why"),
    SamePlacement(where=WHERE, note="why"),
    Recipe(name="fsdp_tp_sp", axes=("dp", "tp"), may_keep=True, note="why"),
    ReshardAfterForward(when="never", note="why"),
)


@pytest.fixture
def open_plan_of(open_app, tmp_path, monkeypatch):
    """Opens the app on a plan with these demands."""

    def start(*found):
        path = tmp_path / "demanding.json.gz"
        path.write_bytes(gzip.compress(make_plan(GRAPH, MESH, found).dumps().encode()))
        monkeypatch.setattr(opening, "DEMO_PLAN", path)
        return open_app()

    return start


def demanded(plan) -> set:
    return set(demands.of_plan(plan))


def test_no_kind_of_constraint_is_lost_between_opening_and_solving_again(open_plan_of):
    at = open_plan_of(*KINDS)
    assert document(at).history.pins == KINDS and "stale" not in strip_text(at)
    press(at, "remove_0")
    assert "stale: 1 pin changed" in strip_text(at)
    solve(at)
    assert demanded(document(at).plan) == set(KINDS[1:])
    again = run(opened_again(at))
    assert document(again).history == document(at).history
    press(again, "undo")
    assert document(again).history.pins == KINDS


def opened_again(at):
    other = type(at).from_file(opening.__file__.replace("opening.py", "main.py"), default_timeout=300)
    for name, value in address(at).items():
        other.query_params[name] = value
    return other


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_every_kind_is_a_chip_that_can_be_removed_and_brought_back(open_plan_of, number):
    at = open_plan_of(KINDS[number])
    rows = " ".join(item.body for item in at.get("html"))
    assert demands.headline(KINDS[number]) in rows and "why" in rows
    press(at, "remove_0")
    assert document(at).history.pins == () and session(at).document.plan is not None
    press(at, "undo")
    assert document(at).history.pins == (KINDS[number],)


def test_the_log_keeps_every_kind():
    events = [pins.plan_event(make_plan(GRAPH), None, GRAPH, None), pins.pins_event(KINDS)]
    assert pins.replay(json.loads(json.dumps(events))).history.pins == KINDS


def test_a_log_of_pins_alone_is_read_too():
    events = [pins.plan_event(make_plan(GRAPH), None, GRAPH, None),
              {"event": "pins", "pins": [{"where": WHERE, "placements": "RR"}]}]  # fmt: skip
    assert pins.replay(events).history.pins == (Pin(where=WHERE, placements=parse("RR")),)


def test_a_note_alone_does_not_make_a_plan_stale():
    plan = make_plan(GRAPH, MESH, KINDS)
    assert demands.num_changed(tuple(map(demands.bare, KINDS)), plan) == 0
    for demand in KINDS:
        assert demands.num_changed(demands.without(KINDS, demand), plan) == 1


def test_what_is_said_again_replaces_and_what_is_forbidden_adds_up():
    pin, allow, forbid, _, _, recipe, _ = KINDS
    assert demands.added((allow,), replace(pin, where=WHERE)) == (replace(pin, where=WHERE),)
    assert demands.added((recipe,), replace(recipe, name="tp")) == (replace(recipe, name="tp"),)
    other = replace(forbid, options=(parse("RR"),))
    assert demands.added((forbid,), other) == (forbid, other)


def test_boxes_say_what_is_demanded_of_them():
    marks, _ = pins.pinned_keys(GRAPH, KINDS)
    assert marks[WQ] == "allowed S(0)R or RR; tied: the same placement in all of them"
    assert marks["layers.0.attention.wo/linear/fwd#0"] == "pinned to RR; not S(1)R"


def test_the_tightest_budget_counts():
    assert status.budget_bytes(replace(make_plan(GRAPH), constraints=(MemoryBudget(num_bytes=9), MemoryBudget(num_bytes=5)))) == 5


def test_a_worker_solves_with_every_kind():
    mesh = Mesh.parse("dp=2,tp=2")
    progress = Progress(lambda message: None)
    request = ModelRequest(model="llama3-tiny", layers=2)
    engine = PlannerEngine(OpenSpec(request=request, mesh=mesh, hardware="h100_sxm", checkpoint="none"), progress)
    wanted = (
        Allow(where=WHERE, options=(parse("S(0)R"), parse("S(0)S(2)"))),
        Forbid(where="layers.*.attention.wo", options=(parse("S(0)S(1)"),)),
        ForbidCollective(collective="all_to_all", axis="dp"),
        SamePlacement(where=WHERE),
        Recipe(name="tp_sp", axes=("dp", "tp")),
    )
    plan = engine.solve(progress, wanted, None, 60.0, False)
    assert demands.of_plan(plan) == wanted
