"""Which tests run in one process, if several share the work, and what is compiled just in time before any of them waits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from xdist.scheduler import LoadScopeScheduling

from planner import loading
from planner.exporting import running
from planner.graph import ModelRequest
from planner.solving import message_passing
from tests.forks import FORKS

BROWSER = "tests/browser/"


class InFiles(LoadScopeScheduling):
    """Tests of one file share what is dear to make (traces, plans, servers); one real browser at a time is enough."""

    def _split_scope(self, nodeid: str) -> str:
        return BROWSER if nodeid.startswith(BROWSER) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return InFiles(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Processes that share the work find the solver's loops compiled, instead of each compiling them at the same time."""
    if session.config.getoption("numprocesses", None):  # of the one that gives out the work
        message_passing.warm_up()


@pytest.fixture(scope="session")
def compiled() -> None:
    """The solver's loops are compiled: on a new machine that takes half a minute of one core."""
    message_passing.warm_up()


@pytest.fixture(autouse=True)
def checks_in_forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four runs that verify an exported file need not import torch each, except in tests marked `own_processes`."""
    if request.node.get_closest_marker("own_processes") is None:
        forking = SimpleNamespace(run=FORKS.run, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(running, "subprocess", forking)


@pytest.fixture
def models_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that loads a user's model need not import torch. For tests of what it gives, not of how it is run."""

    def run(command: list[str], request: ModelRequest, limit_s: float) -> int:
        environment = {**os.environ, "PYTHONPATH": str(Path(loading.__file__).parents[1])}
        return FORKS.run(command, env=environment, timeout=limit_s).returncode

    monkeypatch.setattr(loading, "_run", run)
