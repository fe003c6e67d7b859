"""Exported files with buffers: first values at any size, values that a step writes, both compared with the user's module."""

import pytest

from planner.constraint import Pin
from planner.errors import ExportError
from planner.exporting.script import write_script
from planner.exporting.verify import export_verified, verify_script
from planner.graph import JointGraph
from planner.mesh import Mesh
from planner.pipeline import tiny_graph, trace
from planner.placement import Shard, text
from planner.workbench import Workbench
from tests.numerics.exported import any_plan, optimum
from tests.planner.tracing.common import user_request


def bench(factory: str, mesh: str = "dp=2,tp=2", precision: str = "as-traced") -> Workbench:
    return Workbench.build(trace(user_request(factory, precision)), Mesh.parse(mesh))


def verified(found: Workbench, seed: int, tiny: JointGraph | None = None) -> dict:
    """Of the optimum (seed 0) or a random legal plan."""
    plan = optimum(found) if seed == 0 else any_plan(found, seed)
    numbers: dict = export_verified(plan, found.graph, tiny).report["numbers"]
    assert numbers["reference"]["largest_error"] <= 1e-5 and numbers["check"]["counts"] == "as planned"
    return numbers


def test_first_values_are_computed_at_both_sizes() -> None:
    found = bench("tables")
    tiny = tiny_graph(found.graph)
    assert tiny is not None
    written = write_script(optimum(found), found.graph, tiny)
    assert "aten.arange.start_step(0, HD, 2, dtype=torch.int64)" in written
    assert "if OPTIONS.tiny else" in written, "literals differ in length"
    verified(found, 0, tiny)


@pytest.mark.parametrize(("factory", "buffers"), [("statistics", 6), ("averaged", 2)])
def test_written_buffers_are_those_of_the_module_after_a_step(factory: str, buffers: int) -> None:
    assert verified(bench(factory), 1)["reference"]["buffers"] == buffers


def test_statistics_keep_their_dtype_in_mixed_precision() -> None:
    assert verified(bench("statistics", precision="bf16-mixed"), 0)["reference"]["buffers"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("factory", ["tables", "statistics", "averaged", "few_numbers"])
def test_buffers_on_other_meshes(factory: str, mesh: str) -> None:
    found = bench(factory, mesh)
    for seed in (0, 2):
        verified(found, seed)


def test_a_buffer_lies_where_it_is_pinned_and_its_update_follows() -> None:
    found = bench("averaged", "dp=4")
    pin = Pin(where="layers.*.slow", placements=(Shard(1),))
    plan = found.solve((*found.default_constraints(), pin))
    assert {text(plan.choices[f"buffer:layers.{layer}.slow"].outputs[0] or ()) for layer in range(2)} == {"S(1)"}
    export_verified(plan, found.graph, None)


def test_a_wrong_update_or_first_value_is_not_handed_out() -> None:
    found = bench("averaged")
    written = write_script(optimum(found), found.graph, None)
    for old, new, what in (("0.1)", "0.2)", "user's module"), ("[16, 16], 0.0,", "[16, 16], 0.5,", "user's module")):
        assert old in written
        with pytest.raises(ExportError, match=what):
            verify_script(written.replace(old, new), found.graph, None)


def test_unknown_first_values_are_refused_by_name() -> None:
    found = bench("many_numbers")
    with pytest.raises(ExportError, match=r"first value of the buffer outside .*too many"):
        write_script(optimum(found), found.graph, None)
