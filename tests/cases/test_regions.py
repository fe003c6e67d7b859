"""User-controlled regions: one op per phase under the user's contract, run in the exported file, refused if wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.commands.describe import details
from planner.enumerating.enumerate import enumerate_strategies
from planner.errors import ExportError, InputError, TraceError
from planner.exporting.script import write_script
from planner.exporting.verify import export_verified
from planner.graph import JointGraph, ModelRequest, Node, TensorRef
from planner.mesh import Mesh
from planner.plan import Plan
from planner.region import REGION, REGION_BACKWARD, Region
from planner.tracing.trace import trace
from planner.workbench import Workbench
from tests.cases.test_soundness import rows
from tests.oracles.random_plan import random_plan
from tests.oracles.strategies import wrong_strategies
from tests.planner.tracing.common import largest_error

FILE = Path(__file__).with_name("regions.py")


@pytest.fixture(autouse=True)
def _beside_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph names the region's module as an exported file imports it: from the folder of the user's file."""
    monkeypatch.syspath_prepend(str(FILE.parent))


def request(name: str) -> ModelRequest:
    return ModelRequest(model=f"{FILE}:{name}", precision="as-traced")


def region_nodes(graph: JointGraph) -> tuple[Node, Node]:
    (forward,) = (node for node in graph.nodes if node.op == REGION)
    (backward,) = (node for node in graph.nodes if node.op == REGION_BACKWARD)
    return forward, backward


def optimum(graph: JointGraph, mesh: str) -> Plan:
    bench = Workbench.build(graph, Mesh.parse(mesh))
    return bench.solve(bench.default_constraints())


# ---- tracing --------------------------------------------------------------------------------------------------------------
def test_a_region_is_one_op_per_phase_named_by_its_function() -> None:
    graph = trace(request("positions_exchanged"))
    forward, backward = region_nodes(graph)
    assert (forward.key, backward.key) == ("region_attend/fwd#0", "region_attend_backward/bwd#0")
    assert forward.source.startswith("regions.py:") and len(forward.operands) == 3
    assert not any("attention" in node.op or "softmax" in node.op for node in graph.nodes), "the inside is not looked into"
    assert graph.saved_for_backward and forward.flops == 4 * 8 * 8 * 16 * 16 * 4 / 2, (
        "two products of [8, 8, 16, 16] by 4, causal"
    )
    assert backward.flops > 3 * forward.flops, "the forward again, and its gradients"


@pytest.mark.parametrize("name", ["positions_exchanged", "several_outputs", "decorated"])
def test_the_traced_graph_equals_autograd(name: str) -> None:
    assert largest_error(request(name)) < 1e-5


def test_constants_and_outputs_of_every_kind() -> None:
    graph = trace(request("several_outputs"))
    forward, _ = region_nodes(graph)
    region = Region.loads(forward.args[0])
    assert region.module == "regions" and region.constants == ((2, 0.25),) and region.keywords == (("power", 3),)
    assert [meta.dtype for meta in forward.outputs if meta] == ["float32", "int64", "float32"]
    assert region.axes is None and region.collectives is None


def test_the_contract_survives_a_saved_graph(tmp_path: Path) -> None:
    graph = trace(request("positions_exchanged"))
    graph.save(tmp_path / "graph.json.gz")
    again = JointGraph.load(tmp_path / "graph.json.gz")
    assert again.fingerprint == graph.fingerprint
    assert Region.loads(region_nodes(again)[0].args[0]) == Region.loads(region_nodes(graph)[0].args[0])


# ---- candidates -----------------------------------------------------------------------------------------------------------
def test_the_named_axis_takes_its_row_and_others_what_is_allowed_elsewhere() -> None:
    graph = trace(request("positions_exchanged"))
    space = enumerate_strategies(graph, Mesh.parse("dp=2,cp=2"))
    forward, backward = region_nodes(graph)
    assert rows(space, forward) == {("S(0)S(1)",) * 4, ("RS(1)",) * 4}
    assert rows(space, backward) == {("S(0)S(1)",) * 5, ("RS(1)",) * 5}


@pytest.mark.parametrize("mesh", ["rows=4", "rows=2"])
def test_rows_without_communication_are_sound(mesh: str) -> None:
    wrong, tried = wrong_strategies(enumerate_strategies(trace(request("several_outputs")), Mesh.parse(mesh)))
    assert tried > 30 and not wrong, "\n".join(wrong)


def test_gradients_are_placed_as_the_contract_says() -> None:
    graph = trace(request("several_outputs"))
    space = enumerate_strategies(graph, Mesh.parse("rows=4"))
    _, backward = region_nodes(graph)
    strategies = space.strategies[graph.node_by_key[backward.key]]
    assert len(strategies) == 1
    refs = [TensorRef(graph.node_by_key[backward.key], output) for output in range(2)]
    placed = [space.lattice(ref).text(int(strategies.output(ref.output)[0])) for ref in refs]
    assert placed == ["S(0)", "P"]
    arriving = [space.lattice(ref).text(int(strategies.operand(slot)[0])) for slot, ref in enumerate(backward.operands[:2])]
    assert arriving == ["S(0)", "R"], "the gradient of a pending sum is whole"


@pytest.mark.parametrize("name, mesh, message", [
    ("positions_exchanged", "dp=2,tp=2", r"regions.attend names the mesh axis cp, which the mesh dp=2,tp=2 does not have"),
    ("positions_exchanged", "cp=3", r"attend cannot run on the mesh cp=3.*dim 1 of size 16 does not divide by cp=3; nearest"),
    ("several_outputs", "dp=2,tp=2", r"states placements for 1 mesh axes by position, the mesh dp=2,tp=2 has 2"),
])  # fmt: skip
def test_a_contract_that_does_not_fit_the_mesh_is_refused(name: str, mesh: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        enumerate_strategies(trace(request(name)), Mesh.parse(mesh))


@pytest.mark.parametrize("name, message", [
    ("nameless", "cannot be imported by an exported file: it is a lambda"),
    ("inside_another", "the region hidden .* cannot be imported"),
    ("of_a_class", "the region inside .* cannot be imported"),
    ("beyond_its_dims", r"splits argument 0 along dim 2, but it has the shape \(8, 12\)"),
    ("too_many_outputs", "states out_placements for 2 outputs and returns 1"),
    ("too_few_arguments", "states in_placements for 1 arguments and is called with 2|fails on whole tensors"),
    ("placed_nowhere", "states no in_placements"),
    ("pending_maximum", "places argument 0 as Partial"),
    ("noise_inside", "draws random numbers"),
    ("writes_its_argument", "changes an argument in place"),
    ("unknown_fact", r"plan_regions\(\) returns"),
    ("unknown_collective", "states the collective 'broadcast@tp'"),
    ("two_axes_named", "places tensors on 1 mesh axes, and names 2"),
])  # fmt: skip
def test_a_wrong_contract_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(TraceError, match=message) as refused:
        trace(request(name))
    assert refused.value.hint


# ---- prices and plans -----------------------------------------------------------------------------------------------------
def test_stated_communication_is_priced_and_the_unknown_is_said() -> None:
    silent, stated = (
        optimum(trace(request(name)), mesh) for name, mesh in (("positions_exchanged", "cp=4"), ("rows_over_tp", "tp=4"))
    )
    assert "communication inside unknown" in next(iter(silent.regions.values()))
    assert "no communication inside (stated)" in next(iter(stated.regions.values()))
    assert "user-controlled region x1: regions.attend, cp: S(1), S(1), S(1) -> S(1)" in details(silent)
    assert Plan.from_json(silent.to_json()).regions == silent.regions


def test_stated_bytes_are_shared_by_the_devices_that_split_the_region() -> None:
    """4 GB gathered over 4 devices: each moves 1 GB, in forward, and once more where backward runs it again."""
    graph = trace(request("decorated"))
    bench = Workbench.build(graph, Mesh.parse("tp=4"))
    forward, backward = region_nodes(graph)
    kernel = bench.space.strategies[graph.node_by_key[forward.key]].kernel
    assert kernel.fields["sent"] == (("all_gather", (0,)),) and kernel.dims["sent_bytes"].tolist() == [[1e9]]
    plan = bench.solve(bench.default_constraints())
    silent = optimum(trace(request("rows_over_tp")), "tp=4")
    for key, other in ((forward.key, "region_double/fwd#0"), (backward.key, "region_double_backward/bwd#0")):
        assert plan.choices[key].compute_us > silent.choices[other].compute_us + 1e9 / 1e6, "no link carries 1 TB/s"


def test_a_sample_states_what_it_sends() -> None:
    graph = trace(ModelRequest(model="moe-region-tiny", layers=1))
    plan = optimum(graph, "ep=4")
    (line,) = plan.regions.values()
    assert re.search(r"inside all_to_all@ep of 0.0105 GB \(stated\)", line)
    forward, backward = region_nodes(graph)
    assert plan.choices[backward.key].compute_us > plan.choices[forward.key].compute_us


# ---- exported files -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, mesh, seed",
    [("positions_exchanged", "dp=2,cp=2", None), pytest.param("several_outputs", "rows=4", 1, marks=pytest.mark.slow)],
)
def test_the_exported_file_runs_the_users_function(name: str, mesh: str, seed: int | None) -> None:
    graph = trace(request(name))
    bench = Workbench.build(graph, Mesh.parse(mesh))
    plan = bench.solve(bench.default_constraints()) if seed is None else random_plan(bench.costs, seed)
    export = export_verified(plan, graph, None)
    function = {"positions_exchanged": "attend", "several_outputs": "scores_and_best"}[name]
    assert f"    from regions import {function} as REGION_{function}\n" in export.script
    assert "communication inside: unknown, not in the predicted time" in export.script
    numbers = export.report["numbers"]
    assert numbers["reference"]["largest_error"] <= 1e-5 and numbers["check"]["counts"] == "as planned"


def test_a_file_without_the_users_module_says_so(tmp_path: Path) -> None:
    graph = trace(request("several_outputs"))
    script = write_script(optimum(graph, "rows=4"), graph, None)
    assert "Needs PyTorch 2.13.x and regions, whose functions it runs." in script
    with pytest.raises(SystemExit, match="runs functions of nowhere_to_be_found"):
        exec(re.sub(r"(from|functions of) regions\b", r"\1 nowhere_to_be_found", script), {"__name__": "exported"})


@pytest.mark.parametrize("name, message", [
    ("shape_against_contract", r"output 0 of first_rows is \[2, 12\] on this rank; by the contract .* it is \[1, 12\]"),
    pytest.param("rows_that_depend_on_each_other", "differs|FAIL", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_contract_that_the_function_does_not_keep_is_found_before_a_file_is_handed_out(name: str, message: str) -> None:
    graph = trace(request(name))
    with pytest.raises(ExportError, match=message):
        export_verified(optimum(graph, "tp=4"), graph, None)
