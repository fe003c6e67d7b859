"""Does the objective rank plans as the timeline does? The objective is serial; in the timeline communication runs beside compute.

Run: python -m tests.benchmarks.bench_timeline [--plans 40] [--graph graph.json.gz --mesh dp=8,tp=8 [--gpus-per-node 8]]

Prints, per model and pool of plans, Kendall's tau between objective and step time of both schedules, the same (overlapped) on a
machine whose CPU takes no time, and the regret of trusting the objective: how much longer the overlapped step of the plan with
the least objective takes than the best in the pool. Small models wait for the CPU; the objective knows no CPU. Random plans
differ wildly, so that tau over them is easy; the pool of good plans (the optimum under one random pin each, and the recipes) is
the hard one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.actions import OVERLAPPED, SERIAL
from planner.constraint import Pin, parse_recipe
from planner.costing.timeline import simulate
from planner.errors import PlannerError
from planner.graph import JointGraph, ModelRequest
from planner.hardware import LaunchConstants
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.plan import Plan
from planner.recipes import RECIPES
from planner.workbench import Workbench
from tests.oracles.random_plan import random_plan


def main() -> None:
    options = _options()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    taus = f"{'serial':>7s} {'overl.':>7s} {'no CPU':>7s}"
    print(f"{'model':12s} {'mesh':12s} {'pool':8s} {'plans':>5s} {taus} {'regret':>7s} {'no CPU':>7s} {'CPU s':>6s}")
    for graph, mesh in _models(options):
        bench = Workbench.build(graph, mesh, gpus_per_node=options.gpus_per_node)
        for pool, plans in (("random", random_plans(bench, options.plans)), ("good", good_plans(bench, options.plans))):
            print(f"{graph.request.model:12s} {mesh!s:12s} {pool:8s} {_row(bench, plans)}", flush=True)


def _models(options: argparse.Namespace) -> Iterator[tuple[JointGraph, Mesh]]:
    if options.graph:
        yield JointGraph.load(options.graph), Mesh.parse(options.mesh)
        return
    yield trace(ModelRequest(model="llama3-tiny", batch=8)), Mesh.parse("dp=4,tp=2")
    yield trace(ModelRequest(model="llama3-8b", layers=1, batch=64)), Mesh.parse("dp=8,tp=8")


def random_plans(bench: Workbench, count: int) -> list[Plan]:
    return [random_plan(bench.costs, seed, layers_alike=True) for seed in range(count)]


def good_plans(bench: Workbench, count: int) -> list[Plan]:
    """The optimum, recipes where they fit, and optima under one random pin each; equal plans once."""
    found: dict[str, Plan] = {}
    rng = np.random.default_rng(0)
    keys = [node.key for node in bench.graph.nodes if node.is_op]
    for extra in _constraints(bench, rng, keys, count):
        try:
            plan = bench.solve((*bench.default_constraints(), *extra), exact=False, time_limit_s=20)
        except PlannerError as error:
            print(f"  left out: {error}".splitlines()[0][:120])
            continue
        found.setdefault(plan.plan_id, plan)
    return list(found.values())


def _constraints(bench: Workbench, rng: np.random.Generator, keys: Sequence[str], count: int) -> Iterator[tuple]:  # type: ignore[type-arg]
    yield ()
    for recipe in RECIPES:
        try:
            yield (parse_recipe(recipe, bench.mesh),)
        except PlannerError:
            continue  # a recipe that needs another number of axes
    for _ in range(count):
        key = keys[rng.integers(len(keys))]
        legal = bench.legal(key)
        yield (Pin(where=key, placements=legal[rng.integers(len(legal))]),)


def kendall_tau(x: Sequence[float], y: Sequence[float]) -> float:
    """Tau-b: concordant minus discordant pairs over all pairs, ties in either left out of its side."""
    a, b = (np.sign(np.subtract.outer(v, v))[np.triu_indices(len(v), 1)] for v in (np.array(x), np.array(y)))
    together = float(np.sqrt((a != 0).sum() * (b != 0).sum()))
    return float((a * b).sum()) / together if together else float("nan")


def _row(bench: Workbench, plans: Sequence[Plan]) -> str:
    start = time.process_time()
    free = replace(bench.hardware, launch=LaunchConstants(eager_us=0.0, compiled_us=0.0, collective_us=0.0))
    serial = [bench.timeline(plan, SERIAL).step_us for plan in plans]
    found = [bench.timeline(plan, OVERLAPPED) for plan in plans]
    overlapped = [timeline.step_us for timeline in found]
    no_cpu = [simulate(timeline.actions, free).step_us for timeline in found]
    seconds = time.process_time() - start
    objective = [plan.objective_us for plan in plans]
    first = int(np.argmin(objective))
    taus = " ".join(f"{kendall_tau(objective, steps):7.3f}" for steps in (serial, overlapped, no_cpu))
    regrets = " ".join(f"{100 * (steps[first] / min(steps) - 1):6.2f}%" for steps in (overlapped, no_cpu))
    return f"{len(plans):5d} {taus} {regrets} {seconds:6.2f}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--graph", type=Path)
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
