"""How fast the solver is on a real model.

Run: python -m tests.benchmarks.bench_solver --mesh dp=32,tp=8 [--layers 1] [--pins 200 [--check 10]]
     python -m tests.benchmarks.bench_solver --model llama3-70b --mesh dp=16,tp=8 --growth 1,2,4,8,16,32,80

Prints tables of processor seconds (of this process, so that other jobs on the machine count little); asserts nothing about time,
since machines differ. Compilation of the loops is reported apart. Pins are uniformly random: an op, and one of its legal
placements. `--check` solves the first pins again with the integer program and fails if a proved plan or a bound was wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from planner.constraint import Constraint, MemoryBudget, Pin
from planner.costing.estimate import estimate_costs
from planner.enumerating.enumerate import enumerate_strategies
from planner.errors import InfeasibleError
from planner.graph import JointGraph, ModelRequest, TensorRef
from planner.mesh import Mesh
from planner.pipeline import hardware_profile, peak_rss_bytes, trace
from planner.solving.conflicts import living
from planner.solving.core import solve_core
from planner.solving.restrictions import restrict
from planner.solving.solve import Solution, Solver
from planner.units import GIB, MIB, parse_bytes
from planner.workbench import Workbench, boundaries

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One solve: seconds, relative gap (`nan` if refused), whether it is proved."""

    seconds: float
    gap: float
    proved: bool


def main() -> None:
    options = _options()
    mesh = Mesh.parse(options.mesh)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.growth:
        _growth(options, mesh)
    else:
        _one(options, mesh)


def _one(options: argparse.Namespace, mesh: Mesh) -> None:
    """Cold solve and pins of one model."""
    began = time.process_time()
    if options.graph is not None:
        graph = JointGraph.load(options.graph)
    else:
        graph = trace(ModelRequest(model=options.model, layers=options.layers, batch=options.batch or mesh.num_devices))
    Workbench.build(graph, Mesh.parse("dp=1"))  # imports
    traced = time.process_time()
    bench = Workbench.build(graph, mesh, options.hardware)
    built = time.process_time()
    compiled = bench.solver.warm_up()
    lay = bench.solver.problem.layout
    print(f"{graph.request.model}, {len(graph.layers)} layers, {mesh}: {len(graph.nodes)} graph nodes")
    print(f"  load or trace {traced - began:.2f} s, tables + problem {built - traced:.2f} s, compile {compiled:.2f} s")
    print(
        f"  problem: {lay.num_nodes} nodes, {lay.num_edges} edges, {lay.first[-1]} strategies (at most "
        f"{np.diff(lay.first).max()} a node), at most {lay.table_size.max()} placements"
    )
    *fixed, budget = bench.default_constraints(parse_bytes(options.memory) if options.memory else None)
    for title, constraints in (("no budget", tuple(fixed)), ("with budget", (*fixed, budget))):
        print(f"  {title}:")
        solver = Solver(bench.costs)
        _cold(solver, constraints, options.exact)
        if options.pins:
            rows = [_pinned(solver, constraints, pin, options.exact) for pin in random_pins(solver, options.pins, options.seed)]
            _summary(f"{options.pins} pins", [row for row in rows if row is not None], options.pins)
            if not any(isinstance(c, MemoryBudget) for c in constraints):
                _check(solver, constraints, random_pins(solver, options.pins, options.seed)[: options.check])
    print(f"  peak memory of the process {peak_rss_bytes() / GIB:.2f} GiB")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--graph", type=Path, help="a saved graph, instead of tracing")
    parser.add_argument("--mesh", default="dp=32,tp=8")
    parser.add_argument("--hardware", default="h100_sxm")
    parser.add_argument("--memory", help="budget, for example 40GiB (default: that of the hardware)")
    parser.add_argument("--pins", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=int, default=0, help="how many pins to solve again with the integer program")
    parser.add_argument("--growth", help="numbers of layers: how times and memory grow, for example 1,2,4,8")
    parser.add_argument("--exact", action="store_true", help="let the integer program finish what is not proved")
    return parser.parse_args()


def random_pins(solver: Solver, count: int, seed: int) -> list[Pin]:
    """Uniformly random ops with a choice, and one of their legal placements."""
    space = solver.costs.space
    rng = np.random.default_rng(seed)
    ops = [i for i, node in enumerate(space.graph.nodes) if node.is_op and node.outputs[0] is not None]
    ops = [i for i in ops if len(solver.legal(TensorRef(i, 0))) > 1]
    pins = []
    for index in rng.choice(ops, count):
        ref = TensorRef(int(index), 0)
        placements = space.lattice(ref).placements(int(rng.choice(solver.legal(ref))))
        pins.append(Pin(where=space.graph.nodes[ref.node].key, placements=placements))
    return pins


def _timed(solver: Solver, constraints: Sequence[Constraint], exact: bool) -> tuple[float, Solution]:
    began = time.process_time()
    found = solver.solve(constraints, exact=None if exact else False)
    return time.process_time() - began, found


def _cold(solver: Solver, constraints: Sequence[Constraint], exact: bool) -> None:
    seconds, found = _timed(solver, constraints, exact)
    report, budgets = found.report, [c for c in constraints if isinstance(c, MemoryBudget)]
    used = f", {(found.used_bytes or 0) / GIB:.2f} GiB" + (f" of {budgets[0].num_bytes / GIB:.2f}" if budgets else "")
    print(
        f"    cold: {seconds:.2f} s, {report.status}, {report.objective_us:.1f} us, gap {report.gap:.1e}, {report.method}{used}"
    )


def _pinned(solver: Solver, constraints: Sequence[Constraint], pin: Pin, exact: bool) -> Row | None:
    try:
        seconds, found = _timed(solver, (*constraints, pin), exact)
    except InfeasibleError:
        return None
    return Row(seconds, found.report.gap, found.report.status == "optimal")


def _growth(options: argparse.Namespace, mesh: Mesh) -> None:
    """A row per number of layers; linear growth shows as equal numbers per layer."""
    Workbench.build(trace(ModelRequest(model="llama3-tiny", layers=1)), mesh).warm_up()
    batch, hardware = options.batch or mesh.num_devices, hardware_profile(options.hardware)
    print(f"{options.model}, {mesh}; seconds")
    print("  layers  nodes  trace  strategies  prices  problem  solve  all but the trace per layer    MiB  gap")
    for layers in map(int, options.growth.split(",")):
        took: list[float] = []

        def timed(work: Callable[[], T], took: list[float] = took) -> T:
            gc.collect()
            began = time.process_time()
            result = work()
            took.append(time.process_time() - began)
            return result

        request = ModelRequest(model=options.model, layers=layers, batch=batch)
        graph = timed(lambda request=request: trace(request))  # type: ignore[misc]
        space = timed(lambda graph=graph: enumerate_strategies(graph, mesh))  # type: ignore[misc]
        costs = timed(lambda space=space: estimate_costs(space, hardware))  # type: ignore[misc]
        solver = timed(lambda costs=costs: Solver(costs))  # type: ignore[misc]
        fixed = boundaries(graph, mesh)
        found = timed(lambda solver=solver, fixed=fixed: solver.solve(fixed, exact=False))  # type: ignore[misc]
        print(
            f"  {layers:6d} {len(graph.nodes):6d} {took[0]:6.2f} {took[1]:11.2f} {took[2]:7.2f} {took[3]:8.2f} {took[4]:6.2f} "
            f"{sum(took[1:]) / layers:28.3f} {peak_rss_bytes() / MIB:6.0f}  {found.report.gap:.1e}"
        )


_WIDTHS = (2e-4, 2e-5, 2e-6)
"""Strategies that may cost up to this part more than the plan found stay in the integer program of a check: the first part
that gives a program of a size that can be solved."""


def _check(solver: Solver, constraints: Sequence[Constraint], pins: Sequence[Pin]) -> None:
    """The integer program on the pinned problem: no bound above its optimum, no proved plan dearer than it."""
    problem, checked, skipped, better = solver.problem, 0, 0, 0
    for pin in pins:
        try:
            report = solver.solve((*constraints, pin), exact=False).report
        except InfeasibleError:
            continue
        alive = living(problem, [restrict(c, solver.costs, problem) for c in (*constraints, pin)])
        assert alive is not None
        lowest = solver._passing.bound_now() + solver._passing.reduced_costs()
        found = None
        for width in _WIDTHS:
            cost = np.where(alive & (lowest <= report.objective_us * (1 + width)), problem.unary_us, np.inf)
            if found is None:
                found = solve_core(
                    problem.layout,
                    cost,
                    problem.num_bytes,
                    budget_bytes=None,
                    max_columns=200_000,
                    time_limit_s=60.0,
                    gap_us=1e-3,
                )
        if found is None or found.status != "optimal":
            skipped += 1
            continue
        checked += 1
        assert found.value_us >= report.bound_us * (1 - 1e-9) - 1e-3, (pin.describe(), found.value_us, report.bound_us)
        dearer = report.objective_us - found.value_us
        assert report.status != "optimal" or dearer <= 1.1e-6 * report.objective_us + 1e-3, (pin.describe(), dearer)
        better += dearer > 1.1e-6 * report.objective_us
    print(f"    checked with the integer program: {checked} right, {better} of them not proved and dearer; {skipped} too large")


def _summary(title: str, rows: Sequence[Row], asked: int) -> None:
    ms = np.array([row.seconds for row in rows]) * 1e3
    gaps = np.array([row.gap for row in rows])
    proved = np.array([row.proved for row in rows])
    left = gaps[~proved]
    print(
        f"    {title}: first {ms[0]:.0f} ms, all: median {np.median(ms):.0f}, p90 {np.quantile(ms, 0.9):.0f}, "
        f"p99 {np.quantile(ms, 0.99):.0f} ms; proved {proved.mean():.1%}, "
        f"other gaps: median {np.median(left) if len(left) else 0:.1e}, "
        f"largest {left.max() if len(left) else 0:.1e}; refused {asked - len(rows)}"
    )


if __name__ == "__main__":
    main()
