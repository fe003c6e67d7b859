"""An exported file that repeats layers in backward computes what the user's module computes, with the collectives of its plan."""

from __future__ import annotations

import re

import pytest

from planner.constraint import ReshardAfterForward
from planner.exporting.script import write_script
from planner.exporting.verify import export_verified
from planner.graph import ModelRequest, TensorRef
from planner.matching import planned_graph
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.plan import Plan
from planner.workbench import Workbench
from tests.numerics.exported import ROOT, Model, any_plan

LAYERED = ROOT / "tests" / "planner" / "layered_models.py"
USERS = ROOT / "tests" / "planner" / "tracing" / "user_models.py"


def verified(model: Model, plan: Plan) -> str:
    """The text of the file. Raises on any difference in loss, gradients or counts."""
    found = export_verified(plan, planned_graph(plan, model.full), planned_graph(plan, model.tiny))
    for what in ("check", "reference"):
        numbers = found.report["numbers"][what]
        assert numbers["largest_error"] <= 1e-5 and numbers["loss_difference"] <= 1e-5
        assert numbers["gradients"] == len(model.full.parameters)
        assert numbers["counts"] == "as planned"
    return found.script


def returned(script: str, function: str) -> int:
    """How many tensors a function of the file hands to the backward pass."""
    body = re.search(rf"^def {function}\(.*?^(?=\S)(?!\))", script, re.DOTALL | re.MULTILINE)
    assert body is not None
    return len(re.findall(r"\w+", body[0].rpartition("return ")[2].rpartition("[")[2]))


@pytest.mark.parametrize("how", ["full", pytest.param("full:1", marks=pytest.mark.slow)])
def test_the_optimum_equals_the_module(llama: Model, bench: Workbench, how: str) -> None:
    constraints = (*bench.default_constraints(), ReshardAfterForward(when="always"))
    plan = bench.solve(constraints, checkpoint=how)
    script = verified(llama, plan)
    assert "forward again" in script and script.count("sdpa_fwd(") > llama.script(bench.solve(bench.default_constraints())).count(
        "sdpa_fwd("
    )
    assert returned(script, "block_fwd") == 1, "a repeated layer hands on what enters the next one, nothing else"


@pytest.mark.slow
def test_random_legal_placements_of_repeated_ops(llama: Model, bench: Workbench) -> None:
    plan = any_plan(bench.variants.bench(("layers.0",)), 1)
    assert plan.checkpointed == ("layers.0",)
    repeated = {r.tensor[0] for r in plan.redistributions if "/recompute#" in r.tensor[0]}
    assert len(repeated) > 15, "a random plan moves repeated tensors too"
    verified(llama, plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_random_legal_placements(llama: Model, bench: Workbench, seed: int) -> None:
    verified(llama, any_plan(bench.variants.bench(("layers.1",)), seed))
    verified(llama, any_plan(bench.variants.bench(("layers.0", "layers.1")), seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid-tiny", "moe-tiny", "vit-tiny"])
def test_other_models(name: str) -> None:
    model = Model.sample(name, 3 if name == "hybrid-tiny" else 2)
    bench = model.bench("dp=2,tp=2")
    verified(model, bench.solve(bench.default_constraints(), checkpoint="full"))
    verified(model, bench.solve(bench.default_constraints(), checkpoint="full:1"))


@pytest.mark.slow
@pytest.mark.parametrize("model", [f"{LAYERED}:counted", f"{LAYERED}:pairs", f"{LAYERED}:two_stacks", f"{USERS}:dropping"])
def test_layers_with_buffers_several_outputs_two_stacks_and_dropout(model: str) -> None:
    graph = trace(ModelRequest(model=model, precision="as-traced"))
    bench = Workbench.build(graph, Mesh.parse("dp=2,tp=2"))
    verified(Model(graph, graph), bench.solve(bench.default_constraints(), checkpoint="full"))


def test_flops_of_the_file_are_those_of_the_model(llama: Model, bench: Workbench) -> None:
    plans = [bench.solve(bench.default_constraints(), checkpoint=how) for how in ("none", "full")]
    texts = [write_script(plan, planned_graph(plan, llama.full), planned_graph(plan, llama.tiny)) for plan in plans]
    stated = [next(line for line in text.splitlines() if line.startswith("STEP_FLOPS")) for text in texts]
    assert stated[0] == stated[1]


def test_saved_tensors_of_the_file_are_what_memory_counts(llama: Model, bench: Workbench) -> None:
    plan = bench.solve(bench.default_constraints(), checkpoint="full")
    graph = planned_graph(plan, llama.full)
    layers = [ref for ref in graph.saved_for_backward if graph.nodes[ref.node].module.startswith("layers.")]
    assert len(layers) == 2 and all(graph.meta(ref) == graph.meta(TensorRef(layers[0].node, 0)) for ref in layers)
