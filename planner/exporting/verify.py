"""What the exporter owes its user before it hands out a file: the file was run, and compared with the user's own module.

Everything runs in processes of their own with a time limit; this module imports no torch. Four runs:

    train.py --values V             the parameters and inputs of the check
    reference V -> R                loss and gradients of the user's module with them, plain autograd, one process, fp32
    train.py --check --reference R  threads as ranks: against the file's own single-rank run, against R, and the counts
    train.py --dry-run              full sizes, first and last rank of the real mesh: shapes and counts

The check alone could not see an error in the traced graph: it compares the file with itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ExportError
from planner.exporting.running import NOT_COMPARED, NOT_RUN, TIME_LIMIT_S, FileRunner, can_compare, output_lines
from planner.exporting.script import Outlook, write_script
from planner.graph import JointGraph
from planner.plan import Plan

REFERENCE = (sys.executable, "-m", "planner.tracing.reference")
"""Command that computes the truth; it gets three paths: request, values, result."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A verified file.

    Attributes:
        script: the training file.
        plan_json: the plan, to lie beside it.
        report: what was run and its numbers; `passed` is None where verification was not asked for.
    """

    script: str
    plan_json: str
    report: dict[str, Any]


def export_verified(
    plan: Plan,
    graph: JointGraph,
    tiny: JointGraph | None,
    *,
    verify: bool = True,
    embed_plan: bool = False,
    outlook: Outlook | None = None,
    progress: Callable[[str], None] = lambda stage: None,
    reference: Sequence[str] = REFERENCE,
    time_limit_s: float = TIME_LIMIT_S,
) -> Export:
    """Write the file of a plan, with the plan inside it if asked, and verify it.

    Raises:
        ExportError: an op that cannot be written, or a file that failed: with the first difference found.
    """
    progress("write")
    script = write_script(plan, graph, tiny, embed_plan=embed_plan, outlook=outlook)
    report: dict[str, Any] = {"plan_id": plan.plan_id, "passed": None, "not_run": NOT_RUN}
    if verify:
        progress("verify")
        report |= verify_script(script, graph, tiny, reference=reference, time_limit_s=time_limit_s)
    return Export(script=script, plan_json=plan.dumps(), report=report)


def verify_script(
    script: str,
    graph: JointGraph,
    tiny: JointGraph | None,
    *,
    reference: Sequence[str] = REFERENCE,
    time_limit_s: float = TIME_LIMIT_S,
) -> dict[str, Any]:
    """Run a file's checks and compare it with the user's module -> numbers. Raises ExportError if any fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        runner = FileRunner(Path(folder) / "train.py", script, began + time_limit_s, _users_folder(graph.request.model))
        with ThreadPoolExecutor(1) as other:
            dry = other.submit(_dry_run, runner)
            compared = can_compare(graph, tiny)
            numbers = _compared(runner, graph if tiny is None else tiny, reference) if compared else NOT_COMPARED
            report: dict[str, Any] = {"passed": True, "dry_run": dry.result(), "numbers": numbers}
    report["seconds"] = round(time.monotonic() - began, 2)
    return report


def _users_folder(model: str) -> str:
    path, colon, _ = model.rpartition(":")
    return str(Path(path).resolve().parent) if colon and path.endswith(".py") else ""


_CHECK = re.compile(
    r"(?P<what>check|reference) mesh \((?P<mesh>[\d, ]+)\): loss (?P<loss>\S+) max\|dloss\| (?P<dloss>\S+), "
    r"(?P<grads>\d+) grads(, (?P<buffers>\d+) buffers)? max err (?P<error>\S+) \((?P<worst>\S*), rank (?P<rank>\d+)\), "
    r"counts (?P<counts>.*?) -> (?P<verdict>PASS|FAIL)"
)
_DRY = re.compile(r"dry-run rank (?P<rank>\d+)/(?P<world>\d+): .* -> (?P<verdict>PASS|FAIL)")


def _dry_run(runner: FileRunner) -> list[str]:
    """The printed lines."""
    done = runner.run("--dry-run")
    found = [match[0] for match in _DRY.finditer(done.stdout)]
    if done.returncode or not found:
        raise _failure("its --dry-run", done)
    return found


def _compared(runner: FileRunner, graph: JointGraph, reference: Sequence[str]) -> dict[str, Any]:
    """With the file's own single-rank run and with the user's module."""
    values, result, asked = (runner.file.with_name(name) for name in ("values.pt", "reference.pt", "request.json"))
    asked.write_text(json.dumps({"request": graph.request.to_json(), "dropouts": graph.dropouts}))
    done = runner.run("--values", str(values))
    if done.returncode:
        raise _failure("writing its initial values", done)
    done = runner.command([*reference, str(asked), str(values), str(result)])
    if done.returncode:
        raise _failure("running the user's module", done)
    done = runner.run("--check", "--reference", str(result))
    found: dict[str, list[dict[str, str]]] = {}
    for match in _CHECK.finditer(done.stdout):
        found.setdefault(match["what"], []).append(match.groupdict())
    if done.returncode or set(found) != {"check", "reference"}:
        raise _failure("comparing it with the user's module", done)
    return {what: _numbers(runs) for what, runs in found.items()}


def _failure(what: str, done: subprocess.CompletedProcess[str]) -> ExportError:
    lines = output_lines(done)
    telling = [line for line in lines if "FAIL" in line or "differ" in line or "planned" in line or "Error" in line]
    return ExportError(
        f"the exported file failed at {what}: {(telling or lines or ['no output'])[0]}",
        hint="Nothing was written. This is a fault of the exporter or of the trace; the details hold the full output.",
        details={"output": "\n".join(lines[-60:]), "returncode": done.returncode},
    )


def _numbers(runs: list[dict[str, str]]) -> dict[str, Any]:
    """The worst of the runs on several meshes."""
    worst = max(runs, key=lambda groups: float(groups["error"]))
    return {
        "mesh": "; ".join(groups["mesh"] for groups in runs),
        "loss": float(worst["loss"]),
        "loss_difference": max(float(groups["dloss"]) for groups in runs),
        "gradients": int(worst["grads"]),
        "buffers": int(worst["buffers"] or 0),
        "largest_error": float(worst["error"]),
        "worst_parameter": worst["worst"],
        "counts": worst["counts"],
    }
