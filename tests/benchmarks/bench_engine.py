"""Speed and size of the engine on Llama-3-8B, printed beside the targets. Nothing is asserted: the machine may be shared.

python -m tests.benchmarks.bench_engine                          # (32,8), all 32 layers, 200 random pins
python -m tests.benchmarks.bench_engine --mesh dp=8,tp=8 --pins 50 --layers 1
python -m tests.benchmarks.bench_engine --graph saved.json.gz    # skip the trace
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner import pipeline
from planner.constraint import Constraint, MemoryBudget, Pin
from planner.errors import InfeasibleError
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.units import GIB, MIB
from planner.workbench import Workbench


@dataclass(frozen=True)
class Row:
    """One line of the table: what was measured, the result, the target."""

    what: str
    result: str
    target: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--mesh", default="dp=32,tp=8")
    parser.add_argument("--pins", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graph", type=Path)
    args = parser.parse_args()
    mesh = Mesh.parse(args.mesh)
    print(f"{args.model}, layers {args.layers or 'all'}, mesh {mesh}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    rows, graph = _graph(args, mesh)
    rows += _measure(graph, mesh, args)
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(f"  {row.what:{width}s}  {row.result:>58s}  {row.target}")


def _graph(args: argparse.Namespace, mesh: Mesh) -> tuple[list[Row], JointGraph]:
    if args.graph:
        return [], JointGraph.load(args.graph)
    import torch  # noqa: F401 - the import is not part of the trace

    request = ModelRequest(model=args.model, layers=args.layers, batch=args.batch or mesh.num_devices)
    pipeline.trace(ModelRequest(model="llama3-tiny", layers=1))
    start = time.perf_counter()
    graph = pipeline.trace(request)
    traced = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json.gz"
        graph.save(path)
        start = time.perf_counter()
        JointGraph.load(path)
        loaded, size = time.perf_counter() - start, path.stat().st_size
    return [
        Row("trace, imports apart", f"{traced:.1f} s, {len(graph.nodes)} nodes", "<= 12 s"),
        Row("load the saved graph", f"{loaded:.2f} s, {size / MIB:.2f} MiB", "<= 1 s"),
    ], graph


def _measure(graph: JointGraph, mesh: Mesh, args: argparse.Namespace) -> list[Row]:
    start = time.perf_counter()
    bench = Workbench.build(graph, mesh)
    tables = time.perf_counter() - start
    compiled = bench.warm_up()
    defaults = bench.default_constraints()
    boundaries: tuple[Constraint, ...] = tuple(c for c in defaults if not isinstance(c, MemoryBudget))
    rows = [
        Row("strategies + costs", f"{tables:.2f} s, {bench.space.num_strategies} strategies", "<= 1 s"),
        Row("compile", f"{compiled:.1f} s"),
    ]
    for label, constraints in (("without budget", boundaries), ("with the default budget", defaults)):
        start = time.perf_counter()
        plan = bench.solve(constraints)
        seconds = time.perf_counter() - start
        report = plan.report
        found = f"{plan.objective_us / 1e3:.1f} ms, {plan.memory.peak_bytes / GIB:.1f} GiB"
        result = f"{seconds:.2f} s, {report.status}, gap {report.gap:.1e}, {found}"
        rows.append(Row(f"solve, untied, {label}", result, "<= 0.3 s"))
        rows.append(_pins(bench, constraints, args.pins, args.seed, label))
    rows.append(Row("peak memory of this process", f"{pipeline.peak_rss_bytes() / GIB:.2f} GiB"))
    return rows


def _pins(bench: Workbench, constraints: tuple[Constraint, ...], count: int, seed: int, label: str) -> Row:
    """Pin a uniformly random op to a random legal placement, solve again, unpin."""
    rng = np.random.default_rng(seed)
    keys = [node.key for node in bench.graph.nodes if node.is_op and len(bench.legal(node.key)) > 1]
    seconds, gaps, infeasible = [], [], 0
    for _ in range(count):
        key = str(rng.choice(keys))
        legal = bench.legal(key)
        pin = Pin(where=key, placements=legal[int(rng.integers(len(legal)))])
        start = time.perf_counter()
        try:
            gaps.append(bench.solve((*constraints, pin)).report.gap)
        except InfeasibleError:
            infeasible += 1
        seconds.append(time.perf_counter() - start)
    median, high = np.quantile(seconds, [0.5, 0.99])
    proved = np.mean(np.array(gaps) <= 1e-6)
    result = f"{median * 1e3:.0f} / {high * 1e3:.0f} ms, {proved:.1%} proved, worst gap {max(gaps):.1e}, {infeasible} infeasible"
    return Row(f"{count} random pins, median / p99, {label}", result, "<= 50 / 500 ms, >= 95 % proved at once")


if __name__ == "__main__":
    main()
