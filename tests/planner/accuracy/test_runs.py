"""Rows of training runs become meshes and recipes, or are refused with a reason; planning them adds up."""

from dataclasses import replace

import pytest

from planner.accuracy.rescale import PRIME, with_batch
from planner.accuracy.rows import Skip
from planner.accuracy.runs import Run, parallelism, run_of, vtrain_run
from planner.accuracy.steps import Parts, Predictor, step_us
from planner.graph import ModelRequest
from planner.hardware import load_profile
from planner.mesh import Mesh
from planner.pipeline import trace

SMALL = "decoder[dim=256,heads=8,kv_heads=8,ffn=512,vocab=1024,gated=0,norm=layer]"
ROW = {
    "row_id": "r1", "group": "g", "framework": "torchtitan", "model": "llama", "arch": "dense", "layers": "32", "hidden": "4096",
    "ffn": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "gpu": "H100-SXM-80GB", "gpus": "64", "dp": "2",
    "fsdp": "4", "tp": "8", "sp": "True", "cp": "1", "pp": "1", "zero": "3", "micro_batch": "2", "global_batch": "32",
    "seq": "4096", "precision": "bf16", "ac_policy": "full", "compile": "True", "reliability": "high",
}  # fmt: skip


def test_a_row_becomes_mesh_recipes_and_batch() -> None:
    run = run_of(ROW)
    assert str(run.mesh) == "dp=2,fsdp=4,tp=8"
    assert [recipe.describe() for recipe in run.recipes] == ["recipe hsdp on dp, fsdp", "recipe tp_sp on tp"]
    assert (run.batch, run.accumulation, run.checkpoint, run.compiled) == (16, 2, "full", True)
    assert run.model == "decoder[dim=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,gated=1,tied=0,norm=rms]"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pp": "4"}, "pipeline stages"),
        ({"cp": "2"}, "context parallelism"),
        ({"arch": "moe"}, "no builder for models of kind moe"),
        ({"precision": "fp8"}, "precision is not bf16"),
        ({"ac_policy": "selective op"}, "recompute policy that plans do not have"),
        ({"model": "llama LoRA"}, "fine-tuning"),
        ({"gpus": "60"}, "degrees do not multiply"),
        ({"global_batch": "33"}, "global batch is no multiple"),
        ({"hidden": ""}, "hidden is not stated"),
        ({"gpu": "TPU"}, "no hardware profile"),
        ({"reliability": "low"}, "low reliability"),
    ],
)
def test_what_cannot_be_planned_says_why(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        run_of({**ROW, **changed})


def test_rows_of_ranked_plans() -> None:
    row = {"gpus": "8", "tp": "2", "dp": "4", "pp": "1", "hidden": "1024", "heads": "16", "layers": "24", "seq": "1024"}
    run = vtrain_run({**row, "micro_batch": "2", "global_batch": "32", "iter_ms": "100"})
    assert (str(run.mesh), run.batch, run.accumulation) == ("dp=4,tp=2", 8, 4)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor()


def small(**changes: object) -> Run:
    mesh, recipes = parallelism(2, 1, 2, False)
    values = {
        "model": SMALL, "layers": 4, "seq": 128, "hardware": "h100_sxm", "mesh": mesh, "recipes": recipes, "batch": 16,
        "accumulation": 1, "checkpoint": "none", "compiled": True, "zero": 0,
    }  # fmt: skip
    return Run(**{**values, **changes})  # type: ignore[arg-type]


def test_another_batch_in_graph_space_is_another_trace() -> None:
    """Shapes, work and structure as traced at that batch."""
    traced = trace(ModelRequest(model=SMALL, batch=6, seq=32, layers=1))
    resized = with_batch(trace(ModelRequest(model=SMALL, batch=PRIME, seq=32, layers=1)), 6)
    assert resized.structure_fingerprint == traced.structure_fingerprint
    assert [node.outputs for node in resized.nodes] == [node.outputs for node in traced.nodes]
    assert sum(n.flops for n in resized.nodes) == pytest.approx(sum(n.flops for n in traced.nodes))


def test_deeper_models_are_planned_as_if_traced_whole(predictor: Predictor) -> None:
    """Two layers more than traced: the same state and work as a plan of the four-layer graph."""
    run = small()
    profile = load_profile("h100_sxm")
    few, more = (predictor._parts(run, profile, depth) for depth in (1, 2))
    whole = predictor._parts(run, profile, 4)
    extended = more.extended(few, 2)
    assert extended.state == whole.state
    for name in ("forward", "backward", "exchanged", "reduced", "kept"):
        assert getattr(extended, name) == pytest.approx(getattr(whole, name), rel=0.03), name


def test_step_grows_with_what_is_asked(predictor: Predictor) -> None:
    def us(**changes: object) -> float:
        return predictor.predict(small(**changes)).step_us

    base = us()
    assert us(accumulation=2) > 1.5 * base
    assert us(layers=8) > 1.5 * base
    assert us(compiled=False) > base, "the host starts every op by itself"
    assert predictor.predict(small(checkpoint="full")).memory_bytes < predictor.predict(small()).memory_bytes


def test_transfers_hide_behind_compute_but_not_for_free() -> None:
    run = small(mesh=Mesh.parse("fsdp=8"))
    profile = load_profile("h100_sxm")
    alone = step_us(Parts(forward=1e5, backward=2e5), run, profile)
    some = step_us(Parts(forward=1e5, backward=2e5, gathered=1e5), run, profile)
    much = step_us(Parts(forward=1e5, backward=2e5, gathered=1e6), run, profile)
    assert alone < some < alone + 1e5
    assert much > 1e6, "never shorter than its transfers"
    exchanged = step_us(Parts(forward=1e5, backward=2e5, exchanged=1e5), run, profile)
    assert exchanged == pytest.approx(alone + 1e5)
    hidden = step_us(Parts(forward=1e5, backward=2e5, exchanged=1e5), replace(run, hides_exchanges=True), profile)
    assert alone < hidden < exchanged
