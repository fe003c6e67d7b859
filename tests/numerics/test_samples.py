"""Every sample model: the traced graph is the module, and its exported file too, on meshes of one to three axes."""

from __future__ import annotations

import pytest

from planner.enumerating.enumerate import enumerate_strategies
from planner.exporting.verify import export_verified
from planner.graph import ModelRequest
from planner.mesh import Mesh
from planner.pipeline import models, tiny_graph, trace
from planner.placement import text
from planner.plan import Plan
from planner.workbench import Workbench
from tests.benchmarks.published import Emerged
from tests.numerics.exported import Model, any_plan, optimum
from tests.planner.tracing.common import largest_error

SMALL = tuple(model.name for model in models() if model.name.endswith("-tiny"))
EXPERTS = ("moe-region-tiny", "moe-16b-region")
"""Samples with a region that needs a mesh axis `ep`."""
LARGE = tuple(model.name for model in models() if not model.name.endswith("-tiny"))


def mesh_for(name: str) -> str:
    return "dp=2,ep=2" if name in EXPERTS else "dp=2,tp=2"


@pytest.mark.parametrize("name", SMALL)
def test_the_traced_graph_equals_autograd(name: str) -> None:
    assert largest_error(ModelRequest(model=name, size="tiny", precision="as-traced")) < 1e-5


@pytest.mark.parametrize("name", SMALL + LARGE)
def test_every_sample_traces_at_both_sizes_and_every_op_has_a_rule(name: str) -> None:
    full = trace(ModelRequest(model=name, layers=1, batch=4))
    small = tiny_graph(full)
    assert small is not None and small.structure_fingerprint == full.structure_fingerprint
    assert enumerate_strategies(full, Mesh.parse(mesh_for(name))).replicated_for_lack_of_a_rule == ()
    assert all(parameter.init.kind != "unknown" for parameter in full.parameters)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("llama3-tiny", "moe-region-tiny")])
def test_the_optimum_equals_the_module(name: str) -> None:
    model = Model.sample(name)
    _verified(model, model.bench(mesh_for(name)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ep=4", "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "llama3-tiny"])
def test_optimum_and_random_plans_on_other_meshes(name: str, mesh: str) -> None:
    model = Model.sample(name)
    bench = model.bench(mesh.replace("cp", "ep"))
    _verified(model, bench)
    assert export_verified(any_plan(bench, 3), model.full, model.tiny).report["passed"]


def _verified(model: Model, bench: Workbench) -> None:
    numbers = export_verified(optimum(bench), model.full, model.tiny).report["numbers"]
    assert numbers["reference"]["largest_error"] <= 1e-5
    assert numbers["reference"]["gradients"] == len(model.full.parameters)
    assert numbers["check"]["counts"] == "as planned"


def test_expert_parallelism_emerges() -> None:
    """Nothing in the model or the solver knows of it: experts are split over one axis (and stored split over the other too, until
    they are gathered for the whole step), sequences over both, and tokens travel to their experts and back by all-to-all."""
    graph = trace(ModelRequest(model="moe-16b", layers=1, batch=128))
    bench = Workbench.build(graph, Mesh.parse("dp=16,ep=8"))
    plan = optimum(bench)
    assert text(plan.choices["param:layers.0.moe.experts.w1"].outputs[0] or ()) == "S(1)S(0)", "of the other axis by FSDP"
    product = plan.choices["layers.0.moe.experts/matmul/fwd#0"]
    assert [text(placements or ()) for placements in product.operands] == ["S(0)S(1)", "RS(0)"]
    moved = {plan.redistributions[n].tensor[0] for n in range(len(plan.redistributions)) if _is_all_to_all(plan, n)}
    assert any(key.startswith("layers.0.moe/") and "/fwd#" in key for key in moved)
    assert plan.collective_counts["forward"]["all_to_all@ep"] >= 2
    emerged = Emerged(bench.space, plan)
    assert emerged.work(1)["experts"] == {"experts": 1.0} and emerged.work(0)["experts"] == {"samples": 1.0}
    assert emerged.parameters(1)["experts"] > 0.5


def _is_all_to_all(plan: Plan, number: int) -> bool:
    steps = plan.redistributions[number].steps
    return any(step.collective is not None and step.collective.kind == "all_to_all" for step in steps)
