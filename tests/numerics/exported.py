"""Exported files of the small Llama for the tests of this folder: plans, texts, and running them in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from planner.exporting.script import write_script
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.pipeline import tiny_graph, trace
from planner.plan import Plan
from planner.recipes import Recipe
from planner.workbench import Workbench
from tests.forks import FORKS
from tests.oracles.random_plan import random_plan

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Model:
    """One model traced at both sizes."""

    full: JointGraph
    tiny: JointGraph

    @classmethod
    def llama(cls, layers: int = 2, precision: str = "bf16-mixed") -> Model:
        return cls.sample("llama3-tiny", layers, precision)

    @classmethod
    def sample(
        cls, name: str, layers: int = 2, precision: str = "bf16-mixed", batch: int | None = None, seq: int | None = None
    ) -> Model:
        full = trace(ModelRequest(model=name, layers=layers, precision=precision, batch=batch, seq=seq))
        tiny = tiny_graph(full)
        assert tiny is not None
        return cls(full, tiny)

    def bench(self, mesh: str) -> Workbench:
        return Workbench.build(self.full, Mesh.parse(mesh))

    def script(self, plan: Plan) -> str:
        return write_script(plan, self.full, self.tiny)


def optimum(bench: Workbench) -> Plan:
    """The best plan found by message passing; tests of exported files need no proof of it."""
    return bench.solve(bench.default_constraints(), exact=False)


def recipe(bench: Workbench, name: str) -> Plan:
    return bench.solve([*bench.default_constraints(), Recipe.parse(name, bench.mesh)], exact=False)


def any_plan(bench: Workbench, seed: int, *, alike: bool = False) -> Plan:
    return random_plan(bench.costs, seed, layers_alike=alike)


def run(
    command: Sequence[str], *, timeout_s: float = 300.0, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process with one thread for arithmetic, in the project's folder; one of Python is forked from one that knows torch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return FORKS.run(list(command), cwd=cwd, env=environment, timeout=timeout_s)


def run_ranks(count: int, command: Sequence[str], *, timeout_s: float = 300.0) -> list[subprocess.CompletedProcess[str]]:
    """The same command on so many ranks, each with the environment that torchrun gives it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = str(count)
    group = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        return run(command, timeout_s=timeout_s, RANK=str(rank), LOCAL_RANK=str(rank), **group)

    with ThreadPoolExecutor(count) as ranks:
        return list(ranks.map(start, range(count)))


def python(path: Path, *arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(path), *arguments], timeout_s=timeout_s)


def imported(path: Path) -> ModuleType:
    """An exported file as a module."""
    spec = importlib.util.spec_from_file_location("exported_train", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_request(model: Model) -> ModelRequest:
    return replace(model.tiny.request)
