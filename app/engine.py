"""The child side of a worker: holds one model open on the real planner and answers commands.

This module imports neither torch nor streamlit by itself; tracing loads torch when a command needs it.
"""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from app.answering import Answering
from app.comparing import Comparing
from planner import JointGraph, Mesh, ModelRequest, Plan, PlannerError, Workbench, export, export_recipe
from planner.constraint import Constraint
from planner.loading import trace_apart

PLANNER_ENGINE = "app.engine:PlannerEngine"
WARM_UP_S = 60.0

NEWS_EVERY_S = 0.5
STOP = "stop"
"""The one message that is not a command: the answer to the one that runs is no longer wanted."""


class Progress:
    """Tells the parent how a command goes on: called with the name of a stage that begins, `news` with where it stands, `row`
    with each part of an answer that is known early; `stopped` says whether the answer is not wanted any more. Any thread may
    call."""

    def __init__(self, send: Callable[[tuple[str, Any]], None], asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        self._write = send
        self._asked_to_stop = asked_to_stop
        self._stopped = False
        self._lock = threading.Lock()
        self._last = 0.0

    def __call__(self, stage: str) -> None:
        self._send(("progress", stage))

    def begin(self) -> None:
        """Of the next command, which nobody has asked to stop."""
        self._stopped = False

    def stopped(self) -> bool:
        with self._lock:
            self._stopped = self._stopped or self._asked_to_stop()
            return self._stopped

    def _send(self, message: tuple[str, Any]) -> None:
        with self._lock:
            self._write(message)

    def news(self, text: str) -> None:
        """At most twice a second."""
        if time.monotonic() - self._last >= NEWS_EVERY_S:
            self._last = time.monotonic()
            self._send(("news", text))

    def row(self, value: Any) -> None:
        """A part of the result, as soon as it is there."""
        self._send(("row", value))


def standing(value_us: float, bound_us: float) -> str:
    """`687.37 ms, within 0.06 %`"""
    if not math.isfinite(value_us):
        return "no plan yet"
    gap = max(0.0, (value_us - bound_us) / value_us) if math.isfinite(bound_us) and value_us else 1.0
    return f"{value_us / 1e3:,.2f} ms" + (f", within {100 * gap:.2g} %" if gap < 1 else "")


@dataclass(frozen=True, kw_only=True)
class OpenSpec:
    """What a worker holds open: a model on a mesh and hardware. `graph_path` saves the trace; the graph is the same without.

    `checkpoint` is how layers are chosen that run forward again in backward: `auto`, `none`, `full` or `full:16`.
    """

    request: ModelRequest
    mesh: Mesh
    hardware: str
    optimizer: str = "adamw"
    checkpoint: str = "auto"
    gpus_per_node: int = 8
    graph_path: Path | None = field(default=None, compare=False)


class PlannerEngine(Answering, Comparing):
    """The commands of a worker, on the real planner. Lives in the child process."""

    def __init__(self, spec: OpenSpec, progress: Progress) -> None:
        if spec.graph_path is not None:
            progress("read the graph")
            graph = JointGraph.load(spec.graph_path)
        else:
            progress("trace")
            graph = trace_apart(spec.request)
        progress("strategies and prices")
        self.bench = Workbench.build(graph, spec.mesh, spec.hardware, optimizer=spec.optimizer, gpus_per_node=spec.gpus_per_node)
        progress("compile")
        self.bench.warm_up()
        self.checkpoint = spec.checkpoint

    def ready(self, progress: Progress, memory_bytes: int | None) -> None:
        """Solve once without pins: every later solve starts from there."""
        self.solve(progress, (), memory_bytes, WARM_UP_S, False)

    def start(
        self, progress: Progress, memory_bytes: int | None, time_limit_s: float, demands: tuple[Constraint, ...] = ()
    ) -> tuple[JointGraph, Plan]:
        return self.bench.graph, self.solve(progress, demands, memory_bytes, time_limit_s, False)

    def legal(self, progress: Progress, key: str, output: int = 0) -> tuple[Any, ...]:
        return self.bench.legal(key, output)

    def solve(
        self,
        progress: Progress,
        demands: tuple[Constraint, ...],
        memory_bytes: int | None,
        time_limit_s: float,
        exact: bool | None,
        layers: tuple[str, ...] | None = None,
    ) -> Plan:
        """`exact` False answers at once with a gap; None may go on to prove it. `demands`: the user's, of every kind.
        `layers`: checkpoint just these, instead of choosing. Asked to stop, it answers with the best plan so far."""
        progress("solve")
        how = self.checkpoint if layers is None else layers
        plan = self.bench.solve(
            self.with_defaults(demands, memory_bytes), time_limit_s=time_limit_s, exact=exact, checkpoint=how,
            told=lambda now: progress.news(standing(now.value_us, now.bound_us)), cancelled=progress.stopped,
        )  # fmt: skip
        return replace(plan, checkpoint=self.checkpoint)

    def export(self, progress: Progress, plan: Plan, format: str = "script") -> Any:
        """The file of a plan, `script` or `recipe`, checked."""
        made = export_recipe if format == "recipe" else export
        return made(plan, self.bench.graph, verify=True, progress=progress)


def serve(connection: Connection, engine_path: str) -> None:
    """Main loop of a worker process: (command, arguments) in, ("progress"|"news"|"row"|"done"|"failed"|"crashed", value) out."""
    module, _, name = engine_path.partition(":")
    engine: Any = None
    if hasattr(os, "nice"):
        os.nice(5)  # the pages come first

    def asked_to_stop() -> bool:
        """While a command runs, nothing but the word to stop it comes in."""
        return connection.poll() and connection.recv()[0] == STOP

    progress = Progress(connection.send, asked_to_stop)
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        if command == STOP:  # it came after the end
            continue
        progress.begin()
        try:
            if command == "open":
                engine = getattr(import_module(module), name)(*arguments, progress)
                connection.send(("done", None))
            else:
                connection.send(("done", getattr(engine, command)(progress, *arguments)))
        except PlannerError as error:
            connection.send(("failed", error))
        except Exception as error:
            connection.send(("crashed", (f"{type(error).__name__}: {error}", traceback.format_exc())))
