"""What is run before a recipe file is handed out: its numbers against the plain module, and its collectives beside the plan's.

Right numbers say nothing about fidelity: the counts are measured and told, never asserted equal. Runs
in processes of its own; imports no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
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
from planner.exporting.running import NOT_COMPARED, NOT_RUN, TIME_LIMIT_S, FileRunner, can_compare, output_lines
from planner.exporting.verify import Export
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
        runner = FileRunner(Path(folder) / "recipe.py", script, began + time_limit_s)
        measured = difference_lines(plan, _dry_run(runner), price)
        numbers = _compared(runner) if can_compare(graph, tiny) else NOT_COMPARED
        report |= {"passed": True, "dry_run": measured, "numbers": numbers}
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


def _dry_run(runner: FileRunner) -> list[Issued]:
    log = runner.file.with_name("collectives.json")
    done = runner.run("--dry-run", "--log-json", str(log))
    if done.returncode or not log.exists():
        raise _failure("its --dry-run", done)
    found: Mapping[str, list[list[Any]]] = json.loads(log.read_text())
    return [Issued(phase, *one) for phase, calls in found.items() for one in calls]


def _compared(runner: FileRunner) -> dict[str, Any]:
    """With the plain module, by the file itself."""
    done = runner.run("--check")
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


def _failure(what: str, done: subprocess.CompletedProcess[str]) -> ExportError:
    lines = output_lines(done)
    telling = [line for line in lines if "FAIL" in line or "Error" in line]
    return ExportError(
        f"the recipe failed at {what}: {(telling or lines or ['no output'])[-1]}",
        hint="Nothing was written. DTensor or FSDP cannot run this model this way; export it as a script, which runs any plan.",
        details={"output": "\n".join(lines[-60:]), "returncode": done.returncode},
    )
