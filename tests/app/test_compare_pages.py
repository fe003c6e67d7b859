"""Compare and Export without a browser."""

from __future__ import annotations

import base64
import json

import pytest
from streamlit.testing.v1 import AppTest

from app import opening, plans, state
from app.views import explorer
from planner import Pin, Plan
from tests.app.conftest import run
from tests.app.synthetic import MESH, make_plan, small_graph
from tests.app.test_pages import document, pin_everywhere, press, session, solve, strip_text, until

DDP = "recipe ddp: data parallel"


@pytest.fixture(autouse=True)
def same_pool(pool, monkeypatch) -> None:
    monkeypatch.setattr(plans, "pool", lambda: pool)


def on(at: AppTest, page: str) -> AppTest:
    at.switch_page(f"views/{page}.py")
    return run(at)


def view(at: AppTest, name: str) -> AppTest:
    at.button_group(key="compare_view").set_value(name)
    return run(at)


def choose(at: AppTest, side: str, label: str) -> AppTest:
    at.selectbox(key=f"compare_{side}").set_value(label)
    return run(at)


def finish(at: AppTest) -> AppTest:
    until(at, lambda: session(at).running is None)
    return run(at)


def html(at: AppTest) -> str:
    return " ".join(item.body for item in at.get("html"))


def frame(at: AppTest, column: str):
    """The table with this column."""
    return next(table.value for table in at.dataframe if column in table.value)


def texts(at: AppTest) -> str:
    return " ".join(str(item.value) for item in (*at.caption, *at.info, *at.warning, *at.markdown, *at.error))


# ---- Compare ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["compare", "export"])
def test_without_a_plan_the_page_says_where_to_begin(open_app, monkeypatch, tmp_path, page):
    monkeypatch.setattr(opening, "DEMO_GRAPH", tmp_path / "none.json.gz")
    at = on(open_app(), page)
    assert "Setup page" in at.info[0].value


def test_the_first_comparison_offers_what_experts_write(open_app):
    at = on(open_app(), "compare")
    assert at.selectbox(key="compare_a").value.startswith("recipe fsdp_tp_sp")
    assert at.selectbox(key="compare_b").value == f"open plan {document(at).plan.plan_id[:7]}"
    before = document(at)
    press(at, "price_A")
    finish(at)
    assert "B minus A" in html(at) and document(at) is before and not at.error
    assert any("recipe fsdp_tp_sp" in str(value) for value in frame(at, "what")["what"])


def test_a_recipe_that_does_not_apply_says_why(open_app):
    at = choose(on(open_app(), "compare"), "a", "recipe ep: expert parallel")
    press(at, "price_A")
    finish(at)
    assert "the model has no experts" in texts(at).replace("\\", "") and "B minus A" not in html(at)
    assert session(at).error is None, "it belongs to the page, not to the session"


def test_base_and_plan_are_compared_swapped_and_kept(open_app):
    at = on(solve(pin_everywhere(open_app())), "compare")
    found = document(at)
    assert at.selectbox(key="compare_a").value == f"base plan {found.base.plan_id[:7]}"
    changes = frame(at, "tensor")
    assert list(changes["×"]) == ["×4"] and list(changes["B"]) == ["S(0)R"]
    press(at, "swap")
    assert at.selectbox(key="compare_b").value == f"base plan {found.base.plan_id[:7]}"
    assert list(frame(at, "tensor")["A"]) == ["S(0)R"]
    on(at, "setup")
    on(at, "compare")
    assert at.selectbox(key="compare_b").value == f"base plan {found.base.plan_id[:7]}"


def select_row(at: AppTest, key: str, row: int) -> AppTest:
    at.session_state[key] = {"selection": {"rows": [row], "columns": [], "cells": []}}
    return run(at)


@pytest.mark.parametrize("side, placement", [("A", "S(0)S(1)"), ("B", "S(0)R")])
def test_a_change_is_pinned_to_either_side(open_app, side, placement):
    at = on(solve(pin_everywhere(open_app())), "compare")
    found = document(at)
    select_row(at, f"changes {found.base.plan_id} {found.plan.plan_id}", 0)
    press(at, f"pin_{side}")
    (pin,) = [pin for pin in document(at).history.pins if pin.note.startswith("as in plan")]
    assert "".join(map(str, pin.placements)) == placement and "*" in pin.where


def test_a_change_is_shown_in_the_explorer(open_app):
    at = on(solve(pin_everywhere(open_app())), "compare")
    found = document(at)
    select_row(at, f"changes {found.base.plan_id} {found.plan.plan_id}", 0)
    press(at, "show_change")
    assert at.code[0].value == session(at).selected and session(at).selected.startswith("layers.0.attention.wq/")


def test_a_recipe_becomes_the_base_whose_differences_the_graph_marks(open_app):
    at = on(open_app(), "compare")
    plan = document(at).plan
    press(at, "price_A")
    finish(at)
    press(at, "mark")
    found = document(at)
    assert (
        found.plan is plan and found.base is not None and any(c.describe().startswith("recipe") for c in found.base.constraints)
    )
    assert explorer.overlay(session(at))["base"], "the graph marks what differs"
    assert f"base plan {found.base.plan_id[:7]}" in strip_text(at)
    again = open_app(**{name: str(value) for name, value in at.query_params.items()})
    assert document(again).base.plan_id == found.base.plan_id
    at = on(at, "compare")
    assert at.selectbox(key="compare_a").value.startswith("recipe"), "what was chosen stays"


def solved_twice(at: AppTest) -> tuple[AppTest, Plan]:
    """The second plan is open, its base was solved from the plan that is returned."""
    solve(pin_everywhere(at))
    first = document(at).base
    assert first is not None
    press(at, "clear")
    pin_everywhere(at, "RR")
    return solve(at), first


def test_older_plans_of_the_project_are_offered(open_app):
    at, first = solved_twice(open_app())
    assert first.plan_id != document(at).base.plan_id
    at = choose(on(at, "compare"), "a", f"plan {first.plan_id[:7]}")
    assert "B minus A" in html(at) and not at.error


def test_the_history_says_what_was_solved_from_what_and_keeps_notes(open_app):
    at = view(on(open_app(), "compare"), "History")
    assert "Nothing is stored yet" in texts(at)
    at.text_input(key="author").set_value("Ann")
    run(at)
    at = solve(pin_everywhere(on(at, "explorer")))
    second = document(at).plan
    at = view(on(at, "compare"), "History")
    at.text_input(key=f"plan_note {second.plan_id}").set_value("the one to keep")
    run(at)
    press(at, "save_plan_note")
    table = frame(at, "solved from")
    assert list(table["plan"]) == [second.plan_id[:7], document(at).base.plan_id[:7]]
    assert list(table["solved from"]) == [document(at).base.plan_id[:7], ""]
    assert list(table["by"]) == ["Ann", "Ann"] and list(table[""]) == ["open", ""]
    assert table["note"][0].startswith("the one to keep (Ann, ") and table["step ms"][0] == pytest.approx(
        second.objective_us / 1e3
    )
    first = document(at).base
    select_row(at, "history_2", 1)
    press(at, "open_past")
    assert document(at).plan.plan_id == first.plan_id and document(at).base.plan_id == second.plan_id
    assert document(at).history.pins == ()


def test_a_past_plan_becomes_the_base(open_app):
    at, first = solved_twice(open_app())
    at = view(on(at, "compare"), "History")
    select_row(at, "history_3", list(frame(at, "plan")["plan"]).index(first.plan_id[:7]))
    press(at, "base_past")
    assert document(at).base.plan_id == first.plan_id


def test_a_damaged_draft_is_named_and_the_others_are_listed(open_app, demo):
    at = solve(pin_everywhere(open_app()))
    folder = demo / "projects" / document(at).project / "drafts"
    (folder / "broken.jsonl").write_bytes(b"{\n{}\n")
    at = view(on(at, "compare"), "History")
    assert "draft broken is damaged" in texts(at) and len(frame(at, "solved from")) == 2


def test_a_sweep_fills_its_table_and_opens_a_plan(open_app):
    at = view(on(open_app(), "compare"), "Mesh sweep")
    assert "solves every mesh shape" in texts(at)
    press(at, "sweep")
    until(at, lambda: not session(at).sweep.job.active)
    run(at)
    table = frame(at, "mesh")
    assert len(table) == 5 and list(table["proof"])[-1] == "does not fit" and "not beaten" in set(table["best"])
    select_row(at, "sweep_table_5", 0)
    mesh = table["mesh"][0]
    press(at, "open_mesh")
    assert str(document(at).plan.mesh) == mesh and document(at).base is None
    assert document(at).project in {recent.project for recent in state.workspace().recent()}
    at = view(on(at, "compare"), "Mesh sweep")
    assert len(frame(at, "mesh")) == 5, "the sweep is of the model, not of the mesh"
    view(at, "Plans")
    assert f"mesh {mesh} (sweep)" in at.selectbox(key="compare_a").options


def test_a_sweep_ends_with_its_model(open_app):
    at = view(on(open_app(), "compare"), "Mesh sweep")
    press(at, "sweep")
    found = session(at)
    job, graph = found.sweep.job, small_graph(2)
    plans.open_plan(found, make_plan(graph), graph, None)
    assert found.sweep is None and not job.active and found.others == {}
    assert "solves every mesh shape" in texts(run(at))


def test_other_hardware_is_priced_and_solved_without_touching_the_plan(open_app):
    at = view(on(open_app(), "compare"), "Hardware what-if")
    assert at.button(key="what_if").disabled, "it is the hardware of the plan"
    at.selectbox(key="what_if_machine").set_value("h200")
    run(at)
    assert "memory.hbm_bytes" in set(frame(at, "constant")["constant"])
    before = document(at)
    press(at, "what_if")
    finish(at)
    assert list(frame(at, "hardware")["hardware"]) == ["h100_sxm", "h200", "h200"] and document(at) is before
    view(at, "Plans")
    label = f"plan {before.plan.plan_id[:7]} as it is on h200"
    choose(at, "a", label)
    assert "different hardware" in texts(at).replace("\\", "")
    view(at, "Hardware what-if")
    press(at, "open_what_if")
    assert document(at).plan.hardware_name == "h200"


def test_changed_numbers_are_priced_and_marked_in_every_result(open_app):
    at = view(on(open_app(), "compare"), "Hardware what-if")
    field = at.number_input(key="what_if_link h100_sxm")
    assert field.value == 450 and "datasheet" not in field.label
    field.set_value(900.0)
    at.number_input(key="what_if_memory h100_sxm").set_value(40.0)
    run(at)
    changed = set(frame(at, "constant")["constant"])
    assert {"node.link_bytes_per_s", "memory.usable_bytes"} <= changed and "fabric.nic_bytes_per_s" not in changed
    press(at, "what_if")
    finish(at)
    name = "h100_sxm@link=2,memory=0.5"
    assert list(frame(at, "hardware")["hardware"]) == ["h100_sxm", name, name]
    assert list(frame(at, "hardware")["changed fields"]) == ["none", *["link ×2, memory ×0.5"] * 2]
    press(at, "open_what_if")
    assert document(at).plan.hardware_name == name
    assert any("with link ×2, memory ×0.5" in item.body for item in at.get("html")), "in the strip"
    view(on(at, "compare"), "Hardware what-if")
    assert at.number_input(key="what_if_link h100_sxm").value == 900, "kept"


# ---- Export -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format, name, words",
    [("Plan JSON", ".plan.json", '"schema"'),  ("Slurm file", ".sbatch", "#SBATCH"),
     ("Op table CSV", ".csv", "key,placement")],
)  # fmt: skip
def test_every_format_has_a_preview_and_a_download(open_app, format, name, words):
    at = on(open_app(), "export")
    at.button_group(key="export_format").set_value(format)
    run(at)
    assert words in at.code[0].value and len(at.code[0].value.splitlines()) <= 40
    (button,) = at.get("download_button")
    assert button.label.endswith(name) and "llama3-tiny" in button.label


def test_the_report_is_shown_as_it_looks(open_app):
    at = on(open_app(), "export")
    at.button_group(key="export_format").set_value("HTML report")
    run(at)
    (shown,) = at.get("iframe")
    assert shown.proto.src.startswith("data:text/html")
    packed = shown.proto.src.partition("base64,")[2]
    assert "fits, 72.0 GiB free" in base64.b64decode(packed).decode()
    (button,) = at.get("download_button")
    assert button.label.endswith(".html")


def test_the_script_is_checked_before_it_is_handed_out(open_app):
    at = on(open_app(), "export")
    assert not at.get("download_button")
    press(at, "export_start")
    finish(at)
    assert [button.label for button in at.get("download_button")] == ["Download train.py", "Download train.plan.json"]
    assert "PASS" in html(at) and "print('train')" in at.code[0].value


def test_a_plan_that_is_no_recipe_of_modules_says_why(open_app):
    at = on(open_app(), "export")
    at.button_group(key="export_format").set_value("Recipe")
    run(at)
    assert "approximate: DTensor and FSDP choose" in texts(at) and "cannot be said as a recipe" in texts(at)
    assert "is moved from S(0) to R on dp" in html(at), html(at)[-900:]
    assert not at.get("download_button") and not [button for button in at.button if button.key == "export_start"]


def test_a_recipe_is_offered_beside_the_script(open_app, monkeypatch):
    monkeypatch.setattr("planner.pipeline.not_expressible", lambda plan, graph: ())
    at = on(open_app(), "export")
    at.button_group(key="export_format").set_value("Recipe")
    press(run(at), "export_start")
    finish(at)
    assert [button.label for button in at.get("download_button")] == ["Download recipe.py", "Download recipe.plan.json"]
    at.button_group(key="export_format").set_value("Training script")
    assert not run(at).get("download_button"), "the recipe is not the script"


def test_an_unproved_plan_is_marked(open_app):
    at = on(solve(pin_everywhere(open_app(), reason="slow proof")), "export")
    assert any("Not proven optimal" in warning.value for warning in at.warning)
    press(at, "stop_proof")


def upload(at: AppTest, data: bytes) -> AppTest:
    at.file_uploader(key="plan_file").upload("plan.json", data, "application/json")
    return run(at)


def test_a_plan_file_of_the_open_model_becomes_a_draft_with_the_open_plan_as_base(open_app):
    at = on(open_app(), "export")
    before = document(at).plan
    other = make_plan(small_graph(), MESH, pin_of("layers.*.attention.wq=RR"))
    upload(at, other.dumps().encode())
    press(at, "open_file")
    found = document(at)
    assert (found.plan.plan_id, found.base.plan_id) == (other.plan_id, before.plan_id) and found.history.pins == other.pins
    assert "stale" not in strip_text(at)
    again = open_app(**{name: str(value) for name, value in at.query_params.items()})
    assert document(again).plan.plan_id == other.plan_id


def pin_of(written: str):
    return (Pin.parse(written, MESH),)


def test_a_plan_file_of_another_model_is_refused_with_its_name(open_app):
    at = on(open_app(), "export")
    before = document(at)
    upload(at, make_plan(small_graph(2)).dumps().encode())
    press(at, "open_file")
    assert any("not traced in this workspace" in error.value for error in at.error) and document(at) is before


@pytest.mark.parametrize("data", [b"{", b"[]", json.dumps({"schema": 1}).encode()])
def test_a_file_that_is_no_plan_is_an_error_on_the_page(open_app, data):
    at = upload(on(open_app(), "export"), data)
    assert at.error and not [button for button in at.button if button.key == "open_file"]


def test_a_plan_file_finds_its_graph_in_the_workspace(open_app):
    at = pin_everywhere(open_app())  # now the project is in the workspace
    plan = document(at).plan
    found = session(at)
    graph = small_graph(2)
    plans.open_plan(found, make_plan(graph), graph, None)
    at = on(at, "export")
    upload(at, plan.dumps().encode())
    press(at, "open_file")
    assert document(at).plan.plan_id == plan.plan_id
