"""How much cheaper the free optimum is than what experts write by hand: step time, communication and memory of every recipe on
published models. Printed; nothing is asserted except that no recipe beats the free optimum (by more than its proven gap).

Plans are compared without a memory budget and without activation checkpointing; what does not fit the device is marked with !.

python -m tests.benchmarks.bench_recipes                                  # all cases, minutes
python -m tests.benchmarks.bench_recipes --only gpt2-xl --layers 2        # one model, fewer layers
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

from planner.constraint import Constraint
from planner.errors import InfeasibleError, InvalidConstraintError
from planner.graph import ModelRequest
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.plan import Plan
from planner.recipes import Recipe
from planner.units import GIB
from planner.workbench import Workbench

ROOMY = 2**60
"""A budget that never binds, bytes."""


@dataclass(frozen=True)
class Case:
    model: str
    mesh: str
    recipes: tuple[str, ...]
    """Each a recipe, or several joined by ` + `."""


TWO_AXES = ("ddp", "fsdp", "hsdp", "tp", "tp_sp", "fsdp_tp_sp")
CASES = (
    Case("llama3-8b", "dp=8,tp=8", TWO_AXES),
    Case("gpt2-xl", "dp=8,tp=5", TWO_AXES),
    Case("vit-large", "dp=8,tp=4", TWO_AXES),
    Case("hybrid-2.7b", "dp=8,tp=2", TWO_AXES),
    Case(
        "moe-16b",
        "dp=4,ep=8,tp=4",
        ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp_sp", "ep", "ep:dp,ep + tp:tp", "ep:dp,ep + tp_sp:tp", "fsdp:dp + ep:ep + tp:tp"),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a model of the table")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per plan")
    args = parser.parse_args()
    for case in CASES:
        if args.only in (None, case.model):
            _run(case, args.layers, args.time_limit)


def _run(case: Case, layers: int | None, time_limit_s: float) -> None:
    mesh = Mesh.parse(case.mesh)
    bench = Workbench.build(trace(ModelRequest(model=case.model, layers=layers, batch=mesh.num_devices)), mesh)
    bench.warm_up()
    default = [*bench.default_constraints(ROOMY)]
    print(f"{case.model}, layers {layers or 'all'}, mesh {mesh}, {bench.hardware.name}; load {os.getloadavg()[0]:.1f}")
    print(f"  {'recipe':26s} {'step':>10s} {'dearer':>8s} {'compute':>10s} {'comm':>10s} {'memory':>11s} {'gap':>8s} {'CPU':>7s}")
    free = _line("free optimum", bench, default, None, time_limit_s)
    assert free is not None
    for written in case.recipes:
        recipes = [Recipe.parse(part, mesh) for part in written.split(" + ")]
        plan = _line(written, bench, [*default, *recipes], free, time_limit_s)
        assert plan is None or plan.objective_us >= free.report.bound_us * (1 - 1e-6), written


def _line(name: str, bench: Workbench, constraints: list[Constraint], free: Plan | None, time_limit_s: float) -> Plan | None:
    start = time.process_time()
    try:
        plan = bench.solve(constraints, time_limit_s=time_limit_s, exact=False)
    except (InvalidConstraintError, InfeasibleError) as refused:
        print(f"  {name:26s} refused: {refused.message}")
        return None
    dearer = "" if free is None else f"{100 * (plan.objective_us / free.objective_us - 1):+.1f} %"
    memory = plan.memory.peak_bytes
    mark = "!" if memory > bench.hardware.default_budget_bytes else " "
    step, compute, comm = (f"{us / 1e3:7.1f} ms" for us in (plan.objective_us, plan.compute_us, plan.comm_us))
    print(
        f"  {name:26s} {step} {dearer:>8s} {compute} {comm} "
        f"{memory / GIB:7.1f} GiB{mark} {100 * plan.report.gap:6.2g} % {time.process_time() - start:5.1f} s",
        flush=True,
    )
    return plan


if __name__ == "__main__":
    main()
