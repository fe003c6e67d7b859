"""`show`: what a plan decides and costs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from planner.commands.describe import as_dict, details
from planner.plan import Plan


def add(commands: Any) -> None:
    command = commands.add_parser("show", help="what a plan decides and costs")
    command.add_argument("plan", type=Path)
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan = Plan.load(args.plan)
    print(json.dumps(as_dict(plan), indent=1) if args.json else details(plan))
    return 0
