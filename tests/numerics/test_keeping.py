"""Parameters kept from forward to backward in exported files: values, collectives, and memory to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.actions import KEPT, OVERLAPPED
from planner.constraint import MemoryBudget, ReshardAfterForward
from planner.errors import ExportError, PlanFormatError
from planner.exporting.lower import lower
from planner.forecast import forecast
from planner.plan import Plan
from planner.recipes import Recipe
from planner.workbench import Workbench
from tests.numerics.exported import Model, any_plan
from tests.numerics.test_checkpointed_scripts import verified
from tests.numerics.test_memory import check
from tests.numerics.test_real_processes import on_four_ranks


def fsdp(bench: Workbench, when: str | None = None) -> Plan:
    """FSDP over all devices; without `when` as the recipe is published."""
    recipe = Recipe(name="fsdp", axes=bench.mesh.axis_names, may_keep=when is not None)
    demands = () if when is None else (ReshardAfterForward(when=when),)
    return bench.solve((*bench.default_constraints(), recipe, *demands), exact=False)


def gathers(plan: Plan, phase: str) -> int:
    return sum(count for label, count in plan.collective_counts[phase].items() if label.startswith("all_gather"))


def test_kept_parameters_are_not_gathered_again_and_are_there_until_backward(
    llama: Model, bench: Workbench, tmp_path: Path
) -> None:
    again, kept = fsdp(bench), fsdp(bench, "never")
    assert gathers(again, "backward") == gathers(again, "forward") - 1, "all but the embedding's"
    assert gathers(kept, "backward") == 0 and gathers(kept, "forward") == gathers(again, "forward")
    assert kept.objective_us < again.objective_us and kept.objective_us <= fsdp(bench, "always").objective_us
    script = llama.script(kept)
    assert "block_unshard_bwd(" in llama.script(again) and "block_unshard_bwd(" not in script
    assert kept.kept_text in script and kept.memory.kept_parameter_bytes > again.memory.kept_parameter_bytes == 0
    of_kind = forecast(kept, llama.full, bench.hardware, OVERLAPPED).memory.by_category
    assert 0 < of_kind[KEPT] <= kept.memory.kept_parameter_bytes
    check(llama, bench, kept, tmp_path)


def test_a_plan_with_kept_parameters_is_saved_replayed_and_checked(llama: Model, bench: Workbench) -> None:
    plan = fsdp(bench, "never")
    again = Plan.from_json(json.loads(plan.dumps()))
    assert again.plan_id == plan.plan_id and again.memory == plan.memory and again.kept_text == plan.kept_text != ""
    assert bench.replay(again).objective_us == pytest.approx(plan.objective_us, rel=1e-12)
    key = "layers.0.attention.wq/cast/bwd#0"
    moved = {**plan.choices, key: replace(plan.choices[key], outputs=plan.choices["param:layers.0.attention.wq.weight"].outputs)}
    with pytest.raises(PlanFormatError, match="is kept as S"):
        bench.replay(replace(plan, choices=moved, redistributions=plan.redistributions))
    with pytest.raises(ExportError, match=r"is kept as|the plan brings it as"):
        lower(replace(plan, choices=moved), llama.full)
    other = replace(plan, constraints=(*plan.constraints, ReshardAfterForward(when="always")))
    with pytest.raises(PlanFormatError, match="reshard after forward: always"):
        bench.replay(other)


def test_a_tight_budget_keeps_fewer(bench: Workbench) -> None:
    """What is kept counts in the budget; the optimum under it keeps the parameters that save most per byte."""
    recipe = Recipe(name="fsdp", axes=bench.mesh.axis_names, may_keep=True)
    free = bench.solve((*bench.default_constraints(), recipe))
    least = bench.solve((*bench.default_constraints(), recipe, ReshardAfterForward(when="always")))
    middle = (free.memory.peak_bytes + least.memory.peak_bytes) // 2
    some = bench.solve((*bench.default_constraints(), recipe, MemoryBudget(num_bytes=middle)))
    assert some.report.status == "optimal" and some.memory.peak_bytes <= middle
    assert 0 < some.memory.kept_parameter_bytes < free.memory.kept_parameter_bytes
    assert free.objective_us < some.objective_us < least.objective_us


@pytest.mark.slow
@pytest.mark.parametrize("when", ["never", "always"])
def test_on_four_ranks(llama: Model, bench: Workbench, tmp_path: Path, when: str) -> None:
    on_four_ranks(llama, fsdp(bench, when), tmp_path)


@pytest.mark.slow
def test_some_kept_some_gathered_again_and_layers_repeated(llama: Model, bench: Workbench) -> None:
    for plan in (any_plan(bench, 11), any_plan(bench.variants.bench(("layers.0",)), 12)):
        kept = [choice.kept for key, choice in plan.choices.items() if "/cast/" in key and "#" in key]
        assert 3 <= sum(kept) < len(kept), "a random plan keeps some"
        verified(llama, plan)
    constraints = (*bench.default_constraints(), ReshardAfterForward(when="never"))
    verified(llama, bench.solve(constraints, checkpoint="full", exact=False))
