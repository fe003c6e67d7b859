"""A recipe file computes what the user's module computes, whatever collectives DTensor and FSDP choose for it."""

import re
import sys
from functools import cache
from pathlib import Path

import pytest

from planner import pipeline
from planner.exporting.recipe_file import LABEL, FactorySource, write_recipe
from planner.graph import JointGraph
from planner.plan import Plan
from tests.numerics.exported import run
from tests.planner.recipes_common import bench, planned

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ALL = [("llama3-tiny", "dp=2,tp=2", name) for name in ("ddp", "fsdp", "hsdp", "tp", "tp_sp", "fsdp_tp_sp")]
ALL += [("llama3-tiny", "tp=4", "tp_sp"), ("llama3-tiny", "dp=4", "fsdp")]
ALL += [("gpt2-tiny", "dp=2,tp=2", name) for name in ("fsdp", "tp", "fsdp_tp_sp")]


@cache
def tiny(model: str) -> JointGraph:
    found = pipeline.tiny_graph(bench(model, "dp=2,tp=2").graph)
    assert found is not None
    return found


def written(model: str, mesh: str, recipe: str, folder: Path) -> tuple[Path, Plan]:
    found = bench(model, mesh)
    plan = planned(found, recipe)
    function = model.replace("-", "_")
    source = FactorySource(
        module=f"sample_models.{model.partition('-')[0]}", function=function, full={"batch": 16}, tiny={"size": "tiny"}
    )
    path = folder / "recipe.py"
    path.write_text(write_recipe(plan, found.graph, tiny(model), source))
    return path, plan


def assert_equal_to_the_module(path: Path) -> None:
    done = run([sys.executable, str(path), "--check"])
    assert done.returncode == 0, done.stderr[-3000:]
    match = re.search(r"(\d+) grads max err (\S+) .* -> PASS", done.stdout)
    assert match and int(match[1]) > 20 and float(match[2]) <= 1e-5


def test_fsdp_with_tensor_and_sequence_parallelism_equals_the_module(tmp_path: Path) -> None:
    assert_equal_to_the_module(written("llama3-tiny", "dp=2,tp=2", "fsdp_tp_sp", tmp_path)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "recipe"), ALL)
def test_recipes_equal_the_module(model: str, mesh: str, recipe: str, tmp_path: Path) -> None:
    assert_equal_to_the_module(written(model, mesh, recipe, tmp_path)[0])


@pytest.mark.slow
def test_an_error_in_the_recipe_fails_its_check(tmp_path: Path) -> None:
    """A check that cannot fail checks nothing: gradients that are not summed over the data axis."""
    path, _ = written("llama3-tiny", "dp=2,tp=2", "fsdp_tp_sp", tmp_path)
    text = path.read_text()
    wrong = text.replace("leaf.chunk(parts)[part]", "leaf.chunk(parts)[0]")
    assert wrong != text
    path.write_text(wrong)
    done = run([sys.executable, str(path), "--check"])
    assert done.returncode == 1 and "FAIL" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fsdp", "tp", "fsdp_tp_sp"])
def test_training_on_four_gloo_ranks_is_training_on_one(recipe: str, tmp_path: Path) -> None:
    path, _ = written("llama3-tiny", "dp=2,tp=2", recipe, tmp_path)
    losses = []
    for ranks, mesh in ((4, None), (1, "1")):
        axes = path.read_text().split("MESH = ")[1].split("}")[0].count(":")
        sizes = [] if mesh is None else ["--mesh", ",".join([mesh] * axes)]
        asked = ["--device", "cpu", "--tiny", "--fp32", "--steps", "3", *sizes]
        done = run([*TORCHRUN, f"--nproc_per_node={ranks}", str(path), *asked], timeout_s=900.0)
        assert done.returncode == 0, done.stderr[-3000:]
        assert LABEL in done.stdout
        losses.append([float(loss) for loss in re.findall(r"step \d+ loss (\S+)", done.stdout)])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != losses[0][2]


@pytest.mark.slow
def test_what_is_handed_out_was_measured(tmp_path: Path) -> None:
    found = bench("llama3-tiny", "dp=2,tp=2")
    plan = planned(found, "fsdp")
    made = pipeline.export_recipe(plan, found.graph)
    told = made.report["dry_run"]
    assert told[0] == "forward: all_gather@dp+tp 3 (plan 21), all_reduce@dp+tp 0 (plan 1)"
    assert told[1].startswith("backward: all_gather@dp+tp 3 (plan ") and "reduce_scatter@dp+tp 3 (plan 21)" in told[1]
    assert re.match(r"predicted time of these collectives .* recipe \S+ \S+, plan \S+", told[2])
    assert all(line in made.script for line in told) and made.report["label"] == LABEL
    assert made.report["numbers"]["recipe"]["largest_error"] <= 1e-5
