"""What several commands share: progress lines on stderr, output files that are whole or not there, loading models apart."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from planner import loading
from planner.errors import InputError
from planner.pipeline import Tracer


def say(stage: str) -> None:
    print(f"{stage} ...", file=sys.stderr, flush=True)


def check_writable(path: Path | None) -> None:
    if path is not None and not path.resolve().parent.is_dir():
        raise InputError(f"there is no folder {path.resolve().parent} to write {path.name} in", hint="Make the folder first.")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: an old file keeps its bytes if anything fails."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def add_load_limit(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--load-limit",
        type=float,
        default=loading.LIMIT_S,
        metavar="SECONDS",
        help="longest time to load and trace a model that is not a sample; it runs in a process of its own",
    )


def tracer(args: argparse.Namespace) -> Tracer:
    if not args.load_limit > 0:
        raise InputError(f"--load-limit {args.load_limit:g} is not a time", hint="Give a number of seconds over 0.")
    return partial(loading.trace_apart, limit_s=args.load_limit)


@contextmanager
def only_answers_on_stdout() -> Iterator[None]:
    """While work is done, what libraries print (HiGHS says its name once) goes to stderr: stdout is for the answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
