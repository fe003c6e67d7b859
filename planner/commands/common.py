"""What several commands share: progress lines on stderr, and a look at output folders before long work begins."""

from __future__ import annotations

import sys
from pathlib import Path

from planner.errors import InputError


def say(stage: str) -> None:
    print(f"{stage} ...", file=sys.stderr, flush=True)


def check_writable(path: Path | None) -> None:
    if path is not None and not path.resolve().parent.is_dir():
        raise InputError(f"there is no folder {path.resolve().parent} to write {path.name} in", hint="Make the folder first.")
