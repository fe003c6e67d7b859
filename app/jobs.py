"""Long work in worker processes: one process per open plan, which keeps its tables warm for the next question.

A page submits a command and gets a `Job`, a plain object that it polls. Each worker has one thread here, which feeds the
process and writes the job; the thread touches no Streamlit state. A cancelled or crashed process is started and opened again
by the next command. This module imports neither torch nor streamlit: the child imports it too.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from planner import BoundaryPlacement, JointGraph, Mesh, ModelRequest, Pin, Plan, PlannerError, Workbench, export, trace

PLANNER_ENGINE = "app.jobs:PlannerEngine"
IDLE_S = 900.0
"""A worker without work ends after this many seconds; the next command pays for opening it again."""

Progress = Callable[[str], None]


class WorkerError(PlannerError):
    """A worker process died, or met an error that is no PlannerError. Nothing in the session is touched by it."""


@dataclass(frozen=True, kw_only=True)
class OpenSpec:
    """What a worker holds open: a model (its saved graph, or how to trace it) on a mesh and hardware."""

    request: ModelRequest
    mesh: Mesh
    hardware: str
    optimizer: str = "adamw"
    graph_path: Path | None = None


class PlannerEngine:
    """The commands of a worker, on the real planner. Lives in the child process."""

    def __init__(self, spec: OpenSpec, progress: Progress) -> None:
        if spec.graph_path is not None:
            progress("read the graph")
            graph = JointGraph.load(spec.graph_path)
        else:
            progress("trace")
            graph = trace(spec.request)
        progress("strategies and prices")
        self.bench = Workbench.build(graph, spec.mesh, spec.hardware, optimizer=spec.optimizer)
        progress("compile")
        self.bench.warm_up()

    def ready(self, progress: Progress) -> None:
        """Nothing more than having opened."""

    def start(self, progress: Progress, memory_bytes: int | None, time_limit_s: float) -> tuple[JointGraph, Plan]:
        return self.bench.graph, self.solve(progress, (), memory_bytes, time_limit_s)

    def legal(self, progress: Progress, key: str, output: int = 0) -> tuple[Any, ...]:
        return self.bench.legal(key, output)

    def solve(self, progress: Progress, pins: tuple[Pin, ...], memory_bytes: int | None, time_limit_s: float) -> Plan:
        """A pin on an input or output replaces the model's own boundary for that tensor."""
        progress("solve")
        pinned = {pin.where for pin in pins}
        defaults = self.bench.default_constraints(memory_bytes)
        kept = tuple(c for c in defaults if not (isinstance(c, BoundaryPlacement) and c.where in pinned))
        return self.bench.solve((*kept, *pins), time_limit_s=time_limit_s)

    def export(self, progress: Progress, plan: Plan) -> Any:
        return export(plan, self.bench.graph, verify=True, progress=progress)


# ---- child process ----------------------------------------------------------------------------------------------------


def serve(connection: Connection, engine_path: str) -> None:
    """Main loop of a worker process: (command, arguments) in, ("progress"|"done"|"failed"|"crashed", value) out."""
    module, _, name = engine_path.partition(":")
    engine: Any = None
    if hasattr(os, "nice"):
        os.nice(5)  # the pages come first

    def progress(stage: str) -> None:
        connection.send(("progress", stage))

    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
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


# ---- parent process ---------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    name: str
    started: float


@dataclass(eq=False)
class Job:
    """One command on its way. Written by the worker's thread, read by pages.

    Attributes:
        state: `queued`, `running`, `done`, `failed` or `cancelled`.
        stages: the stages begun so far, with their start on the monotonic clock.
        waits_for_room: no free core for another process yet.
    """

    command: str
    arguments: tuple[Any, ...]
    state: str = "queued"
    stages: list[Stage] = field(default_factory=list)
    result: Any = None
    error: PlannerError | None = None
    waits_for_room: bool = False
    submitted: float = field(default_factory=time.monotonic)
    finished: float | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def active(self) -> bool:
        return self.state in ("queued", "running")

    @property
    def seconds(self) -> float:
        return (self.finished or time.monotonic()) - self.submitted

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the job ended in time."""
        return self._ended.wait(timeout_s)

    def end(self, state: str, *, result: Any = None, error: PlannerError | None = None) -> None:
        """Only the first end counts: a cancelled job stays cancelled when its process then dies."""
        if self._ended.is_set():
            return
        self.result, self.error, self.finished = result, error, time.monotonic()
        self.state = state
        self._ended.set()


class Worker:
    """One process that holds one plan open, and the thread that feeds it."""

    def __init__(self, pool: WorkerPool, spec: OpenSpec) -> None:
        self.spec = spec
        self.idle_since = time.monotonic()
        self.busy = False
        self._pool = pool
        self._queue: queue.Queue[Job | None] = queue.Queue()
        self._process: Any = None
        self._connection: Connection | None = None
        threading.Thread(target=self._run, daemon=True, name="plan worker").start()

    @property
    def alive(self) -> bool:
        process = self._process
        return process is not None and process.is_alive()

    def submit(self, command: str, *arguments: Any) -> Job:
        job = Job(command, arguments)
        self._queue.put(job)
        return job

    def cancel(self, job: Job) -> None:
        """A queued job is dropped; a running one takes its process with it (the next command starts a new one)."""
        running = job.state == "running"
        job.end("cancelled")
        if running:
            self.kill()

    def kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        self._queue.put(None)
        self.kill()

    def _run(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=self._pool.idle_s if self.alive else None)
            except queue.Empty:
                self.kill()
                continue
            if job is None:
                return
            if job.active:
                self.busy = True
                self._work(job)
                self.busy, self.idle_since = False, time.monotonic()
                self._pool.room_changed()

    def _work(self, job: Job) -> None:
        """Never raises: whatever happens ends the job."""
        try:
            if not self.alive:
                job.waits_for_room = True
                self._pool.make_room(job)
                job.waits_for_room = False
                if not job.active:
                    return
                job.state = "running"
                self._start()
                if not self._ask(job, "open", (self.spec,)):
                    self.kill()
                    return
            job.state = "running"
            if self._ask(job, job.command, job.arguments, final=True):
                return
        except (EOFError, OSError) as error:
            job.end("failed", error=self._death(job, error))
        except Exception as error:
            job.end("failed", error=WorkerError(f"the worker could not be used: {error!r}", hint="Try again."))

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self._pool.engine_path), daemon=True, name="plan-worker")
        self._process.start()
        theirs.close()
        self._connection = ours

    def _ask(self, job: Job, command: str, arguments: tuple[Any, ...], *, final: bool = False) -> bool:
        """Sends one command and reads until its answer. Whether it succeeded."""
        assert self._connection is not None
        self._connection.send((command, arguments))
        while True:
            kind, value = self._connection.recv()
            if kind == "progress":
                job.stages.append(Stage(value, time.monotonic()))
            elif kind == "done":
                if final:
                    job.end("done", result=value)
                return True
            elif kind == "failed":
                job.end("failed", error=value)
                return False
            else:
                message, trace_text = value
                job.end("failed", error=WorkerError(
                    f"the planner met an unexpected error: {message}",
                    hint="This is a fault of the program; the report below helps to fix it. Your plan and pins are unharmed.",
                    details={"traceback": trace_text},
                ))  # fmt: skip
                return False

    def _death(self, job: Job, error: BaseException) -> WorkerError:
        self._process.join(5)
        code = self._process.exitcode
        stage = job.stages[-1].name if job.stages else job.command
        reason = "it was killed, which is what happens when memory runs out" if code == -9 else f"exit code {code}"
        return WorkerError(
            f"the worker process died during '{stage}' ({reason})",
            hint="Try again; with fewer layers if memory is short. Your plan and pins are unharmed.",
            details={"error": repr(error)},
        )


class WorkerPool:
    """All workers of a server, by the id of what they hold open. At most one process per core; idle ones make room."""

    def __init__(self, engine_path: str = PLANNER_ENGINE, *, limit: int | None = None, idle_s: float = IDLE_S) -> None:
        self.engine_path = engine_path
        self.idle_s = idle_s
        self._limit = limit or max(1, os.cpu_count() or 1)
        self._workers: dict[str, Worker] = {}
        self._changed = threading.Condition()

    def worker(self, key: str, spec: OpenSpec) -> Worker:
        """The worker for `key`; a new one if it holds something else open."""
        with self._changed:
            known = self._workers.get(key)
            if known is not None and known.spec == spec:
                return known
            if known is not None:
                known.close()
            self._workers[key] = Worker(self, spec)
            return self._workers[key]

    def forget(self, key: str) -> None:
        with self._changed:
            worker = self._workers.pop(key, None)
        if worker is not None:
            worker.close()

    def make_room(self, job: Job) -> None:
        """Returns when one more process may start, or the job was cancelled."""
        with self._changed:
            while job.active:
                live = [worker for worker in self._workers.values() if worker.alive]
                if len(live) < self._limit:
                    return
                idle = [worker for worker in live if not worker.busy]
                if idle:
                    min(idle, key=lambda worker: worker.idle_since).kill()
                self._changed.wait(0.2)

    def room_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            for worker in self._workers.values():
                worker.close()
            self._workers.clear()
