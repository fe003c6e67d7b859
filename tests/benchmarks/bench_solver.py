"""How fast the solver is on a real model.

Run: python -m tests.benchmarks.bench_solver --mesh dp=32,tp=8 [--layers 1] [--pins 200 [--against-ilp 10 [--whole 3]]]
     python -m tests.benchmarks.bench_solver --model llama3-70b --mesh dp=16,tp=8 --growth 1,2,4,8,16,32,80

Prints tables of processor seconds (of this process, so that other jobs on the machine count little); asserts nothing about time,
since machines differ. Compilation of the loops is reported apart. Pins are uniformly random: an op, and one of its legal
placements. "At once" is message passing alone; what it leaves open is solved again with the integer program on the core.

`--against-ilp N` examines the first N pins by what shares no code with the solver's own proof and fails if a plan or a bound
was wrong. The bound is computed again from the messages in plain numpy, without the tiny tie-breaking prices
(`tests/oracles/dual.py`), the price of the plan from its definition. Strategies that this bound shows to be dearer than the plan
are dropped; HiGHS finds the optimum of all others. With `--whole M` the first M pins also go to HiGHS with every strategy: one
layer on two axes can be solved so; three axes cannot (an edge has thousands of pairs).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
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
from planner.plan import SolveReport
from planner.solving.core import solve_core
from planner.solving.message_passing import TOLERANCE
from planner.solving.solve import Solution, Solver
from planner.units import GIB, MIB, parse_bytes
from planner.workbench import Workbench, boundaries
from tests.oracles.dual import price, prove

T = TypeVar("T")

_LIMIT_S = 300.0
"""Wall seconds of one solve: ample, since other jobs may have the machine; processor seconds are what is reported."""


@dataclass(frozen=True)
class Row:
    """One solve: seconds of message passing, relative gap, whether it is proved; and the same after the integer program."""

    seconds: float
    gap: float
    proved: bool
    later_s: float
    later_gap: float
    later_proved: bool


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
            print(f"    {options.pins} pins: {pin_rows(solver, constraints, options.pins, options.seed)}", flush=True)
            if not any(isinstance(c, MemoryBudget) for c in constraints):
                pins = random_pins(solver, options.pins, options.seed)[: options.against_ilp]
                _against_ilp(solver, constraints, pins, options.whole)
        if options.only_free:
            break
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
    parser.add_argument("--against-ilp", type=int, default=0, help="how many pins to examine with the integer program")
    parser.add_argument("--whole", type=int, default=0, help="how many of these also with every strategy")
    parser.add_argument("--only-free", action="store_true", help="without a memory budget only")
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
    found = solver.solve(constraints, exact=None if exact else False, time_limit_s=_LIMIT_S)
    return time.process_time() - began, found


def _cold(solver: Solver, constraints: Sequence[Constraint], exact: bool) -> None:
    seconds, found = _timed(solver, constraints, exact)
    report, budgets = found.report, [c for c in constraints if isinstance(c, MemoryBudget)]
    used = f", {(found.used_bytes or 0) / GIB:.2f} GiB" + (f" of {budgets[0].num_bytes / GIB:.2f}" if budgets else "")
    print(
        f"    cold: {seconds:.2f} s, {report.status}, {report.objective_us:.1f} us, gap {report.gap:.1e}, {report.method}{used}"
    )


def _pinned(solver: Solver, constraints: Sequence[Constraint], pin: Pin) -> Row | None:
    try:
        seconds, found = _timed(solver, (*constraints, pin), exact=False)
        gap, proved = found.report.gap, found.report.status == "optimal"
        if proved:
            return Row(seconds, gap, proved, seconds, gap, proved)
        later, found = _timed(solver, (*constraints, pin), exact=True)
    except InfeasibleError:
        return None
    row = Row(seconds, gap, proved, later, found.report.gap, found.report.status == "optimal")
    said = f"{gap:.1e} after {seconds:.1f} s, {row.later_gap:.1e} after {later:.1f} s"
    print(f"      open at once: {pin.describe()}: {said}", file=sys.stderr, flush=True)
    return row


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


_MOST_COLUMNS, _MOST_WHOLE = 200_000, 400_000
"""Columns of an integer program of a core, and of a whole problem, that HiGHS is asked to solve."""


def _against_ilp(solver: Solver, constraints: Sequence[Constraint], pins: Sequence[Pin], whole: int) -> None:
    """Fails if a bound was above what HiGHS finds, or a proved plan dearer than that."""
    counts = dict.fromkeys(("proved by hand", "core", "whole", "refused", "too large"), 0)
    for number, pin in enumerate(pins):
        try:
            report, choice = _solution_in_numbers(solver, (*constraints, pin))
        except InfeasibleError:
            counts["refused"] += 1
            continue
        problem, passing = solver.problem, solver._passing
        cost = passing.cost_us.copy()
        proof = prove(problem.layout, cost, passing.messages)
        value = price(problem.layout, cost, choice)
        assert abs(value - report.objective_us) <= 1e-9 * value, (pin.describe(), value, report.objective_us)
        counts["proved by hand"] += value - proof.bound_us <= TOLERANCE * value
        core = np.where(proof.with_strategy_us <= value * (1 + 1e-9), cost, np.inf)
        core[problem.layout.first[:-1] + choice] = cost[problem.layout.first[:-1] + choice]
        programs = [("core", core, _MOST_COLUMNS)] + ([("whole", cost, _MOST_WHOLE)] if number < whole else [])
        for name, prices, most in programs:
            best = solve_core(
                problem.layout, prices, problem.num_bytes, budget_bytes=None, max_columns=most, time_limit_s=120.0, gap_us=1e-3
            )
            if best is None or best.status != "optimal":
                counts["too large"] += 1
                continue
            counts[name] += 1
            assert report.bound_us <= best.value_us * (1 + 1e-9) + 1e-3, (pin.describe(), best.value_us, report.bound_us)
            dearer = report.objective_us - best.value_us
            assert report.status != "optimal" or dearer <= 1.1 * TOLERANCE * value + 1e-3, (pin.describe(), dearer)
    said = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"    {len(pins)} pins examined, none wrong: {said}", flush=True)


def _solution_in_numbers(solver: Solver, constraints: Sequence[Constraint]) -> tuple[SolveReport, np.ndarray]:
    """A solve, and its choice of strategy per problem node."""
    found = solver.solve(constraints, exact=False)
    problem = solver.problem
    number = np.zeros(problem.layout.num_nodes, np.int64)
    number[problem.node_of] = found.strategy
    for key, node in problem.shared_of.items():
        number[node] = found.shared[key]
    choice = [int(np.flatnonzero(problem.numbers_at(node) == number[node])[0]) for node in range(len(number))]
    return found.report, np.array(choice)


def pin_rows(solver: Solver, constraints: Sequence[Constraint], count: int, seed: int = 0) -> str:
    """Solve with each of `count` random pins. -> what that took and what was proved, in a line"""
    found = [_pinned(solver, constraints, pin) for pin in random_pins(solver, count, seed)]
    rows = [row for row in found if row is not None]
    ms = np.array([row.seconds for row in rows]) * 1e3
    at_last = np.mean([row.later_proved and row.later_s <= 5.0 for row in rows])
    return (
        f"median {np.median(ms):.0f}, p90 {np.quantile(ms, 0.9):.0f}, p99 {np.quantile(ms, 0.99):.0f} ms; "
        f"proved at once {np.mean([row.proved for row in rows]):.1%}, within 5 s {at_last:.1%}; "
        f"largest gap at once {max(row.gap for row in rows):.1e}, at last {max(row.later_gap for row in rows):.1e}; "
        f"refused {count - len(rows)}"
    )


if __name__ == "__main__":
    main()
