"""Models whose code crashes, exits, hangs or fails: an error in words, nothing half-written, no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner import loading
from planner.errors import InputError, PlannerError, TraceError, UnsupportedOpError
from planner.graph import JointGraph, ModelRequest

MODELS = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn

print("this line is the model's own")

def small(batch: int = 4, width: int = 8):
    return nn.Linear(width, width), (torch.zeros(batch, width),)

def leaves():
    os._exit(3)

def leaves_quietly():
    sys.exit(0)

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def hangs():
    Path(__file__).with_name("pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)

def fails():
    raise KeyError("no such layer")

class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))
    def forward(self, x):
        return (torch.multinomial(x, 1) * self.w).sum()

def random():
    return Random(), (torch.ones(4, 8),)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "models.py"
    path.write_text(MODELS)
    return path


def request(file: Path, name: str) -> ModelRequest:
    return ModelRequest(model=f"{file}:{name}", precision="as-traced")


@pytest.mark.usefixtures("models_in_forks")
def test_a_model_arrives_as_it_does_here(file: Path) -> None:
    from planner.tracing.trace import trace

    found = loading.trace_apart(request(file, "small"))
    assert found.fingerprint == trace(request(file, "small")).fingerprint


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leaves", "exit code 3"),
        ("leaves_quietly", "exit code 0"),
        ("killed", "SIGKILL .*memory"),
    ],
)
def test_code_that_ends_its_process_is_an_error(file: Path, name: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as caught:
        loading.trace_apart(request(file, name))
    assert file.name in caught.value.message and caught.value.hint


def test_code_that_hangs_is_stopped(file: Path) -> None:
    with pytest.raises(TraceError, match="not loaded and traced after 12 s") as caught:
        loading.trace_apart(request(file, "hangs"), limit_s=12)
    assert "--load-limit" in caught.value.hint


@pytest.mark.usefixtures("models_in_forks")
@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [("fails", InputError, "KeyError"), ("random", UnsupportedOpError, "random numbers"), ("smal", InputError, "Did you mean")],
)
def test_errors_cross_the_border_whole(file: Path, name: str, kind: type[PlannerError], said: str) -> None:
    with pytest.raises(kind) as caught:
        loading.trace_apart(request(file, name))
    assert said in caught.value.explain()
    if kind is UnsupportedOpError:
        assert "multinomial" in caught.value.details["op"]


def test_ctrl_c_leaves_neither_files_nor_processes(file: Path, tmp_path: Path) -> None:
    pid = file.with_name("pid")
    pid.unlink(missing_ok=True)
    output = tmp_path / "plan.json"
    command = [sys.executable, "-m", "planner", "plan", f"{file}:hangs", "--mesh", "dp=2", "-o", str(output)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(pid.exists)
    time.sleep(0.2)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "stopped" in errors and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
    assert not alive(int(pid.read_text()))


def test_the_process_ends_with_its_parent(file: Path) -> None:
    pid = file.with_name("pid")
    pid.unlink(missing_ok=True)
    code = (
        "from planner.graph import ModelRequest\nfrom planner.loading import trace_apart\n"
        f"trace_apart(ModelRequest(model={str(file) + ':hangs'!r}))"
    )
    running = subprocess.Popen([sys.executable, "-c", code])
    wait_for(pid.exists)
    time.sleep(0.2)
    running.kill()
    running.wait()
    wait_for(lambda: not alive(int(pid.read_text())))


OPENING = """
import gzip, json, sys, time
from pathlib import Path
from planner.graph import JointGraph
path = Path(sys.argv[1])
began = time.process_time()
json.loads(gzip.decompress(path.read_bytes()))
parsed = time.process_time()
graph = JointGraph.load(path)
print((time.process_time() - parsed) / (parsed - began), len(graph.nodes), graph.fingerprint)
"""


def test_opening_a_saved_graph_costs_little_more_than_reading_its_file(tmp_path: Path) -> None:
    """Llama-3-8B, 32 layers: the graph that the app ships. A ratio, in a process that holds nothing else."""
    shipped = Path(__file__).parents[2] / "app" / "demo" / "llama3-8b.graph.json.gz"
    path = tmp_path / "graph.json.gz"
    graph = JointGraph.load(shipped)
    graph.save(path)
    told = subprocess.run([sys.executable, "-c", OPENING, str(path)], capture_output=True, text=True, check=True).stdout.split()
    assert float(told[0]) < 15.0
    assert int(told[1]) > 6000 and told[2] == graph.fingerprint


def wait_for(happened: object, limit_s: float = 300.0) -> None:
    assert callable(happened)
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
