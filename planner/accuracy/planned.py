"""Rows that are planned, one by one: the order they are taken in, the processes that do it, and the time that it may take.

A row takes about a second, so rows are shared by a process per core; those that need the same plan stay together. Each process
keeps what it traced and planned. Whatever goes wrong with a row is written in the row: nothing ends the others.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from planner.accuracy.ends import score_memory_row, score_step, score_vtrain
from planner.accuracy.rows import Fields, Scored, Skip, failure
from planner.accuracy.runs import Run, run_of, vtrain_run
from planner.accuracy.steps import Predictor

STEP, RANKED, MEMORY = "step", "ranked", "memory"
ENOUGH = 8
"""Groups of rows that are worth another process, which imports torch and traces for itself."""
OBJECTS_BETWEEN_COLLECTIONS = 200_000
"""Plans are made of many small objects that live as long as they are used: looking through them for garbage after every 700 new
ones took a third of the time."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A row of `kind`. `model`: the row with the sizes of the model, for a row of memory; None if there is none."""

    kind: str
    file: str
    line: int
    row: Fields
    model: Fields | None = None

    @property
    def where(self) -> str:
        return f"{self.file} line {self.line}"

    def score(self, predictor: Predictor) -> Scored:
        """Scored, skipped or failed."""
        try:
            if self.kind == MEMORY:
                return score_memory_row(predictor, self.model, self.row)
            return score_step(predictor, self.row) if self.kind == STEP else score_vtrain(predictor, self.row)
        except Skip as skip:
            return Scored(category=self.file, source=self.where, label=self.where, measured=float("nan"), skipped=str(skip))
        except Exception as error:
            return self.failed(failure(error))

    def failed(self, reason: str) -> Scored:
        return Scored(category=self.file, source=self.where, label=self.where, measured=float("nan"), failed=reason)

    def run(self) -> Run | None:
        """None if it is not planned: then it takes no time."""
        try:
            if self.kind == RANKED:
                return vtrain_run(self.row)
            described = self.model if self.kind == MEMORY else self.row
            return None if described is None else run_of(described)
        except Exception:  # said when the row is scored
            return None


def score_jobs(
    jobs: Sequence[Job], *, workers: int | None = None, limit_s: float | None = None, progress: Progress = lambda line: None
) -> list[Scored]:
    """The rows in the order of `jobs`. `workers` None: a process per core, or none if there is little to do; 0: none. Rows that
    are not reached in `limit_s` seconds are skipped; those that say all that a plan needs come first."""
    groups = _groups(jobs)
    if workers is None:
        workers = min(os.cpu_count() or 1, len(groups) // ENOUGH)
    found: dict[int, Scored] = {}
    told = _Told(len(jobs), progress)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    for numbers, scored in _here(jobs, groups, deadline) if workers < 2 else _apart(jobs, groups, workers, deadline):
        found.update(zip(numbers, scored, strict=True))
        told.more(len(numbers))
    late = "not reached within the time limit"
    for number in set(range(len(jobs))) - set(found):
        found[number] = replace(jobs[number].failed(""), category=jobs[number].file, skipped=late)
    return [found[number] for number in range(len(jobs))]


def _groups(jobs: Sequence[Job]) -> list[list[int]]:
    """Numbers of jobs that need the same plans, the most telling first; jobs without a plan are one group."""
    found: dict[object, list[int]] = {}
    rank: dict[object, tuple[object, ...]] = {}
    for number, job in enumerate(jobs):
        run = job.run()
        key = None if run is None else replace(run, layers=0, accumulation=1, zero=0, has_master=False)
        found.setdefault(key, []).append(number)
        place = (
            () if run is None else (run.checkpoint == "auto", job.kind == RANKED, run.model, run.seq, run.batch, str(run.mesh))
        )
        rank[key] = min(rank.get(key, place), place)
    return [found[key] for key in sorted(found, key=lambda key: rank[key])]


@dataclass
class _Told:
    """Says how far it is, now and then."""

    total: int
    progress: Progress
    done: int = 0
    said: float = field(default_factory=time.monotonic)

    def more(self, rows: int) -> None:
        self.done += rows
        if time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            self.progress(f"planned {self.done} of {self.total} rows")


Results = Iterator[tuple[list[int], list[Scored]]]


def _here(jobs: Sequence[Job], groups: Sequence[list[int]], deadline: float | None) -> Results:
    predictor = Predictor()
    with rare_collections():
        for numbers in groups:
            if deadline is not None and time.monotonic() > deadline:
                return
            yield numbers, [jobs[number].score(predictor) for number in numbers]


@contextmanager
def rare_collections() -> Iterator[None]:
    """Fewer searches for garbage, until it ends."""
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


# ---- processes --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    at: list[int] = field(default_factory=list)
    """the jobs it is at"""

    @classmethod
    def start(cls) -> _Worker:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return cls(process, mine)

    def take(self, jobs: Sequence[Job], numbers: list[int]) -> None:
        self.at = numbers
        self.pipe.send([jobs[number] for number in numbers])

    def end(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _work(pipe: Connection) -> None:
    """What a process does: takes jobs until there are no more."""
    predictor = Predictor()
    with rare_collections(), suppress(EOFError, KeyboardInterrupt):
        while True:
            pipe.send([job.score(predictor) for job in pipe.recv()])


def _apart(jobs: Sequence[Job], groups: Sequence[list[int]], workers: int, deadline: float | None) -> Results:
    """A process that ends by itself is replaced; its rows have failed."""
    waiting, busy = list(reversed(groups)), dict[Connection, _Worker]()
    try:
        for _ in range(min(workers, len(groups))):
            _next(_Worker.start(), jobs, waiting, busy)
        while busy:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(busy), timeout=left)
            if not ready:
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker = busy.pop(pipe)
                done = worker.at
                try:
                    scored = pipe.recv()
                except EOFError:
                    worker.process.join()
                    reason = f"the process that planned it ended ({worker.process.exitcode})"
                    scored = [jobs[number].failed(reason) for number in done]
                    worker.end()
                    worker = _Worker.start()
                _next(worker, jobs, waiting, busy)
                yield done, scored
    finally:
        for worker in busy.values():
            worker.end()


def _next(worker: _Worker, jobs: Sequence[Job], waiting: list[list[int]], busy: dict[Connection, _Worker]) -> None:
    """Hands it the next jobs, or ends it."""
    if not waiting:
        worker.end()
        return
    worker.take(jobs, waiting.pop())
    busy[worker.pipe] = worker
