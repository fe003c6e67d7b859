"""`diff`: what differs between two plans."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from planner import pipeline
from planner.errors import InputError
from planner.graph import without_layer
from planner.plan import Plan
from planner.units import format_gib, format_ms


def add(commands: Any) -> None:
    command = commands.add_parser("diff", help="what differs between two plans")
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    a, b = Plan.load(args.a), Plan.load(args.b)
    if a.mesh.num_axes != b.mesh.num_axes:
        raise InputError(f"the plans have different numbers of axes: {a.mesh} and {b.mesh}", hint="Compare plans on like meshes.")
    changes = pipeline.diff(a, b)
    if args.json:
        rows = [{"key": c.key, "before": c.before, "after": c.after} for c in changes]
        print(json.dumps({"objective_us": [a.objective_us, b.objective_us], "changes": rows}, indent=1))
        return 0
    for label, x, y, form in (
        ("step time", a.objective_us, b.objective_us, format_ms),
        ("compute", a.compute_us, b.compute_us, format_ms),
        ("communication", a.comm_us, b.comm_us, format_ms),
        ("memory", a.memory.peak_bytes, b.memory.peak_bytes, format_gib),
    ):
        print(f"{label:14s} {form(x):>14s} -> {form(y):>14s}  ({y - x:+,.0f} {'bytes' if label == 'memory' else 'us'})")
    if a.checkpointed != b.checkpointed:
        print(f"layers that run forward again in backward: {len(a.checkpointed)} -> {len(b.checkpointed)}")
    groups: dict[tuple[str, str | None, str | None], int] = {}
    for change in changes:
        group = (without_layer(change.key), change.before, change.after)
        groups[group] = groups.get(group, 0) + 1
    print(f"{len(changes)} tensors change placement")
    for (key, before, after), count in groups.items():
        print(f"  x{count:<3d} {key}  {before or '(absent)'} -> {after or '(absent)'}")
    return 0
