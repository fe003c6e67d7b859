"""Speed and size of planning on real models, beside their targets: one row per piece of work, each in a process of its own.

    python -m tests.benchmarks.bench_table [--graphs FOLDER] [--rows 8B-2d,70B-2d,...] [--pins 200]

Wall seconds, processor seconds (of that process; other jobs on the machine count little) and peak memory. Nothing is asserted.
Graphs are traced once, with one sequence per device group (the model's own batch), and kept in FOLDER.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.constraint import MemoryBudget
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.pipeline import peak_rss_bytes, trace
from planner.units import GIB
from planner.workbench import Workbench
from tests.benchmarks.bench_solver import pin_rows

Taken = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Work:
    """A model on a mesh; `seconds` limits the solve (wall), `pins` of the asked number are tried if it is not 0."""

    name: str
    model: str
    mesh: str
    layers: int | None
    target: str
    seconds: float = 600.0
    pins: bool = False


WORKS = (
    Work("8B-2d", "llama3-8b", "dp=32,tp=8", None, "tables <= 1 s, solve <= 0.3 s; pins 0.05 / 0.5 s, 95 %", pins=True),
    Work("8B-3d", "llama3-8b", "dp=2,fsdp=8,tp=8", None, "all <= 4 s, <= 1 GB; pins median <= 1 s", pins=True),
    Work("8B-4d-1", "llama3-8b", "dp=2,fsdp=4,cp=4,tp=4", 1, "all <= 10 s, <= 2 GB, certified"),
    Work("8B-4d", "llama3-8b", "dp=2,fsdp=4,cp=4,tp=4", None, "within 0.5 % in <= 45 s"),
    Work("70B-2d", "llama3-70b", "dp=16,tp=8", None, "all <= 5 s, gap <= 0.2 %"),
    Work("70B-3d", "llama3-70b", "dp=2,fsdp=8,tp=8", None, "plan with its gap"),
    *(Work(f"8B-axes-{i + 1}", "llama3-8b", mesh, 1, "growth with axes")
      for i, mesh in enumerate(("tp=128", "dp=16,tp=8", "dp=2,fsdp=8,tp=8", "dp=2,fsdp=4,cp=4,tp=4"))),
    *(Work(f"70B-deep-{n}", "llama3-70b", "dp=16,tp=8", n, "growth with layers: linear") for n in (8, 16, 32, 64, 80)),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, help="where traced graphs are kept")
    parser.add_argument("--rows", help="names of rows, with commas: " + ", ".join(work.name for work in WORKS))
    parser.add_argument("--pins", type=int, default=200)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(_measure(next(work for work in WORKS if work.name == options.child), options)))
        return
    with _folder(options.graphs) as graphs:
        _table(options, graphs)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def _table(options: argparse.Namespace, graphs: Path) -> None:
    print(f"{os.cpu_count()} cores; load at the start {os.getloadavg()[0]:.1f}; cells are wall / processor seconds")
    print("| work | strategies + costs | problem | solve | together | peak | status, gap | pins | target | load |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    chosen = [work for work in WORKS if options.rows is None or work.name in options.rows.split(",")]
    results: dict[str, dict[str, Any]] = {}
    for work in chosen:
        command = [sys.executable, "-m", "tests.benchmarks.bench_table", "--child", work.name, "--pins", str(options.pins)]
        done = subprocess.run([*command, "--graphs", str(graphs)], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {work.name} | failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]} |", flush=True)
            continue
        results[work.name] = found = json.loads(done.stdout.splitlines()[-1])
        cells = [_pair(found[part]) for part in ("tables", "problem", "solve", "together")]
        print(
            f"| {work.model}, {found['layers']} layers, {work.mesh} | {' | '.join(cells)} | {found['peak_gib']:.2f} GiB "
            f"| {found['status']}, {found['gap']:.1e} | {found['pins']} | {work.target} | {os.getloadavg()[0]:.0f} |",
            flush=True,
        )
    for prefix, size, title in (("8B-axes-", None, "per mesh axis more"), ("70B-deep-", "layers", "exponent of the layers")):
        rows = [found for name, found in results.items() if name.startswith(prefix)]
        if len(rows) > 1:
            print(f"{title}: {_growth(rows, size)}")


def _pair(seconds: list[float]) -> str:
    return f"{seconds[0]:.2f} / {seconds[1]:.2f}"


def _growth(rows: list[dict[str, Any]], size: str | None) -> str:
    """Of processor seconds after tracing. Layers: exponent between neighbouring rows; axes: the factor."""
    said = []
    for before, after in itertools.pairwise(rows):
        factor = after["together"][1] / max(before["together"][1], 1e-3)
        said.append(f"x {factor:.1f}" if size is None else f"{math.log(factor) / math.log(after[size] / before[size]):.2f}")
    return ", ".join(said)


def _measure(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    """In the child."""
    from planner.costing.estimate import estimate_costs
    from planner.enumerating.enumerate import enumerate_strategies
    from planner.hardware import load_profile
    from planner.solving.solve import Solver

    graph = _graph(work, options.graphs)
    Workbench.build(graph, Mesh.parse("dp=1")).warm_up()
    gc.collect()
    mesh, hardware = Mesh.parse(work.mesh), load_profile("h100_sxm")
    taken: Taken = {}

    def timed(name: str, do: Callable[[], Any]) -> Any:
        began = time.perf_counter(), time.process_time()
        result = do()
        taken[name] = time.perf_counter() - began[0], time.process_time() - began[1]
        return result

    space = timed("strategies", lambda: enumerate_strategies(graph, mesh))
    costs = timed("costs", lambda: estimate_costs(space, hardware))
    solver = timed("problem", lambda: Solver(costs))
    fixed = tuple(c for c in Workbench(costs, hardware, solver).default_constraints() if not isinstance(c, MemoryBudget))
    report = timed("solve", lambda: solver.solve(fixed, time_limit_s=work.seconds, exact=False)).report
    peak = peak_rss_bytes() / GIB
    return {
        "layers": len(graph.layers),
        "tables": _sum(taken, "strategies", "costs"),
        "problem": taken["problem"],
        "solve": taken["solve"],
        "together": _sum(taken, *taken),
        "status": report.status,
        "gap": report.gap,
        "peak_gib": peak,
        "pins": pin_rows(solver, fixed, options.pins) if work.pins and options.pins else "",
    }


def _sum(taken: Taken, *names: str) -> tuple[float, float]:
    return sum(taken[name][0] for name in names), sum(taken[name][1] for name in names)


def _graph(work: Work, folder: Path) -> JointGraph:
    path = folder / f"{work.model}{'' if work.layers is None else f'-{work.layers}layer'}.graph.json.gz"
    if not path.exists():
        trace(ModelRequest(model=work.model, layers=work.layers)).save(path)
    return JointGraph.load(path)


if __name__ == "__main__":
    main()
