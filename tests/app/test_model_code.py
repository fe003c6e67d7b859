"""The real engine in a worker, with models whose code exits, hangs or cannot be imported: nothing else is harmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engine import OpenSpec
from app.jobs import Job, WorkerPool
from planner import InputError, Mesh, ModelRequest, PlannerError
from tests.planner.test_loading import MODELS, alive, wait_for


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    found = WorkerPool(limit=2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    (path / "models.py").write_text(MODELS)
    (path / "broken.py").write_text("import no_such_library\n")
    return path


def start(pool: WorkerPool, model: str) -> Job:
    request = ModelRequest(model=model, precision="as-traced")
    spec = OpenSpec(request=request, mesh=Mesh.parse("dp=2"), hardware="h100_sxm")
    return pool.worker(model, spec).submit("start", None, 20.0)


def test_code_that_exits_or_cannot_be_imported_is_an_error_in_words(pool: WorkerPool, folder: Path) -> None:
    jobs = [start(pool, f"{folder}/models.py:leaves"), start(pool, f"{folder}/broken.py:make")]
    for job, said in zip(jobs, ("exit code 3", "no_such_library"), strict=True):
        assert job.wait(120) and job.state == "failed"
        assert isinstance(job.error, PlannerError) and said in job.error.message
        assert job.stages[-1].name == "trace" and job.error.hint
    assert isinstance(jobs[1].error, InputError) and "broken.py" in jobs[1].error.message


def test_code_that_hangs_can_be_cancelled_and_leaves_no_process(pool: WorkerPool, folder: Path) -> None:
    model, pid = f"{folder}/models.py:hangs", folder / "pid"
    job = start(pool, model)
    wait_for(pid.exists)
    assert job.stages[-1].name == "trace", "the page shows what it waits for"
    spec = OpenSpec(request=ModelRequest(model=model, precision="as-traced"), mesh=Mesh.parse("dp=2"), hardware="h100_sxm")
    pool.worker(model, spec).cancel(job)
    assert job.wait(60) and job.state == "cancelled"
    wait_for(lambda: not alive(int(pid.read_text())))


@pytest.mark.slow
def test_a_model_of_the_users_own_is_planned_by_a_worker(pool: WorkerPool, folder: Path) -> None:
    job = start(pool, f"{folder}/models.py:small")
    assert job.wait(180) and job.state == "done", job.error
    graph, plan = job.result
    assert plan.request.model.endswith("models.py:small") and len(graph.parameters) == 2
