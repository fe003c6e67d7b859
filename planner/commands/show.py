"""`show`: what a plan decides and costs; with its graph also how a step runs and what memory it needs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from planner import pipeline
from planner.actions import SCHEDULES
from planner.commands.common import check_writable, write_text
from planner.commands.describe import as_dict, details, forecast_text
from planner.errors import InputError
from planner.forecast import Forecasts
from planner.graph import JointGraph
from planner.plan import Plan


def add(commands: Any) -> None:
    command = commands.add_parser("show", help="what a plan decides and costs")
    command.add_argument("plan", type=Path)
    command.add_argument("--json", action="store_true")
    command.add_argument(
        "--graph",
        type=Path,
        metavar="graph.json.gz",
        help="the plan's saved graph (plan --save-graph): adds step time with overlap and peak memory with temporaries",
    )
    command.add_argument("--trace", type=Path, metavar="trace.json", help="write the timeline for chrome://tracing or Perfetto")
    command.add_argument("--schedule", choices=SCHEDULES, default="overlapped", help="whose timeline --trace writes")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.trace and not args.graph:
        raise InputError("--trace needs the plan's graph", hint="Save it with plan --save-graph and give it with --graph.")
    check_writable(args.trace)
    plan = Plan.load(args.plan)
    found = pipeline.forecasts(plan, JointGraph.load(args.graph)) if args.graph else None
    if found is not None and args.trace:
        chosen = found.serial if args.schedule == "serial" else found.overlapped
        write_text(args.trace, json.dumps(chosen.timeline.chrome_trace()))
    print(_json(plan, found) if args.json else _text(plan, found))
    return 0


def _json(plan: Plan, found: Forecasts | None) -> str:
    return json.dumps(as_dict(plan) | ({} if found is None else {"forecast": found.to_json()}), indent=1)


def _text(plan: Plan, found: Forecasts | None) -> str:
    return details(plan) if found is None else f"{forecast_text(found)}\n{details(plan)}"
