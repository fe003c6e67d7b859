"""`accuracy`: score the planner's numbers against a folder of measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from planner.commands.common import say


def add(commands: Any) -> None:
    command = commands.add_parser("accuracy", help="score predictions against a folder of measurements (CSV)")
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("--json", action="store_true", help="the whole result as JSON")
    command.add_argument("--worst", type=int, default=3, metavar="N", help="how many of the worst rows to print per category")
    command.add_argument(
        "--time-limit", type=float, default=18.0, metavar="MIN", help="rows of training runs not reached by then are skipped"
    )
    command.add_argument("--workers", type=int, metavar="N", help="processes that plan rows of training runs (default: cores)")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from planner.accuracy.report import as_json, as_text
    from planner.accuracy.score import score_folder

    found = score_folder(args.folder, progress=say, workers=args.workers, limit_s=60 * args.time_limit)
    if args.json:
        print(json.dumps(as_json(found.rows, found.unknown_files, found.unreadable), indent=1))
    else:
        print(as_text(found.rows, found.unknown_files, found.unreadable, worst_rows=args.worst))
    return 0
