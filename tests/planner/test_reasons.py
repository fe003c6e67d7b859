"""Overrides, explanations and relaxations, against planning with the pin."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from planner.cli import main
from planner.constraint import Constraint, ForbidCollective, MemoryBudget, Pin, SamePlacement
from planner.errors import InfeasibleError, InvalidConstraintError
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.placement import parse
from planner.plan import Plan
from planner.reasons import Override
from planner.workbench import Workbench

MESH = Mesh.parse("dp=2,tp=4")
WQ = "layers.1.attention.wq/linear/fwd#0"
SAME = 3e-6
"""Two proved optima of one problem differ by at most twice the tolerance of a proof."""


@pytest.fixture(scope="module")
def graph() -> JointGraph:
    return trace(ModelRequest(model="llama3-tiny", layers=2, batch=8))


@pytest.fixture(scope="module")
def bench(graph: JointGraph) -> Workbench:
    return Workbench.build(graph, MESH)


@pytest.fixture(scope="module")
def plan(bench: Workbench) -> Plan:
    return bench.solve(bench.default_constraints())


def with_pin(bench: Workbench, constraints: tuple[Constraint, ...], where: str, row: Override) -> Plan | None:
    """The plan that a user gets who pins it; None if there is none."""
    try:
        return Workbench(bench.costs, bench.hardware, bench.solver).solve(
            (*constraints, Pin(where=where, placements=row.placements))
        )
    except InfeasibleError:
        return None


@pytest.mark.parametrize(
    "extra",
    [
        (),
        (Pin(where="layers.*.attention.wk", placements=parse("S(0)S(2)")),),
        (ForbidCollective(collective="all_reduce", axis="tp"),),
        (SamePlacement(where="layers.*.attention.wq"),),
    ],
    ids=["free", "pinned layers", "forbidden collective", "tied layers"],
)
def test_overrides_are_what_pinning_gives(bench: Workbench, extra: tuple[Constraint, ...]) -> None:
    constraints = (*bench.default_constraints(), *extra)
    free = bench.solve(constraints)
    for key in (WQ, "param:layers.0.feed_forward.w1.weight"):
        where = key.removeprefix("param:")
        rows = bench.overrides(key, constraints=constraints, exact=None)
        assert {row.placements for row in rows} >= set(bench.legal(key)) or extra
        assert [row.chosen for row in rows].count(True) == 1
        for row in rows:
            planned = with_pin(bench, constraints, where, row)
            if planned is None:
                assert row.status == "infeasible"
                continue
            assert row.certified and planned.report.status == "optimal", row
            assert row.objective_us == pytest.approx(planned.objective_us, rel=SAME)
            assert row.delta_us is not None and row.delta_us >= -SAME * free.objective_us
            if row.chosen:
                assert row.objective_us == pytest.approx(free.objective_us, rel=SAME)
        values = [row.objective_us for row in rows if row.objective_us is not None]
        assert values == sorted(values)


def test_overrides_under_a_tight_budget_are_honest(bench: Workbench) -> None:
    """Not all can be proved at once: what is said to be between bound and objective is so for the plan with the pin too."""
    constraints = (*bench.default_constraints(), MemoryBudget(num_bytes=24 * 2**20))
    rows = bench.overrides(WQ, constraints=constraints)
    assert any(row.objective_us is not None for row in rows)
    for row in rows[::8]:
        planned = bench.solve((*constraints, Pin(where=WQ, placements=row.placements)), exact=False)
        assert row.objective_us is not None and row.bound_us is not None and row.peak_bytes is not None
        assert row.peak_bytes <= 24 * 2**20
        assert row.bound_us <= planned.objective_us * (1 + SAME)
        assert planned.report.bound_us <= row.objective_us * (1 + SAME)
        assert row.certified == (row.gap <= 1e-6)


def test_an_override_takes_the_place_of_the_pin_on_that_tensor(bench: Workbench) -> None:
    constraints = bench.default_constraints()
    best = bench.overrides(WQ, constraints=constraints)
    worst = best[-1].placements
    pinned = bench.overrides(WQ, constraints=(*constraints, Pin(where=WQ, placements=worst)))
    assert {row.placements: row.objective_us for row in pinned} == pytest.approx(
        {row.placements: row.objective_us for row in best}, rel=SAME
    )
    assert next(row for row in pinned if row.chosen).placements == worst
    assert pinned[0].delta_us is not None and pinned[0].delta_us < 0


def test_overrides_of_all_layers_and_of_another_output(bench: Workbench) -> None:
    constraints = bench.default_constraints()
    where = "layers.*.attention.wq"
    for row in bench.overrides(where, constraints=constraints, exact=None)[::5]:
        planned = with_pin(bench, constraints, where, row)
        assert planned is not None and row.objective_us == pytest.approx(planned.objective_us, rel=SAME)
    several = next(n for n in bench.graph.nodes if len([m for m in n.outputs if m is not None]) > 1)
    rows = bench.overrides(several.key, 1, constraints)
    assert {row.placements for row in rows} == set(bench.legal(several.key, 1))
    with pytest.raises(InvalidConstraintError):
        bench.overrides(WQ, 1, constraints)


def test_rows_are_told_and_a_cancelled_table_has_no_answers_it_did_not_find(bench: Workbench) -> None:
    told: list[Override] = []
    constraints = bench.default_constraints()
    rows = bench.overrides(WQ, constraints=constraints, row=told.append)
    assert len(told) == len(rows) == len(bench.legal(WQ))
    seen: list[Override] = []
    partly = bench.overrides(WQ, constraints=constraints, row=seen.append, cancelled=lambda: len(seen) >= 3)
    assert any(row.status == "time_limit" and row.objective_us is None for row in partly)


# ---- why not ----------------------------------------------------------------------------------------------------------
def test_terms_add_up_to_the_difference_of_the_plans(bench: Workbench, plan: Plan) -> None:
    keys = [WQ, "layers.0.feed_forward.w2/linear/fwd#0", "param:layers.1.attention.wo.weight", "layers.*.feed_forward.w1"]
    verdicts = set()
    for key in keys:
        legal = bench.legal(key) if "*" not in key else bench.legal("layers.0.feed_forward.w1/linear/fwd#0")
        for placements in legal[::3]:
            found = bench.explain(plan, key, placements)
            verdicts.add(found.verdict)
            if found.verdict in ("chosen", "unavailable"):
                continue
            delta = found.override.delta_us
            assert delta is not None
            assert math.fsum(t.us for t in found.terms) == pytest.approx(delta, abs=1e-6 * plan.objective_us)
            assert found.here_us + found.elsewhere_us == pytest.approx(delta, abs=1e-6 * plan.objective_us)
            assert sum(dict(found.memory).values()) == found.override.delta_bytes
            assert all(term.count >= 1 and term.before != term.after for term in found.terms)
    assert {"dearer here", "dearer elsewhere"} & verdicts


def test_verdicts(bench: Workbench, plan: Plan) -> None:
    now = plan.choices[WQ].outputs[0]
    assert now is not None
    assert bench.explain(plan, WQ, now).verdict == "chosen"
    other = next(p for p in bench.legal(WQ) if p != now)
    constraints = (*bench.default_constraints(), Pin(where=WQ, placements=other))
    forced = bench.solve(constraints)
    back = bench.explain(forced, WQ, now)
    assert back.verdict == "cheaper" and back.replaces == (constraints[-1].describe(),)
    assert back.override.objective_us == pytest.approx(plan.objective_us, rel=SAME)


@pytest.mark.parametrize(
    ("placements", "kind", "words"),
    [
        ("S(3)R", "rule", "dim 3 does not exist"),
        ("P(max)R", "rule", "P is not produced"),
    ],
)
def test_unavailable_by_rule(bench: Workbench, plan: Plan, placements: str, kind: str, words: str) -> None:
    found = bench.explain(plan, WQ, parse(placements))
    assert found.verdict == "unavailable" and found.override.status == "infeasible"
    assert [reason.kind for reason in found.reasons] == [kind] and words in found.reasons[0].text


def test_unavailable_by_divisibility_names_sizes_that_work() -> None:
    bench = Workbench.build(trace(ModelRequest(model="llama3-tiny", layers=1, batch=6)), Mesh.parse("a=4,b=2"))
    plan = bench.solve(bench.default_constraints())
    found = bench.explain(plan, "layers.0.attention.wq/linear/fwd#0", parse("S(0)R"))
    assert found.verdict == "unavailable" and found.reasons[0].kind == "divisibility"
    assert "does not divide over a=4" in found.reasons[0].text and "4, 8" in found.reasons[0].text
    assert "sizes of the axis that work: 3, 6" in found.reasons[0].text


def test_unavailable_by_constraint_says_what_giving_it_up_brings(bench: Workbench) -> None:
    pin = Pin(where="layers.*.attention.wq", placements=parse("RS(2)"))
    plan = bench.solve((*bench.default_constraints(), pin))
    found = bench.explain(plan, WQ, parse("S(0)R"))
    assert found.verdict == "unavailable" and found.override.conflicts == (pin.describe(),)
    assert [reason.kind for reason in found.reasons] == ["constraint"] and pin.describe() in found.reasons[0].text
    without = next(r for r in found.relaxations if r.constraint == pin.describe())
    expected = bench.solve((*bench.default_constraints(), Pin(where=WQ, placements=parse("S(0)R"))))
    assert without.objective_us == pytest.approx(expected.objective_us, rel=SAME)


def test_unavailable_by_budget(bench: Workbench) -> None:
    whole = Pin(where="**.weight", placements=parse("RR"))
    needed = bench.solve((*bench.default_constraints(), whole)).memory.peak_bytes
    free = bench.solve(bench.default_constraints())
    least = (free.memory.peak_bytes + needed) // 2
    plan = bench.solve((*bench.default_constraints(least),))
    found = bench.explain(plan, "**.weight", parse("RR"))
    if found.verdict == "unavailable":
        assert found.reasons[0].kind == "budget"
        assert any(r.constraint.startswith("memory budget") and r.objective_us is not None for r in found.relaxations)
    else:
        assert found.override.peak_bytes is not None and found.override.peak_bytes <= least


def test_local_prices_agree_with_the_plan_and_with_the_solver(bench: Workbench, plan: Plan) -> None:
    """Of the plan's own placement the local price is what the plan pays there; switching one op alone is never cheaper than the
    best plan with that placement."""
    prices = {price.placements: price for price in bench.local_prices(plan, WQ)}
    now = plan.choices[WQ].outputs[0]
    assert now is not None and set(prices) == set(bench.legal(WQ)) and prices[now].chosen
    assert prices[now].compute_us == pytest.approx(plan.choices[WQ].compute_us)
    rows = {row.placements: row for row in bench.overrides(WQ, constraints=plan.constraints)}
    for placements, price in prices.items():
        total, here = price.total_us, prices[now].total_us
        if total is not None and here is not None and rows[placements].delta_us is not None:
            assert rows[placements].delta_us <= total - here + SAME * plan.objective_us  # type: ignore[operator]
    with pytest.raises(InvalidConstraintError, match="matches 2 tensors"):
        bench.local_prices(plan, "layers.*.attention.wq")


# ---- conflicts --------------------------------------------------------------------------------------------------------
def test_relaxations_of_a_conflict(bench: Workbench) -> None:
    clash = (Pin(where=WQ, placements=parse("RR")), Pin(where="layers.*.attention.wq", placements=parse("S(0)R")))
    constraints = (*bench.default_constraints(), Pin(where="layers.0.attention.wk", placements=parse("S(0)R")), *clash)
    with pytest.raises(InfeasibleError) as refused:
        bench.solve(constraints)
    assert set(refused.value.conflicts) == {c.describe() for c in clash}
    found = bench.relaxations(constraints, refused.value.conflicts)
    assert found == bench.relaxations(constraints)
    assert {r.constraint for r in found} == {c.describe() for c in clash}
    for relaxation, given_up in ((r, next(c for c in clash if c.describe() == r.constraint)) for r in found):
        rest = bench.solve([c for c in constraints if c != given_up])
        assert relaxation.objective_us == pytest.approx(rest.objective_us, rel=SAME)
    values = [r.objective_us for r in found]
    assert values == sorted(v for v in values if v is not None)
    assert bench.relaxations(bench.default_constraints()) == ()


def test_two_conflicts_at_once_are_still_impossible_after_one_is_given_up(bench: Workbench) -> None:
    first = [Pin(where=WQ, placements=parse(p)) for p in ("RR", "S(0)R")]
    second = [Pin(where="layers.0.attention.wk", placements=parse(p)) for p in ("RR", "S(0)R")]
    found = bench.relaxations((*bench.default_constraints(), *first, *second))
    assert len(found) == 2 and all(r.status == "infeasible" and len(r.conflicts) == 2 for r in found)


# ---- command ----------------------------------------------------------------------------------------------------------
def test_explain_command(graph: JointGraph, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.save(tmp_path / "plan.json")
    graph.save(tmp_path / "graph.json.gz")
    asked = ["explain", str(tmp_path / "plan.json"), "--graph", str(tmp_path / "graph.json.gz"), "--at", WQ]
    assert main([*asked, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["overrides"][0]["chosen"] and len(table["local"]) == len(table["overrides"])
    assert main(asked) == 0
    assert "if pinned to" in capsys.readouterr().out
    assert main([*asked, "--placement", "RR", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert np.isclose(sum(term["us"] for term in found["terms"]), found["override"]["delta_us"])
    assert main([*asked, "--placement", "RR"]) == 0
    assert "Why not RR?" in capsys.readouterr().out
    for bad, words in ((["--placement", "S(9)R"], "dim 9 does not exist"),):
        assert main([*asked, *bad]) == 0
        assert words in capsys.readouterr().out
    assert main([*asked[:-1], "nothing.here"]) == 2
    assert "hint: Nearest" in capsys.readouterr().err
    assert main([*asked, "--placement", "RRR"]) == 2
