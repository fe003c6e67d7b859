"""Long work in worker processes: one process per open plan, which keeps its tables warm for the next question.

A page submits a command and gets a `Job`, a plain object that it polls. Each worker has one thread here, which feeds the
process and writes the job; the thread touches no Streamlit state. A cancelled or crashed process is started and opened again
by the next command. What runs in the process is `engine.py`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from app.engine import PLANNER_ENGINE, STOP, OpenSpec, serve
from planner import PlannerError, PlanRequest

GRACE_S = 3.0
"""How long a command that was asked to come to an end may take; then its process is ended."""

IDLE_S = 900.0
"""A worker without work ends after this many seconds; the next command pays for opening it again."""


class WorkerError(PlannerError):
    """A worker process died, or met an error that is no PlannerError. Nothing in the session is touched by it."""


class Stage(NamedTuple):
    name: str
    started: float


@dataclass(eq=False)
class Job:
    """One command on its way. Written by the worker's thread, read by pages.

    Attributes:
        state: `queued`, `running`, `done`, `failed` or `cancelled`.
        stages: the stages begun so far, with their start on the monotonic clock.
        news: where the stage at hand stands, "" if nothing is known.
        rows: the parts of a result that comes in parts; they stay whatever becomes of the rest.
        waits_for_room: no free core for another process yet.
        cut_short: it was asked to come to an end with what it has.
    """

    command: str
    arguments: tuple[Any, ...]
    state: str = "queued"
    stages: list[Stage] = field(default_factory=list)
    result: Any = None
    error: PlannerError | None = None
    news: str = ""
    rows: list[Any] = field(default_factory=list)
    waits_for_room: bool = False
    cut_short: bool = False
    submitted: float = field(default_factory=time.monotonic)
    finished: float | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _turn: threading.Lock = field(default_factory=threading.Lock)

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
        with self._turn:
            if self._ended.is_set():
                return
            self.result, self.error, self.finished = result, error, time.monotonic()
            self.state = state
            self._ended.set()

    def begin(self) -> bool:
        """Whether it is still wanted; it runs from now on."""
        with self._turn:
            if not self._ended.is_set():
                self.state = "running"
            return not self._ended.is_set()


class Worker:
    """One process that holds one plan open, and the thread that feeds it.

    One that works `behind` another gives way to all that do not: its job is cancelled when they need the room.
    """

    def __init__(self, pool: WorkerPool, spec: OpenSpec, *, behind: Worker | None = None) -> None:
        self.spec = spec
        self.behind = behind
        self.idle_since = time.monotonic()
        self._job: Job | None = None
        self._asked: Job | None = None
        self._asking = threading.Lock()
        self._gave_way = self._closed = False
        self._pool = pool
        self._queue: queue.Queue[Job | None] = queue.Queue()
        self._process: Any = None
        self._connection: Connection | None = None
        threading.Thread(target=self._run, daemon=True, name="plan worker").start()

    @property
    def alive(self) -> bool:
        process = self._process
        return process is not None and process.is_alive()

    @property
    def busy(self) -> bool:
        return self._job is not None or not self._queue.empty()

    def submit(self, command: str, *arguments: Any) -> Job:
        job = Job(command, arguments)
        self._queue.put(job)
        if self._closed:
            job.end("cancelled")
        return job

    def cancel(self, job: Job) -> None:
        """A queued job is dropped; a running one takes its process with it (the next command starts a new one)."""
        running = job.state == "running"
        job.end("cancelled")
        if running:
            self.kill()

    def stop(self, job: Job) -> None:
        """As `cancel`, but a running command is asked to end early and the process stays: for commands that listen to it."""
        with self._asking:
            job.end("cancelled")
            if self._asked is job and self._connection is not None:
                self._asked = None
                with contextlib.suppress(OSError):  # it has just died, which ends the command as well
                    self._connection.send((STOP, ()))

    def finish(self, job: Job, grace_s: float = GRACE_S) -> None:
        """Asks a running command to end now with the best it has. One that does not answer in time, or has not begun, is
        cancelled."""
        with self._asking:
            asked = self._asked is job and self._connection is not None
            if asked and self._connection is not None:
                self._asked, job.cut_short = None, True
                with contextlib.suppress(OSError):  # it has just died, which ends the command as well
                    self._connection.send((STOP, ()))
        if not asked:
            self.cancel(job)
            return
        late = threading.Timer(grace_s, self._cancel_late, (job,))
        late.daemon = True
        late.start()

    def _cancel_late(self, job: Job) -> None:
        if job.active:
            self.cancel(job)

    def give_way(self) -> None:
        """Ends the process for one that is needed more. A job that came in meanwhile is begun again by a new process."""
        job = self._job
        if self.behind is not None and job is not None:
            job.end("cancelled")
        self._gave_way = True
        self.kill()

    def kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process and every job, for good: who still wants an answer asks another worker."""
        self._closed = True
        self._queue.put(None)
        job = self._job
        if job is not None:
            job.end("cancelled")
        self.kill()

    def _run(self) -> None:
        while True:
            try:
                job = self._queue.get(timeout=self._pool.idle_s if self.alive else None)
            except queue.Empty:
                self.kill()
                continue
            if job is None:
                self._drop_queued()
                return
            if job.active:
                self._job = job
                self._work(job)
                self._job, self.idle_since = None, time.monotonic()
                self._pool.room_changed()

    def _drop_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job is not None:
                    job.end("cancelled")

    def _work(self, job: Job) -> None:
        """Never raises: whatever happens ends the job."""
        try:
            if self._closed:
                job.end("cancelled")
                return
            if not self.alive:
                job.waits_for_room = True
                self._pool.make_room(job, behind=self.behind)
                job.waits_for_room = False
                if not job.begin():
                    return
                self._start()
                if self._closed:
                    job.end("cancelled")
                if not job.active:
                    self.kill()
                    return
                if not self._ask(job, "open", (self.spec,)):
                    self.kill()
                    return
            if not job.begin() or self._ask(job, job.command, job.arguments, final=True):
                return
        except (EOFError, OSError) as error:
            gave_way, self._gave_way = self._gave_way, False
            if not gave_way:
                job.end("failed", error=self._death(job, error))
            elif job.active:
                self._process.join(5)
                self._work(job)
        except Exception as error:
            job.end("failed", error=WorkerError(f"the worker could not be used: {error!r}", hint="Try again."))

    def _start(self) -> None:
        self._gave_way = False
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._pool.engine_path), daemon=True, name="plan-worker")
        process.start()
        theirs.close()
        self._process, self._connection = process, ours  # only now: a process that has not begun cannot be killed

    def _ask(self, job: Job, command: str, arguments: tuple[Any, ...], *, final: bool = False) -> bool:
        """Sends one command and reads until its answer. Whether it succeeded; one that nobody wants any more is not sent."""
        assert self._connection is not None
        with self._asking:
            if not job.active:
                return False
            self._connection.send((command, arguments))
            self._asked = job if final else None
        while True:
            kind, value = self._connection.recv()
            if kind in ("done", "failed", "crashed"):
                with self._asking:
                    self._asked = None
            if kind == "progress":
                job.stages.append(Stage(value, time.monotonic()))
                job.news = ""
            elif kind == "news":
                job.news = value
            elif kind == "row":
                job.rows.append(value)
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


@dataclass(frozen=True, kw_only=True)
class Running:
    """A long job of a session. `kind` is `start`, `solve`, `proof`, `export`, `recipe`, `what_if` or `sweep`; `draft` the key of
    its worker in the pool.

    `request` is what a start was asked for, `plan_id` the plan that a proof, an export or a comparison is about, `name` the
    recipe or hardware that is asked about.
    """

    kind: str
    job: Job
    worker: Worker
    draft: str
    request: PlanRequest | None = None
    plan_id: str = ""
    name: str = ""


class WorkerPool:
    """All workers of a server, by the id of what they hold open. At most one process per core (but two); idle ones make room."""

    def __init__(self, engine_path: str = PLANNER_ENGINE, *, limit: int | None = None, idle_s: float = IDLE_S) -> None:
        self.engine_path = engine_path
        self.idle_s = idle_s
        self._limit = limit or max(2, os.cpu_count() or 1)
        self._workers: dict[str, Worker] = {}
        self._changed = threading.Condition()

    def worker(self, key: str, spec: OpenSpec, *, behind: Worker | None = None) -> Worker:
        """The worker for `key`; a new one if it holds something else open."""
        with self._changed:
            known = self._workers.get(key)
            if known is not None and known.spec == spec:
                known.spec = spec if spec.graph_path is not None else known.spec
                return known
            if known is not None:
                known.close()
            self._workers[key] = Worker(self, spec, behind=behind)
            return self._workers[key]

    def forget(self, key: str) -> None:
        with self._changed:
            worker = self._workers.pop(key, None)
        if worker is not None:
            worker.close()

    def make_room(self, job: Job, *, behind: Worker | None = None) -> None:
        """Returns when one more process may start, or the job was cancelled.

        Room comes from idle workers, then from those that work behind another; never from the one that this works behind.
        """
        with self._changed:
            while job.active:
                live = [worker for worker in self._workers.values() if worker.alive]
                if len(live) < self._limit:
                    return
                idle = [worker for worker in live if not worker.busy and worker is not behind]
                lesser = [worker for worker in live if worker.behind is not None and behind is None]
                if idle or lesser:
                    min(idle or lesser, key=lambda worker: worker.idle_since).give_way()
                self._changed.wait(0.2)

    def room_changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            for worker in self._workers.values():
                worker.close()
            self._workers.clear()
