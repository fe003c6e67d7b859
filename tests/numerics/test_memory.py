"""What is alive while an exported file runs, against the forecast: to the byte where one block ends and the next begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.actions import OVERLAPPED, Actions
from planner.costing.live_memory import lifetimes, walk
from planner.exporting.script import write_script
from planner.issuing import actions_of
from planner.matching import planned_graph
from planner.plan import Plan
from planner.workbench import Workbench
from tests.numerics.exported import Model, any_plan, optimum, recipe, run

LOSS_BYTES = 4
"""The step hands out a copy of the loss, which no plan knows of."""


def measured(model: Model, plan: Plan, folder: Path) -> dict[str, Any]:
    path = folder / "train.py"
    path.write_text(write_script(plan, planned_graph(plan, model.full), planned_graph(plan, model.tiny)))
    done = run([sys.executable, "-m", "tests.numerics.measured_memory", str(path)])
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def at_entries(actions: Actions) -> list[int]:
    """Bytes alive when each block's function is called. What its first action awaits still holds what it reads."""
    born, last = lifetimes(actions)
    found = []
    for first, _ in actions.calls:
        awaited = {storage for number in actions.actions[first].awaits for storage in actions.actions[number].reads}
        there = [s for s, at in born.items() if at < first and (last[s] >= first or (last[s] == first - 1 and s in awaited))]
        found.append(sum(actions.storages[s].num_bytes for s in there))
    return found


def check(model: Model, bench: Workbench, plan: Plan, folder: Path) -> dict[str, Any]:
    found = measured(model, plan, folder)
    actions = actions_of(plan, planned_graph(plan, model.full), bench.hardware, OVERLAPPED)
    differences = [got - want for got, want in zip(found["entries"], at_entries(actions), strict=True)]
    assert set(differences) <= {0, LOSS_BYTES}, differences
    assert found["gathered"] <= 2, "of the block that runs and of the next one"
    assert found["left"] == 0, "gradients and the loss are all that stays"
    # Eager ops write what fused kernels do not, and are deleted at the ends of modules.
    forecast = walk(actions).allocated_bytes - sum(actions.static_bytes.values())
    assert found["peak"] >= max(found["entries"])
    assert 0.4 * found["peak"] <= forecast
    return found


def test_gathered_parameters_and_saved_tensors_are_there_as_long_as_forecast(
    llama: Model, bench: Workbench, tmp_path: Path
) -> None:
    assert check(llama, bench, recipe(bench, "fsdp"), tmp_path)["gathered"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("what", ["optimum", "fsdp_tp_sp", "tp_sp", "full", "random", "another"])
def test_other_plans(llama: Model, bench: Workbench, tmp_path: Path, what: str) -> None:
    if what == "full":
        plan = bench.solve(bench.default_constraints(), exact=False, checkpoint=what)
    elif what in ("random", "another"):
        plan = any_plan(bench, 4 if what == "random" else 7)
    else:
        plan = optimum(bench) if what == "optimum" else recipe(bench, what)
    check(llama, bench, plan, tmp_path)
