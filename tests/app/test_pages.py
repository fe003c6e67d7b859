"""The pages without a browser. A click in the graph is played by writing the component's state before a run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from app import opening, state, work
from app.views import explorer
from planner import SamePlacement
from tests.app.conftest import run
from tests.app.synthetic import WQ


def session(at: AppTest) -> state.Session:
    return at.session_state["session"]


def document(at: AppTest) -> state.Document:
    found = session(at).document
    assert found is not None
    return found


def click(at: AppTest, key: str, *group: str) -> AppTest:
    """A click in the graph, then as many runs as the worker needs to say what is legal."""
    at.session_state[f"graph_{document(at).draft}"] = {"selected": key, "group": [*group, key]}
    run(at)
    return until(at, lambda: placements(at) is not None)


def until(at: AppTest, done: Callable[[], bool]) -> AppTest:
    deadline = time.monotonic() + 120
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
        run(at)
    assert done()
    return at


def press(at: AppTest, key: str) -> AppTest:
    at.button(key=key).click()
    return run(at)


def placements(at: AppTest):
    return next((group for group in at.button_group if (group.key or "").startswith("place ")), None)


def scope(at: AppTest, value: str) -> AppTest:
    at.button_group(key=next(g.key for g in at.button_group if (g.key or "").startswith("scope"))).set_value(value)
    return run(at)


def glob(at: AppTest, pattern: str) -> AppTest:
    next(field for field in at.text_input if field.label == "Glob").set_value(pattern)
    return run(at)


def pin_everywhere(at: AppTest, placement: str = "S(0)R", reason: str = "") -> AppTest:
    click(at, WQ)
    placements(at).set_value(placement)
    run(at)
    scope(at, "all layers")
    next(field for field in at.text_input if field.label == "Reason").set_value(reason)
    run(at)
    return press(at, "pin")


def solve(at: AppTest) -> AppTest:
    press(at, "solve")
    return until(at, lambda: session(at).running is None)


def strip_text(at: AppTest) -> str:
    return next(item.body for item in at.get("html") if "Plan status" in item.body)


# ---- opening ------------------------------------------------------------------------------------------------------------


def test_the_app_opens_on_the_demo_and_says_what_to_do(open_app):
    at = open_app()
    assert "Click a module" in at.info[0].value
    text = strip_text(at)
    assert "fits, 72.0 GiB free" in text and "optimal" in text and "serial, no overlap" in text


def test_a_warm_worker_solves_again_before_the_page_is_drawn(open_app, monkeypatch):
    """One run shows the new plan: it is not drawn once without it."""
    monkeypatch.setattr(work, "SOON_S", 20)
    at = pin_everywhere(open_app())
    before = document(at).plan.plan_id
    press(at, "solve")
    assert session(at).running is None and document(at).plan.plan_id != before and "stale" not in strip_text(at)


def test_opening_writes_nothing(open_app, demo):
    open_app()
    assert not list(demo.rglob("*.json*"))


def test_without_a_demo_the_explorer_points_to_setup(open_app, monkeypatch, tmp_path):
    monkeypatch.setattr(opening, "DEMO_GRAPH", tmp_path / "none.json.gz")
    assert "Setup page" in open_app().info[0].value


def test_a_link_selects_its_op(open_app):
    at = open_app(op=WQ)
    assert at.code[0].value == WQ and session(at).focus == (WQ, session(at).focus[1])


def test_a_link_to_an_op_that_is_not_there_is_ignored(open_app):
    at = open_app(op="nowhere/mul/fwd#0")
    assert session(at).selected is None and "op" not in at.query_params


@pytest.mark.parametrize(
    "address", [{"project": "../etc", "draft": "x"}, {"project": "none", "draft": "none"}, {"project": "none", "plan": ".."}]
)
def test_a_bad_address_is_an_error_beside_the_demo(open_app, address):
    at = open_app(**address)
    assert at.error and document(at).plan.plan_id
    press(at, "dismiss_session")
    assert not at.error


def test_sessions_share_what_is_read_from_the_workspace(open_app):
    first = pin_everywhere(open_app())
    others = [open_app(project=document(first).project, draft=document(first).draft) for _ in range(2)]
    one, other = (document(at) for at in others)
    assert one.graph is other.graph and one.plan is other.plan


# ---- inspecting and pinning ---------------------------------------------------------------------------------------------


def test_a_click_fills_the_inspector_and_the_address(open_app):
    at = click(open_app(), WQ)
    assert at.code[0].value == WQ and address(at)["op"] == WQ
    assert placements(at).value == "S(0)S(1)"


def test_pin_in_all_layers_undo_redo_unpin_clear(open_app):
    at = pin_everywhere(open_app(), reason="kernel needs it")
    (pin,) = document(at).history.pins
    assert pin.where == "layers.*.attention.wq"
    assert re.fullmatch(r"kernel needs it \(\d{4}-\d\d-\d\d\)", pin.note)
    assert "stale: 1 pin changed" in strip_text(at)
    assert press(at, "undo") and document(at).history.pins == ()
    assert press(at, "redo") and document(at).history.pins == (pin,)
    assert press(at, "unpin") and document(at).history.pins == ()
    press(at, "undo")
    assert press(at, "clear") and document(at).history.pins == ()
    assert press(at, "undo") and press(at, "remove_0") and document(at).history.pins == ()


def test_whoever_gives_a_name_signs_what_is_demanded_also_after_a_refresh(open_app):
    at = open_app()
    at.text_input(key="author").set_value("Ann")
    run(at)
    pin_everywhere(at)
    (pin,) = document(at).history.pins
    assert re.fullmatch(r"\(Ann, \d{4}-\d\d-\d\d\)", pin.note)
    again = open_app(**address(at))
    assert again.text_input(key="author").value == "Ann"
    assert open_app().text_input(key="author").value == "", "a copy is somebody else's"


def test_layers_can_be_tied_to_have_the_same_placement(open_app):
    at = click(open_app(), WQ)
    at.button_group(key="kind layers.0.attention.wq").set_value("Tie")
    run(at)
    assert at.button(key="pin").disabled and any("several tensors" in caption.value for caption in at.caption)
    scope(at, "all layers")
    press(at, "pin")
    assert document(at).history.pins == (SamePlacement(where="layers.*.attention.wq"),)
    assert set(explorer.overlay(session(at))["pins"].values()) == {"tied: the same placement in all of them"}


def test_a_pin_marks_every_layer_in_the_graph(open_app):
    at = pin_everywhere(open_app())
    assert len(explorer.overlay(session(at))["pins"]) == 4


def test_this_one_pins_one(open_app):
    at = click(open_app(), WQ)
    press(at, "pin")
    assert document(at).history.pins[0].where == "layers.0.attention.wq"


def test_a_glob_shows_its_matches_and_refuses_none(open_app):
    at = click(open_app(), WQ)
    scope(at, "glob")
    glob(at, "layers.*.attention.z*")
    assert at.button(key="pin").disabled and any("Nearest" in caption.value for caption in at.caption)
    glob(at, "layers.*.attention.w*")
    assert at.button(key="pin").label == "Pin 8"


def test_the_weight_of_a_linear_can_be_pinned_from_it(open_app):
    at = click(open_app(), WQ)
    at.button_group(key=f"target {WQ}").set_value("weight")
    run(at)
    until(at, lambda: placements(at) is not None)
    press(at, "pin")
    assert document(at).history.pins[0].where == "layers.0.attention.wq.weight"


# ---- solving and exporting ----------------------------------------------------------------------------------------------


def test_re_solve_makes_a_new_plan_and_lists_what_changed(open_app):
    at = pin_everywhere(open_app())
    before = document(at).plan.plan_id
    solve(at)
    assert document(at).base is not None and document(at).base.plan_id == before
    assert "stale" not in strip_text(at) and f"base plan {before[:7]}" in strip_text(at)
    at.button_group(key="pane").set_value("Changes")
    run(at)
    assert any("4 tensors changed" in text.value for text in at.markdown)
    press(at, "show_0")
    assert session(at).selected == WQ


def test_re_solve_is_off_while_nothing_changed(open_app):
    assert open_app().button(key="solve").disabled


def test_infeasible_pins_keep_plan_and_pins(open_app):
    at = pin_everywhere(open_app(), reason="infeasible")
    before = document(at)
    solve(at)
    assert "These cannot hold" in " ".join(text.value for text in at.markdown)
    assert document(at).plan is before.plan and document(at).history == before.history
    assert "infeasible" in strip_text(at)


@pytest.mark.parametrize("note, words", [("die", "exit code 3"), ("bug", "ZeroDivisionError")])
def test_a_broken_worker_is_a_message_and_the_next_solve_works(open_app, note, words):
    at = pin_everywhere(open_app(), reason=note)
    solve(at)
    assert words in at.error[0].value and len(document(at).history.pins) == 1
    press(at, "clear")
    pin_everywhere(at, "RR")
    solve(at)
    assert not at.error and document(at).base is not None


def test_cancel_keeps_everything(open_app):
    at = pin_everywhere(open_app(), reason="slow")
    plan = document(at).plan
    press(at, "solve")
    press(at, "cancel")
    until(at, lambda: session(at).running is None)
    assert document(at).plan is plan and len(document(at).history.pins) == 1 and not at.error


@pytest.mark.parametrize("note", ["listening", "nothing found"])
def test_cancel_takes_the_best_plan_with_its_gap_if_there_is_one(open_app, note):
    at = pin_everywhere(open_app(), reason=note)
    before = document(at).plan
    press(at, "solve")
    press(at, "cancel")
    until(at, lambda: session(at).running is None)
    after, found = document(at).plan, session(at)
    if note == "nothing found":
        assert after is before
    else:
        assert after is not before and after.report.status == "feasible" and after.report.gap == pytest.approx(0.1)
    assert found.proof is None and not at.error and len(document(at).history.pins) == 1


def test_an_unproved_answer_is_shown_at_once_and_its_proof_follows(open_app):
    at = pin_everywhere(open_app(), reason="unproved")
    solve(at)
    assert document(at).plan.report.status == "feasible"
    until(at, lambda: session(at).proof is None)
    assert document(at).plan.report.status == "optimal" and "proved optimal" in session(at).note
    again = open_app(**address(at))
    assert document(again).plan.report.status == "optimal"


def test_a_proof_leaves_the_page_free_and_can_be_stopped_and_begun_again(open_app):
    at = pin_everywhere(open_app(), reason="slow proof")
    solve(at)
    assert "within 1 %, proof running" in strip_text(at)
    click(at, "layers.0.attention.wo/linear/fwd#0")  # the worker in front still answers
    press(at, "stop_proof")
    assert session(at).proof is None and "within 1 %, not proved" in strip_text(at)
    press(at, "prove")
    assert session(at).proof is not None
    press(at, "clear")
    solve(at)  # a new question ends it
    assert session(at).proof is None and "optimal" in strip_text(at)


def test_export_offers_script_and_plan_with_the_checks(open_app):
    at = open_app()
    at.button_group(key="pane").set_value("Export")
    run(at)
    press(at, "export_start")
    until(at, lambda: session(at).running is None)
    run(at)
    assert [button.label for button in at.get("download_button")] == ["Download train.py", "Download plan"]
    assert any("PASS" in item.body for item in at.get("html"))


# ---- the workspace ------------------------------------------------------------------------------------------------------


def address(at: AppTest) -> dict[str, str]:
    return {name: str(value) for name, value in at.query_params.items()}


def test_a_refresh_restores_plan_pins_undo_and_selection(open_app):
    at = solve(pin_everywhere(open_app()))
    again = open_app(**address(at))
    assert document(again).plan.plan_id == document(at).plan.plan_id
    assert document(again).history == document(at).history and document(again).base is not None
    assert session(again).selected == WQ
    press(again, "undo")
    assert document(again).history.pins == ()


def test_a_restart_without_an_address_opens_the_last_project_as_a_copy(open_app):
    at = pin_everywhere(open_app())
    other = open_app()
    assert document(other).history.pins == document(at).history.pins
    assert document(other).draft != document(at).draft


def test_two_sessions_do_not_see_each_others_pins(open_app):
    one, two = open_app(), open_app()
    pin_everywhere(one)
    run(two)
    assert document(two).history.pins == ()


def test_a_workspace_that_cannot_be_written_is_a_banner_and_work_goes_on(open_app, demo):
    demo.parent.joinpath("workspace").write_text("a file where the folder should be")
    at = pin_everywhere(open_app())
    assert at.warning and len(document(at).history.pins) == 1


# ---- Setup --------------------------------------------------------------------------------------------------------------


def test_setup_plans_a_model_and_opens_it(open_app):
    at = on_setup(open_app())
    at.text_input(key="mesh").set_value("dp=2,tp=4")
    at.text_input(key="layers").set_value("2")
    at.selectbox(key="model").set_value("llama3-tiny")
    run(at)
    press(at, "start")
    until(at, lambda: session(at).running is None)
    run(at)
    assert str(document(at).plan.mesh) == "dp=2,tp=4"
    assert state.workspace().recent()[0].name == "llama3-tiny on dp=2,tp=4"


def test_a_bad_mesh_is_said_and_nothing_is_lost(open_app):
    at = on_setup(open_app())
    plan = document(at).plan
    at.text_input(key="mesh").set_value("dp8,tp=8")
    run(at)
    assert "axis=size" in at.error[0].value and at.button(key="start").disabled
    assert at.text_input(key="mesh").value == "dp8,tp=8" and document(at).plan is plan


def test_the_form_survives_a_page_switch(open_app):
    at = on_setup(open_app())
    at.text_input(key="batch").set_value("128")
    run(at)
    at.switch_page("views/explorer.py")
    run(at)
    assert at.text_input == [] or at.text_input[0].label != "Layers"
    assert on_setup(at).text_input(key="batch").value == "128"


def test_a_page_switch_keeps_pins_and_selection(open_app):
    at = pin_everywhere(open_app())
    on_setup(at)
    assert "stale: 1 pin changed" in strip_text(at)
    at.switch_page("views/explorer.py")
    run(at)
    assert session(at).selected == WQ and at.code[0].value == WQ and session(at).focus[0] == WQ


def on_setup(at: AppTest) -> AppTest:
    at.switch_page("views/setup.py")
    return run(at)


def test_a_lost_way_to_the_explorer_is_taken_again(open_app, monkeypatch):
    """A request of the page that is left can arrive behind the switch; Streamlit then runs that page once more instead."""
    at = open_app()
    at.switch_page("views/compare.py")
    run(at)
    switch, tries = st.switch_page, []

    def overtaken_once(page):
        tries.append(page)
        if len(tries) == 1:
            st.rerun()
        switch(page)

    monkeypatch.setattr(st, "switch_page", overtaken_once)
    session(at).arrived = True
    run(at)
    assert len(tries) == 2 and not session(at).arrived
    assert at.session_state["page"] == "Explorer"
