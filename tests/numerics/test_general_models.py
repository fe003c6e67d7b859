"""Models with one unusual thing each, from factory to verified file."""

import pytest

from planner.exporting.verify import export_verified
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.workbench import Workbench
from tests.numerics.exported import any_plan, optimum
from tests.planner.tracing.common import user_request

MODELS = (
    "tied_lm", "spare_parts", "named_inputs", "self_attention", "many_outputs", "named_loss", "checkpointed", "own_operator",
    "convolutions", "windows", "complex_rotation", "pickings", "writes",
)  # fmt: skip


def verified(factory: str, mesh: str, seeds: tuple[int, ...]) -> None:
    """Of the optimum (seed 0) and random legal plans."""
    bench = Workbench.build(trace(user_request(factory)), Mesh.parse(mesh))
    for seed in seeds:
        plan = any_plan(bench, seed) if seed else optimum(bench)
        numbers = export_verified(plan, bench.graph, None).report["numbers"]
        assert numbers["reference"]["largest_error"] <= 1e-5 and numbers["check"]["counts"] == "as planned"


@pytest.mark.parametrize("factory", ["own_operator", "convolutions", "checkpointed"])
def test_a_random_plan_equals_the_module(factory: str) -> None:
    verified(factory, "dp=2,tp=2", (1,))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2", "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("factory", MODELS)
def test_optimum_and_random_plan_on_one_to_three_axes(factory: str, mesh: str) -> None:
    verified(factory, mesh, (0, 2))
