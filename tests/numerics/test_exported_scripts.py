"""An exported file computes what the user's module computes, with the collectives of its plan: optimum and random legal plans."""

import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from planner.errors import ExportError
from planner.exporting.script import write_script
from planner.exporting.verify import export_verified, verify_script
from planner.matching import planned_graph
from planner.plan import Plan
from planner.workbench import Workbench
from tests.numerics.exported import Model, any_plan, imported, optimum, recipe, run, tiny_request


def verified(model: Model, plan: Plan) -> dict:
    """The exporter's own verification: raises on any difference in loss, gradients or counts."""
    report = export_verified(plan, model.full, model.tiny).report
    for what in ("check", "reference"):
        numbers = report["numbers"][what]
        assert numbers["largest_error"] <= 1e-5 and numbers["loss_difference"] <= 1e-5
        assert numbers["gradients"] == len(model.full.parameters)
        assert numbers["counts"] == "as planned"
    return report


@pytest.mark.own_processes
def test_the_optimum_equals_the_module(llama: Model, bench: Workbench) -> None:
    verified(llama, optimum(bench))


def equal_the_module(model: Model, plans: dict[str, Plan], folder: Path) -> None:
    """Loss and every gradient within 1e-5 of the plain module in fp32, counts and order of collectives as planned."""
    request = folder / "request.json"
    request.write_text(json.dumps(tiny_request(model).to_json()))
    for name, plan in plans.items():
        (folder / f"{name}.py").write_text(model.script(plan))
    files = [str(folder / f"{name}.py") for name in plans]
    done = run([sys.executable, "-m", "tests.numerics.many_on_threads", str(request), *files], timeout_s=1500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    counted = rf"on \(2, 2\): .*, {len(model.full.parameters)} grads .*, counts as planned -> PASS"
    assert len(re.findall(counted, done.stdout)) == len(plans), done.stdout


def test_recipes_and_random_legal_plans_equal_the_module(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    plans = {name: recipe(bench, name) for name in ("fsdp", "tp_sp", "fsdp_tp_sp")}
    plans |= {f"random_{seed}": any_plan(bench, seed) for seed in (1, 2)}
    assert len(plans["random_1"].redistributions) > 400, "a random plan moves nearly everything"
    equal_the_module(llama, plans, tmp_path)


@pytest.mark.slow
def test_twenty_random_legal_plans_equal_the_module(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    equal_the_module(llama, {f"random_{seed}": any_plan(bench, seed) for seed in range(3, 23)}, tmp_path)


@pytest.mark.slow
def test_a_random_legal_plan_passes_the_exporter(llama: Model, bench: Workbench) -> None:
    verified(llama, any_plan(bench, 1))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "dp=4,tp=2", "dp=2,cp=2,tp=2", "dp=2,one=1,tp=2"])
def test_random_plans_on_other_meshes(llama: Model, mesh: str) -> None:
    verified(llama, any_plan(llama.bench(mesh), 5))


@pytest.mark.slow
def test_random_plan_of_the_model_as_traced() -> None:
    model = Model.llama(precision="as-traced")
    verified(model, any_plan(model.bench("dp=2,tp=2"), 6))


def test_the_same_plan_gives_the_same_bytes(llama: Model, bench: Workbench) -> None:
    plan = any_plan(bench, 1)
    again = Plan.from_json(plan.to_json())
    assert llama.script(plan) == llama.script(again)


@cache
def deep(layers: int) -> tuple[Model, Workbench]:
    """Made once for the tests of loops."""
    model = Model.llama(layers)
    return model, model.bench("dp=2,tp=2")


def test_the_length_does_not_depend_on_depth_if_layers_are_alike() -> None:
    lines = {}
    for layers in (4, 8):  # the first and last layers stand outside the loop
        model, bench = deep(layers)
        plan = any_plan(bench, 3, alike=True)
        assert len(plan.redistributions) > 100 * layers
        script = model.script(plan)
        lines[layers] = len(script[script.index("# ---- the planned computation") :].splitlines())  # tables wrap at long numbers
    assert lines[4] == lines[8], lines


def test_loops_over_repeated_layers_stay_loops() -> None:
    """Repeated layers are one loop, the others another; in backward the first of these reads from a layer of the other kind."""
    model, bench = deep(8)
    plan = bench.solve((), checkpoint="full:4")
    script = write_script(plan, planned_graph(plan, model.full), planned_graph(plan, model.tiny))
    assert "for i in range(0, 4):" in script and "for i in range(3, 0, -1):" in script
    assert "for i in range(4, 8):" in script and "for i in range(6, 4, -1):" in script


@pytest.mark.slow
@pytest.mark.parametrize("what", ["optimum", "fsdp", "fsdp_tp_sp"])
def test_a_file_of_32_layers_is_about_as_long_as_one_of_two(what: str) -> None:
    """Block functions are the same; in the step the first and last layers stand outside the loop."""
    lines: dict[int, tuple[int, int]] = {}
    for layers in (2, 32):
        model = Model.llama(layers)
        bench = model.bench("dp=2,tp=2")
        script = model.script(optimum(bench) if what == "optimum" else recipe(bench, what))
        blocks = script[script.index("# ---- the planned computation") : script.index("# ---- one step")]
        lines[layers] = len(script.splitlines()), len(blocks.splitlines())
    assert lines[2][1] == lines[32][1] and lines[32][0] <= lines[2][0] + 30, lines


def test_without_a_tiny_version_the_file_checks_itself_at_full_size(bench: Workbench, llama: Model) -> None:
    report = export_verified(optimum(bench), llama.full, None).report
    assert report["numbers"]["reference"]["largest_error"] <= 1e-5


def test_a_wrong_file_is_not_handed_out(llama: Model, bench: Workbench) -> None:
    """Another factor in the loss: the file agrees with itself, not with the module; this is what the reference is for."""
    text = llama.script(optimum(bench))
    wrong, count = re.subn(r"torch\.div\((\w+), B\*S\)", r"torch.div(\1, 2*B*S)", text)
    assert count >= 1
    with pytest.raises(ExportError, match="user's module"):
        verify_script(wrong, llama.full, llama.tiny)


def test_wrong_usage_is_one_sentence_and_exit_code_2(
    llama: Model, bench: Workbench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(llama.script(optimum(bench)))
    train = imported(path)
    for arguments, telling in (
        ("--mesh 3,1 --tiny", "does not split over"),
        ("--mesh 2 --tiny", "one size for each of the axes dp, tp"),
        ("--device cpu --tiny", "needs 4 ranks, this is one, without torchrun"),
        ("--dry-run --ranks 7", "no rank 7"),
        ("--dry-run --ranks x", "not a list of numbers"),
    ):
        assert train.main(arguments.split()) == 2
        errors = capfd.readouterr().err
        assert telling in errors and len(errors.splitlines()) == 1, (arguments, errors)
    with pytest.raises(SystemExit, match="2"):
        train.main(["--no-such-flag"])
    assert "unrecognized arguments" in capfd.readouterr().err


@pytest.mark.slow
def test_small_sizes_that_do_not_split_over_the_mesh_are_checked_on_parts_of_it(llama: Model) -> None:
    """Key-value heads: 8 at full size, 4 at tiny size; a plan that splits them over 2 x 2 x 2 devices is legal."""
    bench = llama.bench("dp=2,cp=2,tp=2")
    plans = (any_plan(bench, seed) for seed in range(20))
    report = verified(llama, next(plan for plan in plans if '("KV", KV, ("DP", "CP", "TP"))' in llama.script(plan)))
    assert report["numbers"]["check"]["mesh"].count(";") >= 2


def test_a_plan_read_from_another_model_is_refused(llama: Model, bench: Workbench) -> None:
    plan = replace(optimum(bench), structure_fingerprint="0" * 16)
    with pytest.raises(ExportError, match="another model"):
        llama.script(plan)
