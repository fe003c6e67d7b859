"""The command line: one command is one API call. Bad input: one message with a hint on stderr, exit code 2, no file written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from planner.commands import accuracy, diff, explain, export, models, plan, show, sweep
from planner.errors import InfeasibleError, PlannerError

BAD_INPUT, STOPPED = 2, 130
COMMANDS = (models, plan, show, explain, diff, sweep, export, accuracy)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except InfeasibleError as error:
        lines = [error.explain(), *(f"  conflict: {c}" for c in error.conflicts)]
        print("error: " + "\n".join(lines), file=sys.stderr)
        return BAD_INPUT
    except PlannerError as error:
        print(f"error: {error.explain()}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("stopped; files are written whole or not at all", file=sys.stderr)
        return STOPPED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m planner", description="Plan how a training model is sharded over a mesh.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
