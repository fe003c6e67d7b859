"""Worker processes: results, errors, crashes, cancel, room."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.engine import OpenSpec, standing
from app.jobs import Job, WorkerError, WorkerPool
from planner import InfeasibleError, ModelRequest, Pin
from planner.placement import parse
from tests.app.synthetic import MESH, WQ

SPEC = OpenSpec(request=ModelRequest(model="llama3-tiny", layers=2), mesh=MESH, hardware="h100_sxm")
ENGINE = "tests.app.fake_engine:FakeEngine"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    found = WorkerPool(ENGINE, limit=2)
    yield found
    found.close()


def pin(note: str) -> tuple[Pin, ...]:
    return (Pin(where="layers.*.attention.wq", placements=parse("S(0)R"), note=note),)


def finished(job: Job) -> Job:
    assert job.wait(60), f"{job.command} did not end"
    return job


def test_a_worker_stays_open_between_commands(pool):
    worker = pool.worker("a", SPEC)
    first = finished(worker.submit("legal", WQ))
    assert first.state == "done" and parse("S(0)S(1)") in first.result
    assert [stage.name for stage in first.stages] == ["trace"]
    second = finished(worker.submit("solve", (), None, 1.0, None))
    assert second.state == "done" and second.result.report.status == "optimal"
    assert [stage.name for stage in second.stages] == ["solve"]
    assert pool.worker("a", SPEC) is worker


def test_a_planner_error_comes_back_as_it_was_raised(pool):
    job = finished(pool.worker("a", SPEC).submit("solve", pin("infeasible"), None, 1.0, None))
    assert job.state == "failed" and isinstance(job.error, InfeasibleError)
    assert job.error.conflicts == ("pin layers.*.attention.wq = S(0)R",) and job.error.hint


def test_a_fault_of_the_program_brings_its_report_and_the_worker_goes_on(pool):
    worker = pool.worker("a", SPEC)
    job = finished(worker.submit("solve", pin("bug"), None, 1.0, None))
    assert isinstance(job.error, WorkerError) and "ZeroDivisionError" in job.error.details["traceback"]
    assert finished(worker.submit("solve", (), None, 1.0, None)).state == "done"


def test_a_dead_worker_is_reported_and_started_again(pool):
    worker = pool.worker("a", SPEC)
    job = finished(worker.submit("solve", pin("die"), None, 1.0, None))
    assert isinstance(job.error, WorkerError) and "exit code 3" in job.error.message
    again = finished(worker.submit("solve", (), None, 1.0, None))
    assert again.state == "done" and again.stages[0].name == "trace"


def test_a_running_job_says_where_it_stands(pool):
    worker = pool.worker("a", SPEC)
    job = worker.submit("solve", pin("news"), None, 1.0, None)
    deadline = time.monotonic() + 60
    while not job.news and time.monotonic() < deadline:
        time.sleep(0.02)
    assert job.news == "612.30 ms, within 1.3 %" and job.stages[-1].name == "solve"
    worker.cancel(job)
    assert finished(job).state == "cancelled"


def test_where_a_solve_stands_in_words():
    assert standing(float("inf"), 1.0) == "no plan yet"
    assert standing(100_000.0, 99_000.0) == "100.00 ms, within 1 %"
    assert standing(100_000.0, float("-inf")) == "100.00 ms"


def test_cancel_ends_a_running_job_at_once(pool):
    worker = pool.worker("a", SPEC)
    job = worker.submit("solve", pin("slow"), None, 1.0, None)
    while not any(stage.name == "solve" for stage in job.stages):
        time.sleep(0.02)
    start = time.monotonic()
    worker.cancel(job)
    assert finished(job).state == "cancelled" and job.error is None and time.monotonic() - start < 5
    assert finished(worker.submit("legal", WQ)).state == "done"


def solving(worker, note: str) -> Job:
    job = worker.submit("solve", pin(note), None, 1.0, None)
    while not any(stage.name == "solve" for stage in job.stages):
        time.sleep(0.02)
    return job


def test_a_command_that_is_asked_to_end_answers_with_what_it_has(pool):
    worker = pool.worker("a", SPEC)
    job = solving(worker, "listening")
    worker.finish(job, grace_s=60)
    assert finished(job).state == "done" and job.cut_short
    assert job.result.report.status == "feasible" and job.result.report.gap == pytest.approx(0.1)
    again = finished(worker.submit("legal", WQ))
    assert again.state == "done" and not again.stages, "the process is the same one"


def test_a_command_that_does_not_answer_in_time_is_ended(pool):
    worker = pool.worker("a", SPEC)
    job = solving(worker, "slow")
    worker.finish(job, grace_s=0.2)
    assert finished(job).state == "cancelled" and job.error is None and job.seconds < 50
    assert finished(worker.submit("legal", WQ)).state == "done"


def test_a_queued_command_that_is_asked_to_end_is_dropped(pool):
    worker = pool.worker("a", SPEC)
    first, queued = solving(worker, "listening"), worker.submit("legal", WQ)
    worker.finish(queued)
    assert queued.state == "cancelled" and first.active
    worker.finish(first, grace_s=60)
    assert finished(first).state == "done"


def test_a_worker_can_be_closed_at_any_time():
    pool = WorkerPool(ENGINE, limit=2)
    for wait_s in (0.0, 0.005, 0.02, 0.1):
        worker = pool.worker("a", SPEC)
        worker.submit("ready", None)
        time.sleep(wait_s)
        pool.forget("a")
        deadline = time.monotonic() + 30
        while worker.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not worker.alive


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 3.0])
def test_whoever_asked_a_worker_that_is_closed_is_told(wait_s: float):
    """The running job, those that wait, and one that comes too late all end: a page that waits for one would wait for ever."""
    pool = WorkerPool(ENGINE, limit=2)
    worker = pool.worker("a", SPEC)
    jobs = [worker.submit("solve", pin("slow"), None, 1.0, None), *(worker.submit("legal", WQ) for _ in range(3))]
    time.sleep(wait_s)
    assert pool.worker("a", replace(SPEC, hardware="b200")) is not worker
    jobs.append(worker.submit("legal", WQ))
    assert [finished(job).state for job in jobs] == ["cancelled"] * 5
    pool.close()


def test_a_queued_job_can_be_dropped_without_touching_the_running_one(pool):
    worker = pool.worker("a", SPEC)
    slow = worker.submit("solve", pin("slow"), None, 1.0, None)
    queued = worker.submit("legal", WQ)
    worker.cancel(queued)
    assert queued.state == "cancelled" and slow.active
    worker.cancel(slow)
    finished(slow)


def test_more_workers_than_room_wait_visibly_and_idle_ones_make_room():
    pool = WorkerPool(ENGINE, limit=1)
    try:
        busy = pool.worker("busy", SPEC)
        slow = busy.submit("solve", pin("slow"), None, 1.0, None)
        while slow.state != "running":
            time.sleep(0.02)
        other = pool.worker("other", SPEC)
        waiting = other.submit("legal", WQ)
        assert not waiting.wait(0.6) and waiting.waits_for_room
        busy.cancel(slow)
        assert finished(waiting).state == "done"
        assert finished(busy.submit("legal", WQ)).state == "done"  # ends the idle one
        assert not other.alive
    finally:
        pool.close()


def test_work_behind_another_gives_way_and_never_ends_that_one():
    pool = WorkerPool(ENGINE, limit=1)
    try:
        front = pool.worker("front", SPEC)
        behind = pool.worker("behind", SPEC, behind=front)
        slow = behind.submit("solve", pin("slow"), None, 1.0, None)
        while slow.state != "running":
            time.sleep(0.02)
        assert finished(front.submit("legal", WQ)).state == "done" and slow.state == "cancelled"
        waiting = behind.submit("legal", WQ)
        assert not waiting.wait(0.6) and waiting.waits_for_room and front.alive
    finally:
        pool.close()


def test_a_job_that_met_the_end_of_an_idle_worker_is_done_by_a_new_one(pool):
    worker = pool.worker("d", SPEC)
    finished(worker.submit("ready", None))
    worker.give_way()
    assert finished(worker.submit("legal", WQ)).state == "done"


def test_an_idle_worker_ends_and_opens_again():
    pool = WorkerPool(ENGINE, limit=1, idle_s=0.2)
    try:
        worker = pool.worker("a", SPEC)
        finished(worker.submit("ready", None))
        deadline = time.monotonic() + 20
        while worker.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not worker.alive
        assert finished(worker.submit("ready", None)).state == "done"
    finally:
        pool.close()


def test_another_spec_replaces_the_worker(pool):
    worker = pool.worker("b", SPEC)
    other = OpenSpec(request=SPEC.request, mesh=SPEC.mesh, hardware="h100_sxm", optimizer="sgd")
    assert pool.worker("b", other) is not worker


def test_an_engine_that_cannot_open_says_why(pool):
    missing = OpenSpec(request=SPEC.request, mesh=MESH, hardware="h100_sxm", graph_path=Path("/nowhere/graph.json.gz"))
    job = finished(pool.worker("c", missing).submit("ready", None))
    assert job.state == "failed" and isinstance(job.error, WorkerError)


def test_the_parent_imports_neither_torch_nor_streamlit_for_jobs():
    code = "import app.jobs, sys; print(sorted({'torch', 'streamlit', 'numba'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_opening_the_demo_imports_no_torch_into_the_server(tmp_path):
    code = """
import sys
from streamlit.testing.v1 import AppTest
at = AppTest.from_file("app/main.py", default_timeout=60).run()
assert not at.exception and any("Plan status" in item.body for item in at.get("html"))
print(sorted({"torch", "numba", "pulp", "highspy"} & set(sys.modules)))
"""
    environment = {**os.environ, "PLAN_EXPLORER_WORKSPACE": str(tmp_path), "PLAN_EXPLORER_ENGINE": ENGINE}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    assert done.stdout.strip() == "[]"


# ---- questions that nobody waits for any more ---------------------------------------------------------------------------


def slow_question(worker) -> Job:
    job = worker.submit("overrides", WQ, pin("slow prices"), ())
    deadline = time.monotonic() + 60
    while not job.rows and time.monotonic() < deadline:
        time.sleep(0.01)
    assert job.active and len(job.rows) == 1
    return job


def test_a_stopped_question_keeps_its_rows_and_the_same_process_answers_the_next(pool):
    worker = pool.worker("a", SPEC)
    job = slow_question(worker)
    start = time.monotonic()
    worker.stop(job)
    following = finished(worker.submit("legal", WQ))
    assert job.state == "cancelled" and len(job.rows) == 1 and job.result is None
    assert following.state == "done" and following.stages == [] and time.monotonic() - start < 20


def test_a_question_stopped_before_it_began_is_never_asked(pool):
    worker = pool.worker("a", SPEC)
    first, second = slow_question(worker), worker.submit("overrides", WQ, (), ())
    worker.stop(second)
    worker.stop(first)
    assert finished(worker.submit("legal", WQ)).state == "done" and second.rows == []


def test_a_stop_that_comes_too_late_harms_nothing(pool):
    worker = pool.worker("a", SPEC)
    for _ in range(20):
        job = worker.submit("overrides", WQ, (), ())
        time.sleep(0.003)
        worker.stop(job)  # before, while or after it is answered
        after = finished(worker.submit("overrides", WQ, (), ()))
        assert after.state == "done" and len(after.rows) == len(after.result)
