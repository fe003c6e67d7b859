"""What several commands share: progress lines on stderr, output files that are whole or not there, loading models apart."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from planner import loading
from planner.errors import InputError
from planner.pipeline import Tracer
from planner.units import format_ms

if TYPE_CHECKING:
    from planner.solving.solve import Progress as SolveProgress


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


class Watching:
    """A solve as the terminal sees it: where it stands, on stderr, once it takes long; and the first Ctrl-C, which ends it with
    the best plan so far. A second Ctrl-C, or one before the solve begins, ends the command."""

    QUIET_S, EVERY_S = 2.0, 1.0

    def __init__(self) -> None:
        self.stopped = False
        self._solving = False
        self._said = 0.0

    def stage(self, name: str) -> None:
        say(name)
        self._solving = name == "solve"

    def begin(self) -> None:
        """From now on Ctrl-C asks for what there is so far."""
        self._solving = True

    def told(self, now: SolveProgress) -> None:
        if now.seconds >= max(self.QUIET_S, self._said + self.EVERY_S):
            self._said = now.seconds
            print(f"  {standing(now)}", file=sys.stderr, flush=True)

    def cancelled(self) -> bool:
        return self.stopped

    @contextmanager
    def ctrl_c(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: object) -> None:
            if self.stopped or not self._solving:
                raise KeyboardInterrupt
            self.stopped = True
            print("stopping with the best plan so far ...", file=sys.stderr, flush=True)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def standing(now: SolveProgress) -> str:
    """`12 s, message passing: best 592.61 ms, at most 0.6 % above the optimum`"""
    text = f"{now.seconds:.0f} s, {now.method}: "
    if not math.isfinite(now.value_us):
        return f"{text}no plan yet"
    gap = (now.value_us - now.bound_us) / abs(now.value_us or 1.0)
    proof = f"at most {100 * gap:.2g} % above the optimum" if math.isfinite(gap) and gap > 1e-6 else "proved"
    return f"{text}best {format_ms(now.value_us)}, {proof if math.isfinite(now.bound_us) else 'no bound yet'}"


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
