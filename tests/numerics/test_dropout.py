"""Exported files with dropout: on every mesh the masks of one device, and gradients of the same elements."""

import pytest

from planner.errors import ExportError
from planner.exporting.script import write_script
from planner.exporting.verify import export_verified, verify_script
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.workbench import Workbench
from tests.numerics.exported import any_plan, optimum
from tests.planner.tracing.common import user_request


def bench(factory: str, mesh: str) -> Workbench:
    return Workbench.build(trace(user_request(factory)), Mesh.parse(mesh))


def test_a_random_plan_drops_what_one_device_drops_and_no_other_mask_passes() -> None:
    found = bench("dropping", "dp=2,tp=2")
    plan = any_plan(found, 1)
    numbers = export_verified(plan, found.graph, None).report["numbers"]
    assert numbers["reference"]["largest_error"] <= 1e-5 and numbers["check"]["counts"] == "as planned"
    written = write_script(plan, found.graph, None)
    assert written.count("dropout_key(i)") + written.count("dropout_key(0)") >= 1
    own_masks = written.replace("begin = local.place.index(", "begin = 0 * local.place.index(")
    assert own_masks != written
    with pytest.raises(ExportError, match="comparing it with the user's module"):
        verify_script(own_masks, found.graph, None)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("factory", ["dropping", "dropping_checkpointed"])
def test_dropout_on_other_meshes(factory: str, mesh: str) -> None:
    found = bench(factory, mesh)
    for plan in (optimum(found), any_plan(found, 2)):
        assert export_verified(plan, found.graph, None).report["numbers"]["reference"]["largest_error"] <= 1e-5
