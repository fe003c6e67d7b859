"""Four real gloo processes, started by torchrun: equal to the plain module on one process, with the planned collectives."""

import re
import sys
from pathlib import Path

import pytest
import torch

from planner.pipeline import Workbench
from planner.plan import Plan
from planner.tracing.reference import reference_step
from tests.numerics.exported import Model, any_plan, optimum, run

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def on_four_ranks(model: Model, plan: Plan, folder: Path) -> None:
    script, out = folder / "train.py", folder / "out.pt"
    script.write_text(model.script(plan))
    done = run([*TORCHRUN, "--nproc_per_node=4", "tests/numerics/real_ranks.py", str(script), str(out)])
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


def losses(output: str) -> list[str]:
    return re.findall(r"^step (\d+ loss \S+)", output, flags=re.M)


def test_training_goes_on_from_a_checkpoint(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    """Four steps = two, saved, and two more; also on another mesh, up to rounding of bf16."""
    script = tmp_path / "train.py"
    script.write_text(llama.script(any_plan(bench, 4)))
    common = [str(script), "--device", "cpu", "--tiny", "--lr", "0.01"]
    four = run([*TORCHRUN, "--nproc_per_node=4", *common, "--steps", "4"])
    first = run([*TORCHRUN, "--nproc_per_node=4", *common, "--steps", "2", "--save", str(tmp_path / "saved")])
    rest = run([*TORCHRUN, "--nproc_per_node=4", *common, "--steps", "2", "--resume", str(tmp_path / "saved")])
    other = run([sys.executable, *common, "--mesh", "1,1", "--steps", "2", "--resume", str(tmp_path / "saved")])
    for done in (four, first, rest, other):
        assert done.returncode == 0, done.stderr[-3000:]
    assert "saved" in first.stdout
    assert losses(four.stdout) == losses(first.stdout) + losses(rest.stdout)
    assert len(losses(four.stdout)) == 4
    for same, near in zip(losses(rest.stdout), losses(other.stdout), strict=True):
        assert float(near.split()[-1]) == pytest.approx(float(same.split()[-1]), abs=2e-3)
