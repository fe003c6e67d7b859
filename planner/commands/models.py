"""`models`: the sample models."""

from __future__ import annotations

import argparse
import json
from typing import Any

from planner import pipeline


def add(commands: Any) -> None:
    command = commands.add_parser("models", help="list the sample models")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = pipeline.models()
    if args.json:
        print(json.dumps([{"name": m.name, "description": m.description} for m in found], indent=1))
    else:
        for model in found:
            print(f"{model.name:14s} {model.description}")
        print(
            "Any other model: path/to/file.py:factory, program.pt2 (torch.export.save), hf:path/to/config.json or hf:ARCHITECTURE"
        )
    return 0
