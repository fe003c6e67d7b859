"""A plan's choices -> strategy numbers of a strategy space, without solving."""

from __future__ import annotations

import numpy as np

from planner.constraint import holds
from planner.cost import CostTable
from planner.errors import PlanFormatError
from planner.graph import TensorRef
from planner.placement import Placements, text
from planner.plan import Choice, Plan, SolveReport
from planner.solving.assemble import changes, facts_of, kept_placements, memory_of, price_redistributions, uses_by_phase
from planner.solving.demands import costs_under
from planner.solving.solve import Solution


def solution_of(plan: Plan, costs: CostTable) -> Solution:
    """The solution that a plan states. Its objective is priced with `costs`; the proof of the plan is kept only if model,
    sizes and hardware are those it was made with.

    Raises:
        PlanFormatError: a choice that is no legal strategy in this space, naming the op; or a constraint of the plan that its
            choices do not satisfy.
    """
    graph, costs = costs.space.graph, costs_under(costs, plan.constraints)
    strategy = np.array([_strategy(plan.choices[node.key], index, costs) for index, node in enumerate(graph.nodes)])
    shared = _shared(plan, costs, strategy)
    _check_changes(costs, strategy, shared)
    _check_kept(costs, strategy, shared)
    same = (plan.fingerprint, plan.hardware_hash) == (graph.fingerprint, costs.hardware_hash)
    objective = _objective(costs, strategy, shared)
    if same and abs(objective - plan.report.objective_us) <= 1e-6 * plan.report.objective_us:
        report = plan.report
    else:
        report = SolveReport(status="feasible", objective_us=objective, bound_us=0.0, method="replayed, not proved", seconds=0.0)
    used = memory_of(costs, strategy).peak_bytes
    found = Solution(strategy=strategy, shared=shared, report=report, used_bytes=used, costs=costs)
    _check_constraints(plan, found, costs)
    return found


def _check_changes(costs: CostTable, strategy: np.ndarray, shared: dict[tuple[TensorRef, str], int]) -> None:
    """Raises PlanFormatError for a change of placement that no collective makes, or none that the plan's constraints allow."""
    for change in changes(costs, strategy, shared):
        if not change.is_possible:
            key, lattice = costs.space.graph.nodes[change.ref.node].key, change.routes.lattice
            raise PlanFormatError(
                f"the plan does not keep its own constraints, or is damaged: {key} cannot be changed from "
                f"{lattice.text(change.source)} to {lattice.text(change.target)} with the collectives that it allows",
                hint="Plan again, or restore the file.",
            )


def _check_kept(costs: CostTable, strategy: np.ndarray, shared: dict[tuple[TensorRef, str], int]) -> None:
    """Raises PlanFormatError for an op that is kept in another placement than the forward pass read."""
    space = costs.space
    for node, kept, read in kept_placements(costs, strategy, shared):
        if kept != read:
            lattice = space.lattice(TensorRef(node, 0))
            raise PlanFormatError(
                f"the plan is damaged: {space.graph.nodes[node].key} is kept as {lattice.text(kept)}, but the forward pass reads "
                f"{lattice.text(read)}",
                hint="Plan again, or restore the file.",
            )


def _check_constraints(plan: Plan, found: Solution, costs: CostTable) -> None:
    facts = facts_of(costs, found)
    broken = [c.describe() for c in plan.constraints if not holds(c, facts)]
    if broken:
        raise PlanFormatError(
            f"the plan does not keep its own constraints on this model and mesh: {'; '.join(broken)}",
            hint="Sizes or the optimizer differ from those it was made for, or the file was changed; plan again.",
        )


def _strategy(choice: Choice, node: int, costs: CostTable) -> int:
    space = costs.space
    strategies, graph_node = space.strategies[node], space.graph.nodes[node]
    wanted = [_number(placements, TensorRef(node, output), costs) for output, placements in enumerate(choice.outputs)]
    if choice.kept:
        same = (strategies.columns[:, : len(wanted)] == np.array(wanted)).all(1)
        found = np.flatnonzero(same if strategies.kept is None else same & strategies.kept)[: int(strategies.kept is not None)]
    else:
        wanted += [_number(choice.operands[slot], graph_node.operands[slot], costs) for slot in strategies.operand_slots]
        found = np.flatnonzero((strategies.columns == np.array(wanted)).all(1))
    if not len(found):
        raise PlanFormatError(
            f"the plan's strategy for {graph_node.key} ({_texts(choice.operands)} -> {_texts(choice.outputs)}) is not legal here",
            hint="The mesh or the sizes may not divide that way any more; plan again.",
        )
    return int(found[0])


def _number(placements: Placements | None, ref: TensorRef, costs: CostTable) -> int:
    return -1 if placements is None else costs.space.lattice(ref).find(placements)


def _texts(placements: tuple[Placements | None, ...]) -> str:
    return ", ".join("-" if p is None else text(p) for p in placements)


def _shared(plan: Plan, costs: CostTable, strategy: np.ndarray) -> dict[tuple[TensorRef, str], int]:
    """Shared placement of every tensor with several uses in a phase: where its shared redistribution leads, else as made."""
    graph = costs.space.graph
    shared: dict[tuple[TensorRef, str], int] = {}
    for (ref, phase), uses in uses_by_phase(costs).items():
        if len(uses) > 1:
            shared[ref, phase] = int(costs.space.strategies[ref.node].output(ref.output)[strategy[ref.node]])
    for r in plan.redistributions:
        if r.shared:
            ref = TensorRef(graph.node_by_key[r.tensor[0]], r.tensor[1])
            shared[ref, r.phase] = costs.space.lattice(ref).find(r.target)
    return shared


def _objective(costs: CostTable, strategy: np.ndarray, shared: dict[tuple[TensorRef, str], int]) -> float:
    compute = sum(float(us[s]) for us, s in zip(costs.compute_us, strategy, strict=True))
    return compute + price_redistributions(costs, strategy, shared)
