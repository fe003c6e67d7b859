"""What is run before a recipe file is handed out: its numbers against the plain module, and its collectives beside the plan's.

Right numbers say nothing about fidelity: the counts are measured and told, never asserted equal. Runs
in processes of its own; imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ExportError
from planner.exporting.expressible import expressible
from planner.exporting.recipe_file import LABEL, FactorySource, refusal, write_recipe
from planner.exporting.verify import FULL_SIZE_LIMIT_BYTES, NOT_RUN, TIME_LIMIT_S, Export
from planner.graph import JointGraph
from planner.plan import Plan
from planner.redistribution import CollectiveKind
from planner.units import format_ms

Price = Callable[[CollectiveKind, tuple[int, ...], int, str], float]
"""µs of a collective: kind, mesh axes, bytes as in `planner.redistribution.Collective`, dtype."""


@dataclass(frozen=True)
class Issued:
    """One collective that the recipe's dry run saw on rank 0."""

    phase: str
    label: str
    num_bytes: int
    dtype: str


def export_recipe(
    plan: Plan,
    graph: JointGraph,
    tiny: JointGraph | None,
    source: FactorySource | None,
    price: Price,
    *,
    verify: bool = True,
    progress: Callable[[str], None] = lambda stage: None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Export:
    """Write the recipe of a plan, measure it, compare it with the user's module.

    Raises:
        ExportError: the plan is not expressible (with all reasons), or the file failed its comparison.
    """
    progress("write")
    found = expressible(plan, graph)
    if isinstance(found, list):
        raise refusal(plan, found)
    script = write_recipe(plan, graph, tiny, source)
    report: dict[str, Any] = {
        "plan_id": plan.plan_id, "format": "recipe", "label": LABEL, "differs": list(found.notes), "passed": None,
        "not_run": NOT_RUN,
    }  # fmt: skip
    if not verify:
        return Export(script=script, plan_json=plan.dumps(), report=report)
    progress("verify")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="recipe-") as folder:
        run = _Runner(Path(folder), script, began + time_limit_s)
        issued = run.dry_run()
        measured = difference_lines(plan, issued, price)
        report |= {"passed": True, "dry_run": measured, "numbers": run.numbers(graph, tiny)}
    script = write_recipe(plan, graph, tiny, source, measured)
    report["seconds"] = round(time.monotonic() - began, 2)
    return Export(script=script, plan_json=plan.dumps(), report=report)


def difference_lines(plan: Plan, issued: Sequence[Issued], price: Price) -> list[str]:
    """Collectives of the recipe beside the plan's, phase by phase, and the predicted time of both."""
    lines = []
    for phase, planned in plan.collective_counts.items():
        counts = Counter(one.label for one in issued if one.phase == phase)
        told = [f"{label} {counts[label]} (plan {planned.get(label, 0)})" for label in sorted({*counts, *planned})]
        lines.append(f"{phase}: {', '.join(told) or 'no collectives'}")
    axes = {name: axis for axis, name in enumerate(plan.mesh.axis_names)}
    ours = 0.0
    for one in issued:
        kind, _, names = one.label.partition("@")
        ours += price(CollectiveKind(kind), tuple(axes[name] for name in names.split("+")), one.num_bytes, one.dtype)
    theirs = sum(step.us for r in plan.redistributions for step in r.steps if step.collective is not None)
    return [
        *lines,
        f"predicted time of these collectives one after the other: recipe {format_ms(ours)}, plan {format_ms(theirs)}",
    ]


_CHECK = re.compile(
    r"check mesh \((?P<mesh>[\d, ]+)\): loss (?P<loss>\S+) max\|dloss\| (?P<dloss>\S+), "
    r"(?P<grads>\d+) grads max err (?P<error>\S+) \((?P<worst>\S*), rank (?P<rank>\d+)\) -> (?P<verdict>PASS|FAIL)"
)


@dataclass(frozen=True)
class _Runner:
    folder: Path
    script: str
    deadline: float

    def __post_init__(self) -> None:
        self.file.write_text(self.script)

    @property
    def file(self) -> Path:
        return self.folder / "recipe.py"

    def dry_run(self) -> list[Issued]:
        log = self.folder / "collectives.json"
        done = self._run("--dry-run", "--log-json", str(log))
        if done.returncode or not log.exists():
            raise _failure("its --dry-run", done)
        found: Mapping[str, list[list[Any]]] = json.loads(log.read_text())
        return [Issued(phase, *one) for phase, calls in found.items() for one in calls]

    def numbers(self, graph: JointGraph, tiny: JointGraph | None) -> dict[str, Any] | str:
        written = sum(meta.num_bytes for node in graph.nodes for meta in node.outputs if meta is not None)
        if tiny is None and written >= FULL_SIZE_LIMIT_BYTES:
            return "not compared: the model has no small size, and a step at full size is too large to run here"
        done = self._run("--check")
        match = _CHECK.search(done.stdout)
        if done.returncode or match is None:
            raise _failure("comparing it with the plain module", done)
        return {
            "recipe": {
                "mesh": match["mesh"], "loss": float(match["loss"]), "loss_difference": float(match["dloss"]),
                "gradients": int(match["grads"]), "largest_error": float(match["error"]), "worst_parameter": match["worst"],
                "counts": "as measured above",
            }
        }  # fmt: skip

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(part for part in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")) if part)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        left = max(1.0, self.deadline - time.monotonic())
        command = [sys.executable, str(self.file), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=left, check=False, env=environment)
        except subprocess.TimeoutExpired as error:
            raise ExportError(
                f"verifying the recipe took longer than its time limit (recipe.py {arguments[0]})",
                hint="Export with fewer layers, or with --no-verify and run the file's --check yourself.",
            ) from error


def _failure(what: str, done: subprocess.CompletedProcess[str]) -> ExportError:
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    telling = [line for line in lines if "FAIL" in line or "Error" in line]
    return ExportError(
        f"the recipe failed at {what}: {(telling or lines or ['no output'])[-1]}",
        hint="Nothing was written. DTensor or FSDP cannot run this model this way; export it as a script, which runs any plan.",
        details={"output": "\n".join(lines[-60:]), "returncode": done.returncode},
    )
