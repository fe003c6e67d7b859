"""The engine's answers on the real planner: rows as they come, the same as those returned; conflicts; an early end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from app.engine import OpenSpec, PlannerEngine, Progress
from app.view_models import prices
from planner import InfeasibleError, Mesh, ModelRequest, Pin
from planner.placement import parse

MESH = Mesh.parse("dp=2,tp=2")
WQ = "layers.0.attention.wq/linear/fwd#0"


@pytest.fixture(scope="module")
def engine() -> PlannerEngine:
    spec = OpenSpec(request=ModelRequest(model="llama3-tiny", layers=2), mesh=MESH, hardware="h100_sxm", checkpoint="none")
    return PlannerEngine(spec, Progress(lambda message: None))


def test_prices_explanations_and_local_prices_agree(engine: PlannerEngine) -> None:
    told: list[tuple[str, Any]] = []
    progress = Progress(told.append)
    plan = engine.solve(progress, (), None, 60.0, None)
    found = engine.overrides(progress, WQ, plan.constraints, plan.checkpointed)
    assert {override.placements for override in found} == set(engine.legal(progress, WQ))
    assert {value.placements for kind, value in told if kind == "row"} == {override.placements for override in found}
    dearest = max((o for o in found if o.delta_us is not None), key=lambda o: o.delta_us or 0.0)
    why = engine.explain(progress, plan, WQ, dearest.placements)
    assert why.override.objective_us == pytest.approx(dearest.objective_us, rel=1e-3) and prices.why(why).terms
    assert sum(price.chosen for price in engine.local_prices(progress, plan, WQ)) == 1


def test_an_answer_that_is_not_wanted_ends_early(engine: PlannerEngine) -> None:
    plan = engine.solve(Progress(lambda message: None), (), None, 60.0, False)
    start = time.monotonic()
    found = engine.overrides(Progress(lambda message: None, lambda: True), WQ, plan.constraints, plan.checkpointed)
    assert {override.status for override in found if not override.chosen} == {"time_limit"} and time.monotonic() - start < 30


def test_each_member_of_a_conflict_is_tried_without(engine: PlannerEngine) -> None:
    told: list[tuple[str, Any]] = []
    progress = Progress(told.append)
    one, other = Pin(where="layers.0.attention.wq", placements=parse("RR")), Pin(where=WQ, placements=parse("S(0)R"))
    with pytest.raises(InfeasibleError) as raised:
        engine.solve(progress, (one, other), None, 60.0, False)
    assert set(raised.value.conflicts) == {one.describe(), other.describe()}
    found = engine.give_up(progress, (one, other), None, tuple(raised.value.conflicts))
    assert {r.constraint for r in found} == set(raised.value.conflicts) and all(r.objective_us for r in found)
    assert sorted(value.constraint for kind, value in told if kind == "row") == sorted(r.constraint for r in found)
    for relaxation, kept in ((r, other if r.constraint == one.describe() else one) for r in found):
        solved = engine.solve(progress, (kept,), None, 60.0, False)
        assert relaxation.objective_us == pytest.approx(solved.objective_us, rel=1e-2)
