"""A workspace, a small demo and a fake planner for every test here."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app import opening, state, work
from app.jobs import WorkerPool
from tests.app.synthetic import make_plan, small_graph

MAIN = str(Path(opening.__file__).parent / "main.py")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """Workers of this test alone, with the fake planner."""
    found = WorkerPool("tests.app.fake_engine:FakeEngine", limit=3)
    monkeypatch.setattr(state, "pool", lambda: found)
    for module in (work, opening):
        monkeypatch.setattr(module, "pool", lambda: found)
    yield found
    found.close()


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: WorkerPool) -> Path:
    """The demo is a four-layer made-up model; the workspace is empty. Returns the workspace folder."""
    graph = small_graph()
    graph_path, plan_path, folder = tmp_path / "g.json.gz", tmp_path / "p.json.gz", tmp_path / "workspace"
    graph.save(graph_path)
    plan_path.write_bytes(gzip.compress(make_plan(graph).dumps().encode()))
    monkeypatch.setattr(opening, "DEMO_GRAPH", graph_path)
    monkeypatch.setattr(opening, "DEMO_PLAN", plan_path)
    monkeypatch.setenv("PLAN_EXPLORER_WORKSPACE", str(folder))
    return folder


@pytest.fixture
def open_app(demo: Path) -> Callable[..., AppTest]:
    """Starts a session at an address, as a browser tab would."""

    def start(**address: str) -> AppTest:
        at = AppTest.from_file(MAIN, default_timeout=300)
        for name, value in address.items():
            at.query_params[name] = value
        return run(at)

    return start


def run(at: AppTest) -> AppTest:
    at.run()
    assert not at.exception, at.exception
    return at
