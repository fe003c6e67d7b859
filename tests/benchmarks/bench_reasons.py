"""How fast the answers to "what if" and "why not" are on Llama-3-8B. Prints a table; asserts nothing, since machines differ.

python -m tests.benchmarks.bench_reasons --graph saved.json.gz     # (32,8), all 32 layers
python -m tests.benchmarks.bench_reasons --mesh dp=8,tp=8 --layers 1
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.workbench import Workbench

MODULES = ("attention.wq", "attention.wk", "attention.wo", "feed_forward.w1", "feed_forward.w2")
PHASES = ("linear/fwd#0", "linear_input_grad/bwd#0", "linear_weight_grad/bwd#0")
TARGET_PLACEMENTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=32,tp=8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--graph", type=Path)
    args = parser.parse_args()
    mesh = Mesh.parse(args.mesh)
    if args.graph:
        graph = JointGraph.load(args.graph)
    else:
        graph = trace(ModelRequest(model="llama3-8b", layers=args.layers, batch=mesh.num_devices))
    bench = Workbench.build(graph, mesh)
    bench.warm_up()
    constraints = bench.default_constraints()
    plan = bench.solve(constraints)
    layer = len(graph.layers) // 2
    print(f"{graph.request.model}, {len(graph.layers)} layers, {mesh}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"  {'overrides of':52s} {'rows':>4s} {'proved':>6s} {'wall s':>7s} {'CPU s':>6s} {'CPU s / 16':>10s}  target <= 1 s")
    total = [0.0, 0]
    for module in MODULES:
        for phase in PHASES:
            key = f"layers.{layer}.{module}/{phase}"
            wall, cpu = time.perf_counter(), time.process_time()
            rows = bench.overrides(key, constraints=constraints)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            total[0] += cpu
            total[1] += len(rows)
            proved = sum(row.certified for row in rows)
            print(f"  {key:52s} {len(rows):4d} {proved:6d} {wall:7.2f} {cpu:6.2f} {cpu / len(rows) * TARGET_PLACEMENTS:10.2f}")
    print(f"  all: {total[0] / total[1] * 1e3:.0f} ms CPU a row, {total[0] / total[1] * TARGET_PLACEMENTS:.2f} s CPU for 16 rows")
    key = f"layers.{layer}.attention.wq/linear/fwd#0"
    wall, cpu = time.perf_counter(), time.process_time()
    found = bench.explain(plan, key, bench.legal(key)[0])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"  explain {key}: {wall:.2f} s wall, {cpu:.2f} s CPU, {found.verdict}, {len(found.terms)} terms")


if __name__ == "__main__":
    main()
