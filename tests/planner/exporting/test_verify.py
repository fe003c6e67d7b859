"""Verification of the hand-made step, with a reference written in plain torch: small, so it runs in seconds."""

import sys
from pathlib import Path

import pytest

from planner.errors import ExportError
from planner.exporting.report import report_lines
from planner.exporting.verify import Export, export_verified, verify_script
from tests.planner.exporting.small_plan import small_graph, small_plan

TINY = {"batch": 20, "dim": 12, "size": "tiny"}

REFERENCE = """
import sys, torch
request, values, out = sys.argv[1:]
given = torch.load(values, weights_only=True)
weights = {name: value.requires_grad_() for name, value in given["parameters"].items()}
x = given["inputs"]["x"]
for weight in weights.values():
    x = x @ weight.t()
loss = FACTOR * (x * x).sum() / len(x)
loss.backward()
torch.save({"loss": loss.detach(), "grads": {name: w.grad for name, w in weights.items()}}, out)
"""


def reference(folder: Path, factor: float = 1.0) -> tuple[str, str]:
    path = folder / "reference.py"
    path.write_text(REFERENCE.replace("FACTOR", repr(factor)))
    return sys.executable, str(path)


def exported(folder: Path, factor: float = 1.0, layers: int = 2, **options: float) -> Export:
    graph = small_graph(layers=layers)
    tiny = small_graph(layers=layers, **TINY)
    return export_verified(small_plan(graph), graph, tiny, reference=reference(folder, factor), **options)  # type: ignore[arg-type]


@pytest.mark.own_processes
def test_a_right_file_is_handed_out_with_its_evidence(tmp_path: Path) -> None:
    stages: list[str] = []
    graph = small_graph(layers=3)
    plan = small_plan(graph)
    found = export_verified(plan, graph, small_graph(layers=3, **TINY), progress=stages.append, reference=reference(tmp_path))
    assert stages == ["write", "verify"]
    assert found.report["passed"] is True and found.plan_json == plan.dumps()
    for what in ("check", "reference"):
        numbers = found.report["numbers"][what]
        assert numbers["gradients"] == 3 and numbers["largest_error"] <= 1e-5 and numbers["counts"] == "as planned"
    assert len(found.report["dry_run"]) == 2
    assert any("the model itself" in line for line in report_lines(found.report))


def test_a_file_that_computes_something_else_is_refused_by_parameter(tmp_path: Path) -> None:
    with pytest.raises(ExportError) as caught:
        exported(tmp_path, factor=1.001)
    assert "user's module" in caught.value.message
    assert "gradient of layers.0.fc.weight differs" in caught.value.details["output"]


def test_a_file_with_other_collectives_is_refused(tmp_path: Path) -> None:
    """All-reduce and cut instead of reduce-scatter: right numbers, not the plan."""
    graph = small_graph()
    tiny = small_graph(**TINY)
    text = export_verified(small_plan(graph), graph, tiny, verify=False).script
    other = text.replace("(d_fc_weight, P, S0)", "(d_fc_weight, P, R, S0)")
    other = other.replace("(d_fc_weight__s0, P, S0)", "(d_fc_weight__s0, P, R, S0)")
    assert other != text
    with pytest.raises(ExportError, match=r"all_reduce@dp|planned|FAIL"):
        verify_script(other, graph, tiny, reference=reference(tmp_path))


def test_a_reference_that_fails_is_reported(tmp_path: Path) -> None:
    graph = small_graph()
    with pytest.raises(ExportError, match="running the user's module"):
        export_verified(small_plan(graph), graph, small_graph(**TINY), reference=(sys.executable, "-c", "raise SystemExit(3)"))


@pytest.mark.own_processes
def test_a_time_limit_ends_verification(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="longer than its time limit"):
        exported(tmp_path, time_limit_s=1.0)


def test_without_verification_the_report_says_so() -> None:
    graph = small_graph()
    found = export_verified(small_plan(graph), graph, None, verify=False)
    assert found.report["passed"] is None
    assert report_lines(found.report) == ("not checked",)
