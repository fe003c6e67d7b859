"""Mesh sweeps: which shapes, what each comes to, files that can be gone on with."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import InputError, PlanFormatError
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.sweep import Entry, SweepFile, SweepProgress, SweepRequest, meshes, pareto, ragged, sweep
from planner.workbench import Workbench

REQUEST = SweepRequest(model=ModelRequest(model="llama3-tiny", layers=1, batch=8), devices=8, axes=(1, 2))


@pytest.fixture(scope="module")
def graph() -> JointGraph:
    return trace(REQUEST.model)


@pytest.fixture(scope="module")
def entries(graph: JointGraph) -> list[Entry]:
    return [entry for entry, _ in sweep(REQUEST, graph)]


def entry(mesh: str, us: float, num_bytes: int) -> Entry:
    return Entry(mesh=mesh, status="optimal", objective_us=us, peak_bytes=num_bytes)


# ---- shapes -----------------------------------------------------------------------------------------------------------
def test_every_ordered_factorisation_once() -> None:
    found = meshes(64)
    sizes = [mesh.axis_sizes for mesh in found]
    assert len(set(sizes)) == len(sizes) == 1 + 5 + 10
    assert all(math.prod(s) == 64 and min(s) > 1 for s in sizes)
    assert {mesh.axis_names for mesh in found} == {("dp",), ("dp", "tp"), ("dp", "mp", "tp")}
    assert [m.axis_sizes for m in meshes(12, (2, 2))] == [(6, 2), (4, 3), (3, 4), (2, 6)]
    assert [str(m) for m in meshes(7)] == ["dp=7"]


@pytest.mark.parametrize(("devices", "axes"), [(1, (1, 3)), (8, (0, 2)), (8, (3, 1)), (8, (1, 9)), (7, (2, 3))])
def test_no_mesh_is_refused(devices: int, axes: tuple[int, int]) -> None:
    with pytest.raises(InputError) as refused:
        meshes(devices, axes)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("mesh", "per_node", "is_ragged"),
    [("dp=8,tp=8", 8, False), ("dp=4,tp=16", 8, False), ("dp=8,tp=3", 8, True), ("dp=2,tp=12", 8, True), ("dp=6", 8, False)],
)
def test_axes_that_run_ragged_over_nodes(mesh: str, per_node: int, is_ragged: bool) -> None:
    assert bool(ragged(Mesh.parse(mesh), per_node)) == is_ragged


# ---- entries ----------------------------------------------------------------------------------------------------------
def test_each_entry_is_what_planning_that_mesh_gives(graph: JointGraph, entries: list[Entry]) -> None:
    assert [e.mesh for e in entries] == ["dp=8", "dp=4,tp=2", "dp=2,tp=4"]
    for found in entries:
        bench = Workbench.build(graph, Mesh.parse(found.mesh))
        plan = bench.solve(bench.default_constraints(), checkpoint="auto")
        assert (found.objective_us, found.peak_bytes, found.plan_id) == (plan.objective_us, plan.memory.peak_bytes, plan.plan_id)
        assert found.status == plan.report.status == "optimal"


def test_what_cannot_be_is_an_entry_with_the_reason() -> None:
    request = replace(REQUEST, model=replace(REQUEST.model, batch=4), memory_bytes=10**6)
    found = {e.mesh: e for e, plan in sweep(request, trace(request.model)) if plan is None}
    assert found["dp=8"].status == "indivisible" and "batch of 4" in found["dp=8"].reason
    assert found["dp=4,tp=2"].status == "infeasible" and "memory budget" in found["dp=4,tp=2"].reason
    uneven = replace(REQUEST, gpus_per_node=6, axes=(2, 2))
    assert {e.status for e, _ in sweep(uneven, trace(REQUEST.model), done=("dp=4,tp=2",))} == {"indivisible"}


def test_progress_and_cancel(graph: JointGraph) -> None:
    told: list[SweepProgress] = []
    first = next(iter(sweep(REQUEST, graph, progress=told.append)))[0]
    assert first.mesh == "dp=8" and {"begin", "enumerate", "estimate", "solve"} <= {now.stage for now in told}
    assert all(now.total == 3 and now.done == 0 and now.mesh == "dp=8" for now in told)
    assert any(math.isfinite(now.value_us) and now.bound_us <= now.value_us * (1 + 1e-9) for now in told)
    assert list(sweep(REQUEST, graph, cancelled=lambda: True)) == []
    assert [e.mesh for e, _ in sweep(REQUEST, graph, done={"dp=8", "dp=4,tp=2"})] == ["dp=2,tp=4"]


def test_pareto_front() -> None:
    found = [entry("a", 10, 50), entry("b", 12, 40), entry("c", 13, 45), entry("d", 20, 10), entry("e", 10, 60)]
    found.append(Entry(mesh="f", status="infeasible", reason="too big"))
    assert pareto(found) == ("a", "b", "d")
    assert pareto([]) == ()


# ---- files ------------------------------------------------------------------------------------------------------------
def test_resume_does_only_what_is_left(
    graph: JointGraph, entries: list[Entry], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph.save(tmp_path / "graph.json.gz")
    path = tmp_path / "sweep.json"
    asked = ["sweep", "llama3-tiny", "--devices", "8", "--graph", str(tmp_path / "graph.json.gz"), "-o", str(path)]
    (tmp_path / "plans").mkdir()
    assert main([*asked, "--axes", "1", "--plans", str(tmp_path / "plans")]) == 0
    assert (tmp_path / "plans" / "dp8.plan.json").exists()
    capsys.readouterr()
    assert main([*asked, "--axes", "1..2"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*asked, "--axes", "1..2", "--resume", "--json"]) == 0
    shown = capsys.readouterr()
    assert "1/3 dp=4,tp=2" in shown.err and "dp=8" not in shown.err
    data = json.loads(shown.out)
    assert {e["mesh"]: e["objective_us"] for e in data["entries"]} == {e.mesh: e.objective_us for e in entries}
    assert data["pareto"] == list(pareto(entries))
    for other in (["--memory", "10GiB"], ["--optimizer", "sgd"], ["--hardware", "a100_80gb"]):
        before = path.read_bytes()
        assert main([*asked, "--resume", *other]) == 2
        assert "was made with another" in capsys.readouterr().err
        assert path.read_bytes() == before


def test_a_changed_model_is_refused(graph: JointGraph, tmp_path: Path) -> None:
    begun = SweepFile.begin(REQUEST, graph, "hash").add(entry("dp=8", 1, 1))
    begun.save(tmp_path / "s.json")
    loaded = SweepFile.load(tmp_path / "s.json")
    assert loaded.entries == begun.entries
    other = SweepFile.begin(REQUEST, trace(replace(REQUEST.model, seq=64)), "hash")
    with pytest.raises(InputError, match="another model"):
        loaded.resumed(other, tmp_path / "s.json")
    with pytest.raises(InputError, match="another hardware_hash"):
        loaded.resumed(SweepFile.begin(REQUEST, graph, "other"), tmp_path / "s.json")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"sweep": 99}', '{"sweep": 1, "entries": [{}]}', '{"sweep": 1, "identity": {}, "entries": 3}']
)
def test_damaged_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(PlanFormatError):
        SweepFile.load(tmp_path / "s.json")


@pytest.mark.parametrize(
    "flags",
    [["--axes", "x"], ["--axes", "3..1"], ["--devices", "0"], ["--resume"], ["--plans", "/nowhere"], ["--memory", "lots"]],
)
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "llama3-tiny", "--layers", "1", "--devices", "4", *flags]) == 2
    assert "hint: " in capsys.readouterr().err
