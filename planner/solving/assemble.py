"""A solution (numbers) -> a plan (placements, redistributions, evidence) that can be read, saved and exported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from planner.constraint import Constraint, Facts
from planner.cost import CostTable
from planner.graph import FORWARD, JointGraph, TensorRef
from planner.memory import MemoryBreakdown
from planner.plan import Choice, Plan, Redistribution, Step
from planner.redistribution import Routes
from planner.region import REGION, Region
from planner.solving.solve import Solution

GRADIENT_STORE = -1
"""The slot of the use that stores a gradient in its parameter's placement."""


def assemble(costs: CostTable, solution: Solution, constraints: Sequence[Constraint]) -> Plan:
    """The plan of a solution. Its redistributions are those that were priced, equal ones once; their prices and the compute add
    up to the plan's own objective, which is that of the solution less what equal ones would take again."""
    costs = solution.costs or costs
    space, graph = costs.space, costs.space.graph
    redistributions = tuple(_redistributions(costs, solution.strategy, solution.shared))
    again = price_redistributions(costs, solution.strategy, solution.shared) - sum(r.us for r in redistributions)
    report = replace(solution.report, merged_us=again if again > 1e-6 else 0.0)
    plan = Plan(
        request=graph.request,
        structure_fingerprint=graph.structure_fingerprint,
        fingerprint=graph.fingerprint,
        mesh=space.mesh,
        hardware_name=costs.hardware_name,
        hardware_hash=costs.hardware_hash,
        gpus_per_node=costs.gpus_per_node,
        memory_policy=costs.memory.policy,
        constraints=tuple(constraints),
        checkpointed=graph.checkpointed,
        choices=_choices(costs, solution.strategy),
        redistributions=redistributions,
        memory=memory_of(costs, solution.strategy),
        report=report,
        num_ops=graph.num_ops,
        replicated_for_lack_of_a_rule=space.replicated_for_lack_of_a_rule,
        regions={node.key: Region.loads(node.args[0]).describe() for node in graph.nodes if node.op == REGION},
    )
    _check_sum(plan)
    return plan


def facts_of(costs: CostTable, solution: Solution) -> Facts:
    """What constraints look at."""
    costs = solution.costs or costs
    steps = (step for r in _redistributions(costs, solution.strategy, solution.shared) for step in r.steps)
    return Facts(
        space=costs.space,
        strategy=solution.strategy,
        collectives=tuple(step.collective for step in steps if step.collective is not None),
        peak_bytes=memory_of(costs, solution.strategy).peak_bytes,
    )


def _check_sum(plan: Plan) -> None:
    total = plan.compute_us + plan.comm_us
    assert abs(total - plan.objective_us) <= 1e-6 * max(1.0, plan.objective_us), (total, plan.objective_us)


def _choices(costs: CostTable, strategy: np.ndarray) -> dict[str, Choice]:
    """Equal ops under equal strategies (repeated layers) share one `Choice`."""
    made: dict[tuple[int, int, int], Choice] = {}
    choices: dict[str, Choice] = {}
    for index, (node, number) in enumerate(zip(costs.space.graph.nodes, strategy.tolist(), strict=True)):
        same = (id(costs.space.strategies[index]), id(costs.compute_us[index]), number)
        if same not in made:
            made[same] = _choice(costs, index, number)
        choices[node.key] = made[same]
    return choices


def _choice(costs: CostTable, node: int, strategy: int) -> Choice:
    space = costs.space
    strategies, graph_node = space.strategies[node], space.graph.nodes[node]
    return Choice(
        operands=tuple(
            space.lattice(ref).placements(strategies.operand(slot)[strategy])
            if slot in strategies.operand_slots and not strategies.is_kept(strategy)
            else None
            for slot, ref in enumerate(graph_node.operands)
        ),
        outputs=tuple(
            None if meta is None else space.lattice(TensorRef(node, output)).placements(strategies.output(output)[strategy])
            for output, meta in enumerate(graph_node.outputs)
        ),
        compute_us=float(costs.compute_us[node][strategy]),
        kept=strategies.is_kept(strategy),
    )


def uses_by_phase(costs: CostTable) -> dict[tuple[TensorRef, str], list[tuple[int, int]]]:
    """(tensor, phase) -> uses (consumer node, operand slot) that read data, in node order; gradients stored count as uses."""
    space, graph = costs.space, costs.space.graph
    uses: dict[tuple[TensorRef, str], list[tuple[int, int]]] = {}
    for index, node in enumerate(graph.nodes):
        for slot in space.strategies[index].operand_slots:
            uses.setdefault((node.operands[slot], node.phase), []).append((index, slot))
    for leaf, (ref, phase) in graph.stored.items():
        uses.setdefault((ref, phase), []).append((leaf, GRADIENT_STORE))
    return uses


def price_redistributions(costs: CostTable, strategy: np.ndarray, shared: Mapping[tuple[TensorRef, str], int]) -> float:
    """µs of all redistributions of a solution as the objective counts them: private ones for every use."""
    return sum(float(change.routes.table_us[change.source, change.target]) for change in changes(costs, strategy, shared))


def _redistributions(
    costs: CostTable, strategy: np.ndarray, shared: Mapping[tuple[TensorRef, str], int]
) -> Iterable[Redistribution]:
    """Private changes of one tensor from the same start by the same steps are one for all their uses."""
    once: dict[tuple[object, ...], Redistribution] = {}
    for change in changes(costs, strategy, shared):
        made = _redistribution(costs.space.graph, change)
        key = (change.ref, change.phase, change.shared, change.source, made.steps)
        known = once.get(key)
        once[key] = made if known is None else replace(known, consumers=(*known.consumers, *made.consumers))
    return once.values()


class Change(NamedTuple):
    """A tensor in placement number `source` that becomes `target`, for `uses` (consumer, slot)."""

    ref: TensorRef
    phase: str
    routes: Routes
    source: int
    target: int
    uses: Sequence[tuple[int, int]]
    shared: bool

    @property
    def is_possible(self) -> bool:
        return bool(np.isfinite(self.routes.table_us[self.source, self.target]))


def changes(costs: CostTable, strategy: np.ndarray, shared: Mapping[tuple[TensorRef, str], int]) -> Iterable[Change]:
    """All changes of placement of a solution as the objective counts them, possible or not."""
    space = costs.space
    for (ref, phase), uses in uses_by_phase(costs).items():
        lattice = space.lattice_of[ref]
        made = int(space.strategies[ref.node].output(ref.output)[strategy[ref.node]])
        start = made
        if len(uses) > 1:
            start = shared[ref, phase]
            unreduced = any(use in costs.unreduced for use in uses)
            routes = costs.routes_without_reduction[lattice] if unreduced else costs.routes[lattice]
            if start != made:
                yield Change(ref, phase, routes, made, start, uses, True)
        for consumer, slot in uses:
            wanted = _wanted(costs, strategy, consumer, slot)
            if wanted is not None and wanted != start:
                routes = costs.routes_of_use(lattice, consumer, slot)
                yield Change(ref, phase, routes, start, wanted, [(consumer, slot)], False)


def kept_placements(
    costs: CostTable, strategy: np.ndarray, shared: Mapping[tuple[TensorRef, str], int]
) -> Iterable[tuple[int, int, int]]:
    """(node, placement number in which it is kept, that in which the forward pass reads the tensor) of all that is kept."""
    space, uses = costs.space, None
    for node, ref in space.graph.kept_from.items():
        if space.strategies[node].is_kept(int(strategy[node])):
            uses = uses_by_phase(costs) if uses is None else uses
            readers = uses[ref, FORWARD]
            read = _wanted(costs, strategy, *readers[0]) if len(readers) == 1 else shared[ref, FORWARD]
            assert read is not None, "a forward op reads its operands"
            yield node, int(space.strategies[node].output(0)[strategy[node]]), read


def _wanted(costs: CostTable, strategy: np.ndarray, consumer: int, slot: int) -> int | None:
    """Placement number that a use requires; None if it reads nothing (the result is kept from forward)."""
    strategies = costs.space.strategies[consumer]
    if slot != GRADIENT_STORE and strategies.is_kept(int(strategy[consumer])):
        return None
    column = strategies.output(0) if slot == GRADIENT_STORE else strategies.operand(slot)
    return int(column[strategy[consumer]])


def _redistribution(graph: JointGraph, change: Change) -> Redistribution:
    nodes, moves = graph.nodes, change.routes.path(change.source, change.target)
    return Redistribution(
        tensor=(nodes[change.ref.node].key, change.ref.output),
        phase=change.phase,
        source=change.routes.lattice.placements(change.source),
        shared=change.shared,
        consumers=tuple((nodes[consumer].key, slot) for consumer, slot in change.uses),
        steps=tuple(Step(target=m.target, collective=m.collective, us=m.us) for m in moves),
    )


def memory_of(costs: CostTable, strategy: np.ndarray) -> MemoryBreakdown:
    """Bytes on a device under the chosen strategies, by category."""
    totals = {field.name: 0.0 for field in fields(MemoryBreakdown)}
    for node, terms in costs.memory.terms.items():
        for name in totals:
            of_strategies = getattr(terms, name)
            if of_strategies is not None:
                totals[name] += float(of_strategies[strategy[node]])
    return MemoryBreakdown(**{name: round(value) for name, value in totals.items()})
