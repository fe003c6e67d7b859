"""What a worker answers to "compared with what?", by the real planner on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine import OpenSpec, PlannerEngine, Progress
from app.view_models import compare
from app.view_models.other_plans import recipe_labels
from planner import InvalidConstraintError, MemoryBudget, Mesh, ModelRequest, Plan, Recipe
from planner.sweep import SweepRequest

MESH = Mesh.parse("dp=2,tp=2")
MODEL = ModelRequest(model="llama3-tiny", layers=1, batch=4)
Sent = list[tuple[str, Any]]


@pytest.fixture(scope="module")
def opened() -> tuple[PlannerEngine, Progress, Sent, Plan]:
    sent: Sent = []
    progress = Progress(sent.append)
    engine = PlannerEngine(OpenSpec(request=MODEL, mesh=MESH, hardware="h100_sxm", checkpoint="none"), progress)
    return engine, progress, sent, engine.solve(progress, (), None, 30.0, False)


def test_a_recipe_is_a_plan_with_the_same_inputs_that_is_no_better(opened) -> None:
    engine, progress, _, free = opened
    plan = engine.recipe(progress, "fsdp_tp_sp", None, 30.0)
    assert Recipe(name="fsdp_tp_sp", axes=("dp", "tp")) in plan.constraints
    assert plan.objective_us >= free.report.bound_us * (1 - 1e-9) and compare.refusal(plan, free) == ""
    total = sum(row.us for row in compare.by_module(plan, free))
    assert total == pytest.approx(free.objective_us - plan.objective_us, abs=1e-3)


def test_a_recipe_that_the_model_cannot_have_says_why(opened) -> None:
    engine, progress, _, _ = opened
    with pytest.raises(InvalidConstraintError, match="no experts"):
        engine.recipe(progress, "ep", None, 30.0)
    assert set(recipe_labels().values()) >= {"ep", "fsdp"}


def test_other_hardware_prices_the_same_decisions_and_finds_the_best(opened) -> None:
    engine, progress, _, free = opened
    same, best = engine.what_if(progress, free, "h200+roce_8x400g", 30.0)
    assert same.choices.keys() == free.choices.keys() and compare.changed(free, same) == ()
    assert {same.hardware_name, best.hardware_name} == {"h200+roce_8x400g"} and free.hardware_name == "h100_sxm"
    assert same.objective_us != free.objective_us and best.report.bound_us <= same.objective_us * (1 + 1e-9)
    budgets = {c.num_bytes for plan in (same, best) for c in plan.constraints if isinstance(c, MemoryBudget)}
    assert len(budgets) == 1 and budgets.isdisjoint(c.num_bytes for c in free.constraints if isinstance(c, MemoryBudget))


def test_a_sweep_sends_every_mesh_as_it_ends(opened) -> None:
    engine, progress, sent, free = opened
    sent.clear()
    engine.sweep(progress, SweepRequest(model=free.request, devices=4, axes=(1, 2), checkpoint="none"))
    rows = [value for kind, value in sent if kind == "row"]
    assert [entry.mesh for entry, _ in rows] == ["dp=4", "dp=2,tp=2"]
    assert all(plan is not None and plan.plan_id == entry.plan_id for entry, plan in rows)
    assert next(plan for entry, plan in rows if entry.mesh == str(MESH)).objective_us == pytest.approx(
        free.objective_us, rel=0.02
    )
