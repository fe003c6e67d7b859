"""Would an objective that prices hidden traffic lower choose better plans? The planner's adds up all times as if in series.

Run: python -m tests.benchmarks.bench_overlap --graph graph.json.gz --mesh dp=8,tp=8 [--factors 0.5,0.3,0.2] [--plans 20]

In the exported order parameters are gathered one block ahead and gradients summed one block behind. Here the collectives of both
are priced at a fixed share of their time, everything else in full; that stays one linear objective, so bounds, pins and
recipes mean what they mean now. Printed per factor: the plan that it chooses (its price in series, its simulated step, memory),
and over pools of plans Kendall's tau between objective and step, and the regret of trusting the objective.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from planner.accuracy.steps import CAST_OP
from planner.cost import CostTable
from planner.costing.collective import MeshCollectives, mesh_collectives
from planner.costing.redistribution import copy_us
from planner.graph import VIEW_OPS, JointGraph
from planner.mesh import Mesh
from planner.plan import Plan
from planner.redistribution import MoveGroup, Routes, cheapest_routes
from planner.solving.assemble import assemble, price_redistributions
from planner.solving.solve import Solution, Solver
from planner.strategy import Lattice
from planner.workbench import Workbench
from tests.benchmarks.bench_timeline import good_plans, kendall_tau, random_plans

AHEAD, BEHIND, INLINE = "gathered ahead", "summed behind", "in line"


def classes(graph: JointGraph) -> dict[int, str]:
    """Node -> AHEAD if it depends on parameters alone, BEHIND if it is a gradient or what a gradient is a cast or view of."""
    found: dict[int, str] = {}
    for number, node in enumerate(graph.nodes):
        if node.kind == "param" or (node.is_op and node.operands and all(found.get(r.node) == AHEAD for r in node.operands)):
            found[number] = AHEAD
    for parameter in graph.parameters:
        ref = parameter.gradient
        while ref is not None:
            found[ref.node], node = BEHIND, graph.nodes[ref.node]
            ref = node.operands[0] if node.op in VIEW_OPS or node.op == CAST_OP else None
    return found


def with_factor(bench: Workbench, factor: float) -> CostTable:
    """The prices with collectives ahead and behind at `factor` of their time. Their tensors get lattices of their own."""
    costs, kinds = bench.costs, classes(bench.graph)
    lattices, numbers = list(costs.space.lattices), dict(costs.space.lattice_of)
    hidden: dict[int, int] = {}
    for ref, number in costs.space.lattice_of.items():
        if ref.node in kinds:
            if number not in hidden:
                hidden[number] = len(lattices)
                lattices.append(lattices[number])
            numbers[ref] = hidden[number]
    space = replace(costs.space, lattices=tuple(lattices), lattice_of=numbers)
    collectives = mesh_collectives(bench.hardware, bench.mesh, costs.gpus_per_node)

    def routes(lattice: Lattice, allow_reductions: bool) -> Routes:
        def price(group: MoveGroup) -> np.ndarray:
            us = copy_us(bench.hardware, group.copy_bytes)
            if group.kind is None:
                return us
            return us + factor * collectives.us(group.kind, group.axes, group.full_bytes, lattice.meta.dtype)

        return cheapest_routes(lattice, price, allow_reductions=allow_reductions)

    known = len(costs.routes)
    pending = sorted({numbers[bench.graph.nodes[node].operands[slot]] for node, slot in costs.unreduced})
    return replace(
        costs,
        space=space,
        routes=(*costs.routes, *(routes(lattice, True) for lattice in lattices[known:])),
        routes_without_reduction={number: routes(lattices[number], False) for number in pending},
    )


@dataclass(frozen=True)
class Measured:
    """A plan: µs of what its objective adds up, and of the simulated step."""

    in_line: float
    hidden: float
    step: float

    def objective(self, factor: float) -> float:
        return self.in_line + factor * self.hidden


def measured(bench: Workbench, plan: Plan, collectives: MeshCollectives) -> Measured:
    kinds = classes(bench.graph)
    hidden = 0.0
    for r in plan.redistributions:
        if bench.graph.node_by_key[r.tensor[0]] in kinds:
            for step in r.steps:
                c = step.collective
                if c is not None:
                    hidden += min(step.us, float(collectives.us(c.kind, c.axes, np.array(float(c.full_bytes)), c.dtype)))
    return Measured(plan.objective_us - hidden, hidden, bench.timeline(plan).step_us)


def chosen(bench: Workbench, factor: float) -> Plan:
    """The best plan under that objective, priced in series."""
    constraints = bench.default_constraints()
    solution = Solver(with_factor(bench, factor)).solve(constraints, exact=False, time_limit_s=120)
    compute = sum(float(us[solution.strategy[node]]) for node, us in enumerate(bench.costs.compute_us))
    in_series = compute + price_redistributions(bench.costs, solution.strategy, solution.shared)
    report = replace(solution.report, objective_us=in_series, bound_us=0.0)
    settled = Solution(strategy=solution.strategy, shared=solution.shared, report=report)
    return assemble(bench.costs, settled, constraints)


def main() -> None:
    options = _options()
    bench = Workbench.build(JointGraph.load(options.graph), Mesh.parse(options.mesh))
    collectives = mesh_collectives(bench.hardware, bench.mesh, bench.costs.gpus_per_node)
    factors = [1.0, *map(float, options.factors.split(","))]
    plans = []
    for factor in factors:
        start = time.process_time()
        plan = chosen(bench, factor)
        plans.append(plan)
        forecast = bench.forecast(plan)
        print(
            f"factor {factor:4.2f}: in series {plan.objective_us / 1e3:9.2f} ms, step {forecast.timeline.step_us / 1e3:9.2f} ms, "
            f"{plan.memory.peak_bytes / 2**30:6.2f} GiB, {time.process_time() - start:.1f} s",
            flush=True,
        )
    pools = {"good": [*plans, *good_plans(bench, options.plans)], "random": random_plans(bench, options.plans)}
    for name, pool in pools.items():
        found = [measured(bench, plan, collectives) for plan in pool]
        for factor in factors:
            print(_row(name, factor, found), flush=True)


def _row(pool: str, factor: float, found: Sequence[Measured]) -> str:
    objective, steps = [plan.objective(factor) for plan in found], [plan.step for plan in found]
    regret = steps[int(np.argmin(objective))] / min(steps) - 1
    tau = kendall_tau(objective, steps)
    return f"{pool:7s} {len(found):3d} plans, factor {factor:4.2f}: tau {tau:6.3f}, regret {100 * regret:5.2f} %"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", type=Path, required=True)
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--factors", default="0.5,0.3,0.2")
    parser.add_argument("--plans", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
