"""Kinds of demands, prices of overrides, why (not), and conflicts on the Explorer page, and their rows as units."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.components import answers as html
from app.view_models import demands, pins, prices
from planner import Allow, Explanation, Forbid, ForbidCollective, Override, Recipe, Relaxation, ReshardAfterForward
from planner.placement import parse
from planner.reasons import Reason, Term
from tests.app.conftest import run
from tests.app.synthetic import MESH, WQ, make_plan, small_graph
from tests.app.test_pages import address, click, document, pin_everywhere, placements, press, scope, session, solve, until

GRAPH = small_graph()
WO = "layers.0.attention.wo/linear/fwd#0"


def override(text: str, delta_us: float | None, **more) -> Override:
    known = {"objective_us": 1e6 + (delta_us or 0), "bound_us": 1e6 + (delta_us or 0), "delta_us": delta_us, "delta_bytes": 0}
    return Override(placements=parse(text), **{"status": "optimal", **(known if delta_us is not None else {}), **more})


# ---- rows ---------------------------------------------------------------------------------------------------------------


def test_known_prices_come_first_then_those_that_are_awaited_then_the_impossible():
    found = (
        override("RR", 1100.0, delta_bytes=2 * 2**30), override("S(0)R", 0.0, chosen=True),
        override("S(1)R", None, status="infeasible", conflicts=("pin x = RR",)),
    )  # fmt: skip
    rows = prices.price_rows(found, ("RR", "S(0)R", "S(1)R", "RS(0)"))
    assert [row.placement for row in rows] == ["S(0)R", "RR", "RS(0)", "S(1)R"]
    assert (rows[0].step, rows[0].note, rows[0].now) == ("±0", "now", True)
    assert (rows[1].step, rows[1].memory) == ("+1.10 ms", "+2.00 GiB")
    assert rows[2].step == "" and "cannot be together with pin x = RR" in rows[3].note


def test_the_cheapest_the_one_now_and_the_picked_one_stay_in_sight():
    rows = tuple(prices.PriceRow(placement=f"p{n}", now=n == 11) for n in range(20))
    shown, folded = prices.first_rows(rows, "p15")
    assert [row.placement for row in shown] == [*(f"p{n}" for n in range(8)), "p11", "p15"]
    assert len(shown) + len(folded) == 20
    assert prices.first_rows(rows[:9], "p0") == (rows[:9], ())


def test_a_price_that_is_not_proved_is_a_range_and_a_better_answer_replaces_it():
    open_price = override("RR", 1300.0, status="feasible", bound_us=1e6 + 900.0)
    assert prices.price_rows((open_price,), ())[0].step == "+0.90 ms to +1.30 ms"
    assert [row.step for row in prices.price_rows((open_price, override("RR", 1200.0)), ())] == ["+1.20 ms"]


def test_what_was_not_settled_is_not_called_impossible():
    assert prices.price_rows((override("RR", None, status="time_limit"),), ())[0].note == "not settled in time"


@pytest.mark.parametrize("us, text", [(0.0, "±0"), (35.0, "+35 µs"), (-3.25, "-3.2 µs"), (-1100.0, "-1.10 ms")])
def test_times_have_a_sign_and_a_unit(us, text):
    assert prices.time_text(us) == text


@pytest.mark.parametrize("num_bytes, text", [(0, "±0"), (-100, "-100 B"), (2**31, "+2.00 GiB"), (-12 * 2**20, "-12 MiB")])
def test_memory_has_a_sign_and_a_unit(num_bytes, text):
    assert prices.memory_text(num_bytes) == text


def explanation(verdict: str, **more) -> Explanation:
    return Explanation(
        **{"where": "x", "count": 32, "chosen": (parse("RR"),), "asked": parse("S(0)R"), "verdict": verdict,
           "override": override("S(0)R", 1500.0), **more}
    )  # fmt: skip


def test_the_parts_of_a_difference_are_listed_and_what_is_left_out_is_summed():
    terms = tuple(
        Term(what="compute", key=f"op{n}", phase="forward", count=n + 1, us=100.0, before="RR", after="S(0)R", here=n == 0)
        for n in range(prices.MOST_TERMS + 2)
    )  # fmt: skip
    found = prices.why(explanation("dearer elsewhere", terms=terms, memory=(("activation_bytes", 2**30), ("buffer_bytes", 0))))
    assert found.sentences[0] == "The best plan with S(0)R (32 tensors) takes +1.50 ms: +100 µs here, +900 µs elsewhere."
    assert found.sentences[1] == "Memory per device: activation +1.00 GiB."
    assert len(found.terms) == prices.MOST_TERMS and found.rest == "2 smaller parts: +200 µs together"


def test_parts_too_small_to_matter_have_no_row():
    part = {"what": "compute", "phase": "forward", "count": 1, "before": "RR", "after": "RR", "here": False}
    terms = (Term(key="a", us=30_000.0, **part), Term(key="b", us=3.0, **part))
    found = prices.why(explanation("dearer elsewhere", terms=terms))
    assert [row.us for row in found.terms] == ["+30.00 ms"] and found.rest == "1 smaller part: +3.0 µs together"


def test_every_verdict_is_a_sentence():
    assert "cannot be had here (32 tensors): 7 does not divide" in _sentence(
        "unavailable", reasons=(Reason("rule", "7 does not divide"),)
    )
    assert "as good" in _sentence("tie") and "Pin it" in _sentence("cheaper") and "has S(0)R here" in _sentence("chosen")


def _sentence(verdict: str, **more) -> str:
    return prices.why(explanation(verdict, **more)).sentences[0]


def test_giving_up_says_what_it_brings_or_what_is_still_in_the_way():
    plan = make_plan(GRAPH)
    better = Relaxation(constraint="pin x = RR", status="optimal", objective_us=plan.objective_us - 50.0, peak_bytes=2**30)
    assert "(-50 µs against the plan shown), 1.0 GiB" in prices.gain_text(better, plan)
    assert "still in the way: pin y" in prices.gain_text(Relaxation(constraint="x", status="infeasible", conflicts=("pin y",)))
    assert prices.gain_text(Relaxation(constraint="x", status="time_limit")) == "not settled in time"


def test_names_in_answers_never_become_markup():
    hostile = "<img src=x onerror=alert(1)>"
    row = prices.TermRow(us=hostile, what=hostile, key=hostile, count=2, before=hostile, after=hostile, here=True)
    for text in (html.why(prices.Why(sentences=(hostile,), terms=(row,), rest=hostile)),
                 html.price_table((prices.PriceRow(placement="RR", note=hostile),))):  # fmt: skip
        assert "<img" not in text


def test_a_selection_of_several_means_the_same_thing_at_each():
    own, weight = pins.targets(GRAPH, WQ)
    assert pins.same_of_group(GRAPH, own, WQ, (WO, WQ)) == ("layers.0.attention.wq", "layers.0.attention.wo")
    assert pins.same_of_group(GRAPH, weight, WQ, (WO, "layers.0/add/fwd#0")) == (
        "layers.0.attention.wq.weight", "layers.0.attention.wo.weight",
    )  # fmt: skip


def test_recipes_say_what_each_axis_is_for_or_why_they_cannot_be():
    assert demands.recipe_text("fsdp_tp_sp", ("dp", "tp"), MESH) == "Uses dp for fsdp, tp for sequence."
    assert "tp stays free" in demands.recipe_text("fsdp", ("dp",), MESH)
    assert "needs at least 2 mesh axes" in demands.recipe_problem("hsdp", ("dp",), MESH)
    assert set(demands.RECIPE_NAMES) == set(demands.recipe_names())


# ---- on the page --------------------------------------------------------------------------------------------------------


def kind(at, value: str):
    at.button_group(key="kind layers.0.attention.wq").set_value(value)
    return run(at)


def several(at, value: str, *texts: str):
    next(g for g in at.button_group if (g.key or "").startswith(f"{value} ")).set_value(list(texts))
    return run(at)


@pytest.mark.parametrize("name, cls", [("Allow", Allow), ("Forbid", Forbid)])
def test_several_placements_are_allowed_or_forbidden_in_all_layers(open_app, name, cls):
    at = kind(click(open_app(), WQ), name)
    several(at, name.lower(), "RR", "S(0)R")
    scope(at, "all layers")
    next(field for field in at.text_input if field.label == "Reason").set_value("kernel")
    run(at)
    assert at.button(key="pin").label == f"{name} 4"
    press(at, "pin")
    (found,) = document(at).history.pins
    assert found.note.startswith("kernel (")
    assert replace(found, note="") == cls(where="layers.*.attention.wq", options=(parse("RR"), parse("S(0)R")))
    solve(at)
    assert demands.of_plan(document(at).plan) == (found,)


def test_nothing_can_be_forbidden_before_something_is_picked(open_app):
    assert kind(click(open_app(), WQ), "Forbid").button(key="pin").disabled


def test_a_recipe_and_a_collective_are_added_and_undone(open_app):
    at = open_app()
    at.selectbox(key="recipe").set_value("fsdp_tp_sp")
    run(at)
    press(at, "add_recipe")
    at.selectbox(key="collective").set_value("all_to_all")
    run(at)
    press(at, "add_collective")
    assert document(at).history.pins == (
        Recipe(name="fsdp_tp_sp", axes=("dp", "tp")), ForbidCollective(collective="all_to_all", axis="dp"),
    )  # fmt: skip
    press(at, "undo")
    assert len(document(at).history.pins) == 1


def test_what_becomes_of_gathered_parameters_is_demanded(open_app):
    at = open_app()
    at.checkbox(key="recipe_keeps").check()
    run(at)
    press(at, "add_recipe")
    press(at, "add_reshard")
    at.selectbox(key="reshard").set_value("never")
    run(at)
    press(at, "add_reshard")
    recipe, reshard = document(at).history.pins
    assert recipe.may_keep and reshard == ReshardAfterForward(when="never"), "the later one replaces the earlier"
    solve(at)
    assert demands.of_plan(document(at).plan) == (recipe, reshard)


def test_a_recipe_that_the_mesh_cannot_have_says_why(open_app):
    at = open_app()
    at.selectbox(key="recipe").set_value("hsdp")
    at.button_group(key="recipe_axes").set_value(["dp"])
    run(at)
    assert at.button(key="add_recipe").disabled and any("at least 2 mesh axes" in caption.value for caption in at.caption)


def test_pins_apply_to_all_that_are_selected(open_app):
    at = click(open_app(), WQ, WO)
    assert at.button(key="pin").label == "Pin 2"
    press(at, "pin")
    assert {pin.where for pin in document(at).history.pins} == {"layers.0.attention.wq", "layers.0.attention.wo"}
    press(at, "undo")
    assert document(at).history.pins == ()


def page_html(at) -> str:
    return " ".join(item.body for item in at.get("html"))


def priced(at):
    return until(at, lambda: "cannot be together" in page_html(at))


def test_the_price_of_every_override_is_listed(open_app):
    at = priced(click(open_app(), WQ))
    text = page_html(at)
    assert "<b>now</b>" in text and "+0.70 ms" in text and "+1.00 GiB" in text and "pin other = RR" in text


def test_prices_are_asked_once_and_again_for_all_layers(open_app):
    at = priced(click(open_app(), WQ))
    asked = [key for key in session(at).questions if key[0] == "overrides"]
    assert len(asked) == 1
    run(at)
    assert len(session(at).questions) == 1
    scope(at, "all layers")
    assert "layers.*.attention.wq" in {key[2] for key in session(at).questions}


def test_prices_stop_when_the_selection_moves_on_and_when_something_is_solved(open_app):
    at = click(solve(pin_everywhere(open_app(), reason="slow prices")), WO)
    until(at, lambda: any(job.rows for job in session(at).questions.values()))
    (first,) = [job for key, job in session(at).questions.items() if key[2] == WO]
    click(at, WQ)
    assert first.state == "cancelled" and len(first.rows) == 1
    until(at, lambda: any(job.state == "running" for job in session(at).questions.values()))
    press(at, "clear")
    solve(at)
    assert document(at).history.pins == () and document(at).base is not None


def test_why_not_takes_the_difference_apart(open_app):
    at = click(open_app(), WQ)
    placements(at).set_value("RR")
    run(at)
    assert at.button(key="why").label == "Why not RR?"
    press(at, "why")
    until(at, lambda: "elsewhere" in page_html(at))
    text = page_html(at)
    assert "The best plan with RR takes +350 µs: +400 µs here, -50 µs elsewhere." in text and "×4" in text


def test_why_this_lists_what_each_placement_costs_at_the_op(open_app):
    at = click(open_app(), WQ)
    assert at.button(key="why").label == "Why this?"
    press(at, "why")
    until(at, lambda: "total µs" in page_html(at))
    click(at, WO)
    assert session(at).why is None and "total µs" not in page_html(at)


def test_a_conflict_names_its_members_what_each_would_bring_and_removes_one(open_app):
    at = solve(pin_everywhere(open_app(), reason="infeasible"))
    until(at, lambda: "a step of 5.00 ms" in page_html(at))
    assert "<b>pin</b>" in page_html(at) and "against the plan shown" in page_html(at)
    press(at, "give_up_0")
    until(at, lambda: session(at).running is None)
    assert document(at).history.pins == () and session(at).error is None
    press(at, "undo")
    assert len(document(at).history.pins) == 1


def test_a_budget_in_a_conflict_is_raised_and_the_draft_remembers(open_app):
    at = pin_everywhere(open_app(), reason="over budget")
    session(at).document = replace(document(at), memory_bytes=40 * 2**30)
    solve(at)
    press(at, "raise_budget")
    until(at, lambda: session(at).running is None)
    assert document(at).memory_bytes == 41 * 2**30 and session(at).error is None
    assert document(open_app(**address(at))).memory_bytes == 41 * 2**30


def test_a_budget_is_not_raised_above_what_a_device_has(open_app):
    at = solve(pin_everywhere(open_app(), reason="over budget"))
    assert any("A device leaves 77.0 GiB" in caption.value for caption in at.caption)
    assert not [button for button in at.button if button.key == "raise_budget"]
