"""Plans of published models on 128 devices: what planning took, what the plan costs, and which parallelism emerged on which axis,
read off the plan, beside what experts write by hand. Nothing is asserted: the machine may be shared.

python -m tests.benchmarks.published                                              # all models below, on their meshes
python -m tests.benchmarks.published --only moe-16b --layers 4 --recipes 'ep:dp,ep'  # one of them, fewer layers
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from planner.commands.describe import summary
from planner.constraint import Constraint, parse_recipe
from planner.dims import DimRoles
from planner.errors import PlannerError
from planner.graph import FORWARD, ModelRequest, TensorRef
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.placement import Partial, Placements, Shard
from planner.plan import Plan
from planner.region import REGION
from planner.strategy import StrategySpace
from planner.units import format_gib, format_ms
from planner.workbench import Workbench

MODELS = {
    "moe-16b": "dp=4,ep=8,tp=4",
    "moe-16b-region": "dp=4,ep=8,tp=4",
    "hybrid-2.7b": "dp=4,cp=8,tp=4",
}
BATCH = 128
RECIPES = "ep:dp,ep;fsdp:dp,ep,cp,tp"
"""Axes that a mesh lacks are left out; axes that a recipe does not name are left to the planner."""
T = TypeVar("T")
Shares = Mapping[str, float]
"""what is split -> share of the whole, 0 to 1"""


@dataclass(frozen=True)
class Emerged:
    """Which dims of which tensors a plan splits over each mesh axis.

    Dims have the meanings that `planner.dims` derives from the graph. Work is the forward FLOPs of the kinds `experts` (products
    with weights of their own per expert), `attention`, `region`, `products` (all other products with weights).
    """

    space: StrategySpace
    plan: Plan

    @cached_property
    def roles(self) -> DimRoles:
        return DimRoles.of(self.space)

    def work(self, axis: int) -> dict[str, Shares]:
        """kind of work -> how its FLOPs are shared by the devices along the axis."""
        found: dict[str, Counter[str]] = {}
        for node, kind in self._kinds():
            entry = self.space.graph.nodes[node]
            found.setdefault(kind, Counter())[self._split_of(node, axis)] += entry.flops
        return {kind: _shares(parts) for kind, parts in found.items()}

    def parameters(self, axis: int) -> Shares:
        """How the bytes of stored parameters are shared by the devices along the axis."""
        parts: Counter[str] = Counter()
        for parameter in self.space.graph.parameters:
            ref = TensorRef(parameter.node, 0)
            placed = self.plan.choices[self.space.graph.nodes[parameter.node].key].outputs[0]
            parts[self._meaning(ref, placed, axis) or "copies"] += self.space.graph.meta(ref).num_bytes
        return _shares(parts)

    def sentences(self) -> Iterator[str]:
        for axis, name in enumerate(self.space.mesh.axis_names):
            shares = {**self.work(axis), "parameters stored": self.parameters(axis)}
            told = "; ".join(f"{kind}: {_words(parts)}" for kind, parts in sorted(shares.items()))
            yield f"over {name}={self.space.mesh.axis_sizes[axis]}: {told}"

    def _kinds(self) -> Iterator[tuple[int, str]]:
        for product in self.roles.products:
            yield product.node, "experts" if product.common - self.roles.samples else "products"
        for node, entry in enumerate(self.space.graph.nodes):
            if entry.phase == FORWARD and entry.name == "attention":
                yield node, "attention"
            elif entry.op == REGION:
                yield node, "region"

    def _split_of(self, node: int, axis: int) -> str:
        entry = self.space.graph.nodes[node]
        choice = self.plan.choices[entry.key]
        ports = [(TensorRef(node, 0), choice.outputs[0]), *zip(entry.operands, choice.operands, strict=True)]
        if entry.name == "attention":
            return _attention(choice.outputs[0], axis)
        found = [meaning for ref, placed in ports if (meaning := self._meaning(ref, placed, axis))]
        if entry.op == REGION:
            return _both(found)
        summed = choice.outputs[0] is not None and choice.outputs[0][axis] == Partial()
        return "copies" if not found else f"{found[0]} (summed over)" if summed else found[0]

    def _meaning(self, ref: TensorRef, placed: Placements | None, axis: int) -> str:
        """What the dim that is split over the axis counts; "" if none is."""
        one = None if placed is None else placed[axis]
        if not isinstance(one, Shard):
            return ""
        colour, roles = self.roles.colours[ref][one.dim], self.roles
        for name, colours in (
            ("samples", roles.samples), ("experts", roles.experts), ("sequence", roles.sequence),
            ("heads and widths", roles.inner), ("model width", roles.outer), ("vocabulary", roles.vocabulary),
        ):  # fmt: skip
            if colour in colours:
                return name
        return "other dims"


def _attention(placed: Placements | None, axis: int) -> str:
    """[batch, heads, sequence, width]"""
    one = None if placed is None else placed[axis]
    return {0: "samples", 1: "heads"}.get(one.dim, "other dims") if isinstance(one, Shard) else "copies"


def _both(found: list[str]) -> str:
    return " and ".join(dict.fromkeys(found)) or "copies"


def _shares(parts: Counter[str]) -> Shares:
    total = sum(parts.values()) or 1
    return {name: value / total for name, value in parts.most_common()}


def _words(parts: Shares) -> str:
    told = [f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005]
    return ", ".join(told) or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--mesh")
    parser.add_argument("--recipes", default=RECIPES, help="recipes with their axes, separated by semicolons")
    args = parser.parse_args()
    for model in [args.only] if args.only else MODELS:
        _one(
            ModelRequest(model=model, batch=args.batch, layers=args.layers), Mesh.parse(args.mesh or MODELS[model]), args.recipes
        )


def _one(request: ModelRequest, mesh: Mesh, recipes: str) -> None:
    print(
        f"\n{request.model}, {request.layers or 'all'} layers, batch {request.batch}, mesh {mesh}; load {os.getloadavg()[0]:.1f}"
    )
    graph = _timed("trace", lambda: trace(request))
    bench = _timed("strategies and prices", lambda: Workbench.build(graph, mesh))
    bench.warm_up()
    free = bench.default_constraints()
    plan = _timed("solve", lambda: bench.solve(free, exact=False))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"  {graph.num_ops} ops, {bench.space.num_strategies} strategies, peak of this process so far {peak:.2f} GiB")
    print(summary(plan))
    print("\n".join("  " + line for line in Emerged(bench.space, plan).sentences()))
    for written in filter(None, recipes.split(";")):
        _compare(bench, plan, free, written)


def _compare(bench: Workbench, best: Plan, free: tuple[Constraint, ...], written: str) -> None:
    name, _, axes = written.partition(":")
    known = [axis for axis in axes.split(",") if axis in bench.mesh.axis_names] or list(bench.mesh.axis_names)
    name = f"{name}:{','.join(known)}"
    try:
        plan = _timed(f"recipe {name}", lambda: bench.solve((*free, parse_recipe(name, bench.mesh)), exact=False))
    except PlannerError as error:
        print(f"  recipe {name}: {error.message}")
        return
    ratio = plan.objective_us / best.objective_us
    print(
        f"  recipe {name}: {format_ms(plan.objective_us)} (compute {format_ms(plan.compute_us)}, communication "
        f"{format_ms(plan.comm_us)}), {format_gib(plan.memory.peak_bytes)} per device, {ratio:.2f} times the free plan"
    )


def _timed(what: str, work: Callable[[], T]) -> T:
    wall, cpu = time.perf_counter(), time.process_time()
    made = work()
    print(f"  {what}: {time.perf_counter() - wall:.1f} s ({time.process_time() - cpu:.1f} s of CPU)", flush=True)
    return made


if __name__ == "__main__":
    main()
