"""Four real gloo processes: equal to the plain module on one process, with the planned collectives."""

import sys
from pathlib import Path

import pytest
import torch

from planner.placement import text
from planner.plan import Plan
from planner.tracing.reference import reference_step
from planner.workbench import Workbench
from tests.numerics.exported import Model, any_plan, optimum, run_ranks


def on_four_ranks(model: Model, plan: Plan, folder: Path) -> None:
    script, out = folder / "train.py", folder / "out.pt"
    script.write_text(model.script(plan))
    for done in run_ranks(4, [sys.executable, "tests/numerics/real_ranks.py", str(script), str(out)]):
        assert done.returncode == 0, done.stderr[-3000:]
    got = torch.load(out, weights_only=True)
    want = reference_step(model.tiny.request, got["values"])
    assert got["grads"].keys() == want["grads"].keys() == {p.name for p in model.full.parameters}
    for name, gradient in want["grads"].items():
        error = (got["grads"][name] - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-5, (name, error)
    for loss, differences, collectives in got["ranks"]:
        assert loss == pytest.approx(want["loss"].item(), rel=1e-5)
        assert not differences
        assert collectives == plan.collective_counts


def test_the_optimum_on_four_ranks(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    on_four_ranks(llama, optimum(bench), tmp_path)


def test_a_random_plan_on_four_ranks(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    plan = any_plan(bench, 4)
    issued = set(plan.collective_counts["forward"]) | set(plan.collective_counts["backward"])
    assert {label.split("@")[0] for label in issued} == {"all_gather", "all_reduce", "reduce_scatter", "all_to_all"}
    on_four_ranks(llama, plan, tmp_path)


@pytest.mark.slow
def test_biases_added_to_pending_sums_on_four_ranks(tmp_path: Path) -> None:
    """Each bias is added by one device only; one reduction follows for two products."""
    factory = Path(__file__).parents[1] / "planner" / "bias_models.py"
    model = Model.sample(f"{factory}:paths", layers=2, precision="as-traced")
    plan = optimum(model.bench("tp=4"))
    lines = [r for r in plan.redistributions if not any(step.collective for step in r.steps) and "P" in text(r.target)]
    assert len(lines) == 4 and plan.collective_counts["forward"] == {"all_reduce@tp": 2}
    on_four_ranks(model, plan, tmp_path)
