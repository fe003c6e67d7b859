"""Code that is not the planner's own runs in a process of its own: what it does there harms nothing else.

A model given as a file, a program or a config is loaded and traced by `python -m planner.tracing.apart`. If its code crashes,
exits or hangs, that is an error like any other; when the caller ends, whatever way, so does the process.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from planner import errors
from planner.errors import InputError, PlannerError, TraceError
from planner.graph import JointGraph, ModelRequest

LIMIT_S = 900.0
CHILD = (sys.executable, "-m", "planner.tracing.apart")


def is_foreign(request: ModelRequest) -> bool:
    """Whether loading the model runs code that is not part of this package."""
    return request.is_users_own or request.model.startswith("hf:")


def trace_apart(request: ModelRequest, repeated: tuple[int, ...] | None = None, *, limit_s: float = LIMIT_S) -> JointGraph:
    """As `pipeline.trace`; a model of others' code is loaded and traced in a process of its own, its output goes to stderr.

    Raises:
        PlannerError: what tracing raises there.
        TraceError: the process was ended by the model's code or from outside, or took longer than `limit_s` seconds.
    """
    if not is_foreign(request):
        trace_here = importlib.import_module("planner.tracing.trace").trace  # imports torch
        graph: JointGraph = trace_here(request, repeated)
        return graph
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        asked, made, outcome = (Path(folder) / name for name in ("request.json", "graph.json.gz", "outcome.json"))
        asked.write_text(json.dumps({"request": request.to_json(), "repeated": repeated}))
        code = _run([*CHILD, str(asked), str(made), str(outcome)], request, limit_s)
        if outcome.exists():
            raise error_of(json.loads(outcome.read_text()), request)
        if code or not made.exists():
            raise _ended(request, code)
        return JointGraph.load(made)


def _run(command: list[str], request: ModelRequest, limit_s: float) -> int:
    """The exit code. The process ends with this one: its standard input closes then."""
    path = os.pathsep.join(part for part in (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")) if part)
    stdout = sys.__stderr__ if sys.__stderr__ is not None else subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, env={**os.environ, "PYTHONPATH": path})
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise TraceError(
            f"{request.model} is not loaded and traced after {limit_s:g} s, and was stopped",
            hint="If its code is not waiting for something, give it longer (--load-limit) or fewer --layers.",
        ) from error
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _ended(request: ModelRequest, code: int) -> TraceError:
    if code < 0:
        name = signal.Signals(-code).name
        why = "which is what happens when memory runs out" if name == "SIGKILL" else "a crash in compiled code"
        return TraceError(
            f"the process that loads {request.model} was ended by {name} ({why})",
            hint="Run the factory in Python on its own; with fewer layers if memory is short.",
        )
    return TraceError(
        f"the code of {request.model} ended its process (exit code {code}) instead of returning a model",
        hint="It must not call exit or os._exit; run the factory in Python on its own to see where.",
    )


# ---- errors across the border ------------------------------------------------------------------------------------------


def error_as_json(error: Exception, traceback_text: str) -> dict[str, Any]:
    """What the child writes: the kind of a PlannerError and its texts, or what else went wrong."""
    if isinstance(error, PlannerError):
        details = {name: value for name, value in error.details.items() if isinstance(value, str | int | float | list)}
        return {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "details": details}
    return {"kind": "", "message": f"{type(error).__name__}: {error}", "hint": "", "details": {"traceback": traceback_text}}


def error_of(data: dict[str, Any], request: ModelRequest) -> PlannerError:
    kind = getattr(errors, data["kind"], None) if data["kind"] else None
    if isinstance(kind, type) and issubclass(kind, PlannerError):
        found = PlannerError.__new__(kind)
        PlannerError.__init__(found, data["message"], hint=data["hint"], details=data["details"])
        return found
    return InputError(
        f"{request.model} cannot be loaded: {data['message']}",
        hint="The details hold the traceback; run the factory in Python on its own.",
        details=data["details"],
    )
