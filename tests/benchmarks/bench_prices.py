"""What better prices change: each sample model planned under a plain model of time and under the profile's, both judged by ours.

The plain model is the one that published planners use: one efficiency of 0.70 for peak, memory and links, 7 us per kernel, causal
attention at all of its FLOPs, collectives as latency plus bytes over bandwidth (25 us, all-to-all 50 us). Kernels are fused as
ours are, which flatters it.

Run: python -m tests.benchmarks.bench_prices [--only llama3-8b] [--layers 2]

Printed per model, in ms: what the plain model says of its plan, what our prices say of the same plan (in series, and the
simulated step), the same of the plan chosen by our prices, how much shorter that step is, and how many ops differ in placement.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import Any

from planner.costing.estimate import estimate_costs
from planner.graph import ModelRequest
from planner.hardware import HardwareProfile, load_profile
from planner.memory import MemoryPolicy
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.plan import Plan
from planner.solving.solve import Solver
from planner.workbench import Workbench
from tests.benchmarks.bench_recipes import CASES, Case

EFFICIENCY, KERNEL_US, MESSAGE_US, EXCHANGE_US = 0.70, 7.0, 25.0, 50.0
SIZES = [2**power for power in range(9, 37)]


def plain(profile: HardwareProfile) -> HardwareProfile:
    """The profile with its datasheet numbers and nothing measured."""
    content = profile.to_dict()
    values: dict[str, Any] = {
        "gemm.compute_efficiency": EFFICIENCY, "gemm.memory_efficiency": EFFICIENCY, "gemm.sharpness": 20.0,
        "gemm.launch_us": KERNEL_US, "clock.sustained": 1.0, "pointwise.efficiency": EFFICIENCY, "pointwise.launch_us": KERNEL_US,
        "attention.multiprocessors": 1, "attention.backward_rate": 1.0, "attention.launch_us": KERNEL_US,
    }  # fmt: skip
    constants = profile.constants
    for name in constants:
        if name.startswith("gemm.surface.log_residual"):
            values[name] = _zeros(constants[name].value)
        elif name.startswith("attention.efficiency."):
            values[name] = EFFICIENCY / 2
        elif name.startswith(("attention.start.", "attention.library_start.", "attention.library_backward_start.")):
            values[name] = 0.0
        elif name.startswith("attention.library_rate."):
            values[name] = 1.0
        elif name.startswith("node.collective."):
            values[name] = _line(name, profile.node.link_bytes_per_s)
        elif name.startswith("fabric.efficiency."):
            values[name] = EFFICIENCY
        elif name.startswith("fabric.start_up."):
            values[name] = [[size, EXCHANGE_US if "all_to_all" in name else MESSAGE_US] for size in SIZES]
    for name, value in values.items():
        branch = content
        *parents, last = name.split(".")
        for parent in parents:
            branch = branch[parent]
        branch[last] = {**branch[last], "value": value}
    return HardwareProfile.from_dict(content)


def _zeros(table: Any) -> Any:
    return [_zeros(row) for row in table] if isinstance(table, tuple | list) else 0.0


def _line(name: str, link_bytes_per_s: float) -> list[list[float]]:
    kind, _, ranks = name.removeprefix("node.collective.").partition(".n")
    start = EXCHANGE_US if kind == "all_to_all" else MESSAGE_US
    wire = (int(ranks) - 1) / int(ranks) * (2 if kind.startswith("all_reduce") else 1)
    return [[size, start + size * wire / (EFFICIENCY * link_bytes_per_s) * 1e6] for size in SIZES]


def main() -> None:
    options = _options()
    profile = load_profile("h100_sxm")
    print(f"{profile.name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ms")
    theirs, mine = f"{'plain says':>10s} {'in series':>10s} {'step':>9s}", f"{'ours':>9s} {'step':>9s} {'shorter':>7s}"
    print(f"{'model':12s} {'mesh':14s} {theirs} | {mine} differ")
    for case in CASES:
        if options.only in (None, case.model):
            print(_compared(case, profile, options.layers), flush=True)


def _compared(case: Case, profile: HardwareProfile, layers: int | None) -> str:
    start, mesh = time.process_time(), Mesh.parse(case.mesh)
    ours = Workbench.build(trace(ModelRequest(model=case.model, layers=layers, batch=mesh.num_devices)), mesh, profile.name)
    simple = plain(profile)
    costs = estimate_costs(ours.space, simple, policy=MemoryPolicy())
    other = Workbench(costs, simple, Solver(costs))
    constraints = ours.default_constraints()
    theirs, mine = (bench.solve(constraints, exact=False, time_limit_s=60) for bench in (other, ours))
    judged = ours.replay(theirs)
    steps = [ours.timeline(plan).step_us / 1e3 for plan in (judged, mine)]
    differ = _differ(judged, mine)
    gain = f"{100 * (1 - steps[1] / steps[0]):+.1f} %"
    return (
        f"{case.model:12s} {mesh!s:14s} {theirs.objective_us / 1e3:10.1f} {judged.objective_us / 1e3:10.1f} {steps[0]:9.1f} | "
        f"{mine.objective_us / 1e3:9.1f} {steps[1]:9.1f} {gain:>7s} {differ} of {len(mine.choices)} ops, "
        f"{time.process_time() - start:.0f} CPU s"
    )


def _differ(one: Plan, other: Plan) -> int:
    choices: Mapping[str, Any] = other.choices
    return sum(choice.outputs != choices[key].outputs for key, choice in one.choices.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one of the sample models")
    parser.add_argument("--layers", type=int, help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
