"""Why does a plan place a tensor as it does, and why not otherwise? The best plan with the other placement is found, and the
difference of the two plans is taken apart: every op and every redistribution whose price differs. The parts add up to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from planner.constraint import Constraint, Pin
from planner.errors import InfeasibleError, InvalidConstraintError
from planner.graph import FORWARD, JointGraph, TensorRef, without_layer
from planner.overrides import Place, others_than, solve_with
from planner.placement import Placements, Replicate, text
from planner.plan import Choice, Plan, Redistribution
from planner.reasons import IMPOSSIBLE, Explanation, LocalPrice, Override, Reason, Term
from planner.relaxations import relaxations

if TYPE_CHECKING:
    from planner.cost import CostTable
    from planner.solving.solve import Solution
    from planner.workbench import Workbench

TIE = 1e-6
"""Relative difference of objectives that counts as none; plans are called optimal to the same."""

_NOTHING_US = 1e-9


def explain(
    bench: Workbench,
    plan: Plan,
    key: str,
    placements: Placements,
    *,
    output: int = 0,
    exact: bool | None = None,
    time_limit_s: float = 60.0,
    cancelled: Callable[[], bool] | None = None,
) -> Explanation:
    """Compare a plan with the best one that has `placements` at `key` (a node key, or anything that a pin can name).

    Raises:
        InvalidConstraintError: the key matches nothing, or the placements are not one per mesh axis.
        PlanFormatError: the plan is not one of this model, mesh and hardware.
        SolverError: no plan with the placement was found in time.
    """
    bench, plan, solution = _replayed(bench, plan)
    place = Place.find(bench, key, output, plan.constraints)
    if len(placements) != bench.mesh.num_axes:
        raise InvalidConstraintError(
            f"{text(placements)} has {len(placements)} placements, the mesh {bench.mesh} has {bench.mesh.num_axes} axes",
            hint="Write one placement per mesh axis, outermost first.",
        )
    placements = _on_real_axes(placements, bench)
    chosen = place.chosen(solution.strategy)
    question = _Question(bench, plan, place, placements, chosen, time.monotonic() + time_limit_s, cancelled)
    if chosen == (placements,):
        return question.answer("chosen", question.override(plan, "optimal" if plan.report.status == "optimal" else "feasible"))
    reasons = question.reasons_by_itself()
    if reasons:
        return question.unavailable(reasons)
    return question.compare(exact)


def _replayed(bench: Workbench, plan: Plan) -> tuple[Workbench, Plan, Solution]:
    """The workbench of the plan's own graph, the plan priced there, and its solution."""
    from planner.solving.replay import solution_of

    priced = bench.replay(plan)
    own = bench.variants.bench(plan.checkpointed) if plan.checkpointed != bench.graph.checkpointed else bench
    return own, priced, solution_of(plan, own.costs)


def _on_real_axes(placements: Placements, bench: Workbench) -> Placements:
    """On an axis of size 1 every placement is R."""
    return tuple(p if size > 1 else Replicate() for p, size in zip(placements, bench.mesh.axis_sizes, strict=True))


@dataclass(frozen=True, eq=False)
class _Question:
    bench: Workbench
    plan: Plan
    place: Place
    asked: Placements
    chosen: tuple[Placements, ...]
    deadline: float
    cancelled: Callable[[], bool] | None

    @property
    def kept(self) -> tuple[Constraint, ...]:
        return self.place.without_own(self.plan.constraints)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def answer(self, verdict: str, override: Override) -> Explanation:
        return Explanation(
            where=self.place.where, count=len(self.place.refs), chosen=self.chosen, asked=self.asked, verdict=verdict,
            override=override, replaces=tuple(c.describe() for c in self.plan.constraints if c not in self.kept),
        )  # fmt: skip

    def override(self, other: Plan, status: str) -> Override:
        return Override(
            placements=self.asked, status=status, objective_us=other.objective_us, bound_us=other.report.bound_us,
            peak_bytes=other.memory.peak_bytes, delta_us=other.objective_us - self.plan.objective_us,
            delta_bytes=other.memory.peak_bytes - self.plan.memory.peak_bytes, chosen=self.chosen == (self.asked,),
        )  # fmt: skip

    def reasons_by_itself(self) -> tuple[Reason, ...]:
        """Why no plan can have the placement, whatever the constraints; of several tensors the first that cannot."""
        from planner.solving.legality import why_unavailable

        for ref in self.place.refs:
            found = why_unavailable(self.place.space, ref, self.asked, self.place.solver.legal(ref))
            if found:
                return found
        return ()

    def unavailable(self, reasons: tuple[Reason, ...], conflicts: tuple[str, ...] = ()) -> Explanation:
        override = Override(placements=self.asked, status=IMPOSSIBLE, conflicts=conflicts)
        found = replace(self.answer("unavailable", override), reasons=reasons)
        if not conflicts or self.place.where not in _names(self.place):
            return found
        pin = Pin(where=self.place.where, placements=self.asked)
        given_up = relaxations(
            self.bench, (*self.kept, pin), (*conflicts,), checkpoint=self.plan.checkpoint, time_limit_s=self.seconds_left,
            cancelled=self.cancelled,
        )  # fmt: skip
        return replace(found, relaxations=given_up)

    def compare(self, exact: bool | None) -> Explanation:
        from planner.solving.assemble import assemble

        pinned = self.place.pinned_to(self.asked)
        try:
            solution = solve_with(
                self.place.solver, pinned, self.kept, exact=exact, time_limit_s=self.seconds_left, cancelled=self.cancelled
            )
        except InfeasibleError as error:
            others = others_than(pinned, error)
            return self.unavailable(_reasons(error, others), others)
        other = assemble(self.place.solver.costs, solution, self.kept)
        terms = tuple(_Difference(self.plan, other, self.bench.graph, self._is_here).terms())
        memory = tuple(
            (name, after - before)
            for (name, before), after in zip(self.plan.memory.to_json().items(), other.memory.to_json().values(), strict=True)
        )
        found = self.answer(_verdict(self.plan, other, terms), self.override(other, other.report.status))
        return replace(found, terms=terms, memory=memory, us_per_byte=solution.us_per_byte)

    def _is_here(self, tensor: tuple[str, int] | None, keys: Iterable[str]) -> bool:
        """An op asked about is among `keys`, or the tensor is one that was asked about."""
        nodes = self.bench.graph.nodes
        asked = {(nodes[ref.node].key, ref.output) for ref in self.place.refs}
        return tensor in asked or not {key for key, _ in asked}.isdisjoint(keys)


def _names(place: Place) -> frozenset[str]:
    """WHERE if a pin can name it (an output other than the first has no name)."""
    return frozenset({place.where}) if all(ref.output == 0 for ref in place.refs) else frozenset()


def _reasons(error: InfeasibleError, conflicts: Sequence[str]) -> tuple[Reason, ...]:
    if error.shortfall_bytes is not None:
        return (Reason("budget", error.message),)
    if not conflicts:
        return (Reason("neighbours", "no plan has this placement"),)
    return tuple(Reason("constraint", f"it cannot be together with: {name}") for name in conflicts)


def _verdict(plan: Plan, other: Plan, terms: Sequence[Term]) -> str:
    total, tie = other.objective_us - plan.objective_us, TIE * abs(plan.objective_us)
    if abs(total) <= tie:
        return "tie"
    if total < 0:
        return "cheaper"
    return "dearer here" if 2 * math.fsum(term.us for term in terms if term.here) >= total else "dearer elsewhere"


# ---- the difference of two plans --------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Difference:
    """What plan `b` pays more than plan `a` of the same graph."""

    a: Plan
    b: Plan
    graph: JointGraph
    is_here: Callable[[tuple[str, int] | None, Iterable[str]], bool]

    def terms(self) -> list[Term]:
        """Parts of `b.objective_us - a.objective_us`, largest first; equal changes of repeated layers are one."""
        groups: dict[tuple[object, ...], list[Term]] = {}
        for term in (*self._compute(), *self._redistributions()):
            same = (term.what, without_layer(term.key), term.phase, term.before, term.after, term.here)
            groups.setdefault(same, []).append(term)
        merged = [
            found[0]
            if len(found) == 1
            else replace(found[0], key=without_layer(found[0].key), count=len(found), us=math.fsum(term.us for term in found))
            for found in groups.values()
        ]
        return sorted(merged, key=lambda term: -abs(term.us))

    def _compute(self) -> Iterable[Term]:
        for node in self.graph.nodes:
            before, after = self.a.choices[node.key], self.b.choices[node.key]
            if abs(after.compute_us - before.compute_us) > _NOTHING_US:
                yield Term(
                    what="compute", key=node.key, phase=node.phase, count=1, us=after.compute_us - before.compute_us,
                    before=_strategy_text(before), after=_strategy_text(after), here=self.is_here(None, (node.key,)),
                )  # fmt: skip

    def _redistributions(self) -> Iterable[Term]:
        """One per (tensor, phase): all its ways together."""
        before, after = _ways(self.a), _ways(self.b)
        for way in dict.fromkeys([*before, *after]):
            old, new = before.get(way, []), after.get(way, [])
            us = math.fsum(r.us for r in new) - math.fsum(r.us for r in old)
            if abs(us) > _NOTHING_US:
                tensor, phase = way
                consumers = {key for r in (*old, *new) for key, _ in r.consumers}
                yield Term(
                    what="redistribution", key=tensor[0], phase=phase, count=1, us=us, before=_ways_text(self.a, old),
                    after=_ways_text(self.b, new), here=self.is_here(tensor, consumers),
                )  # fmt: skip


def _strategy_text(choice: Choice) -> str:
    sides = [", ".join("-" if p is None else text(p) for p in side) for side in (choice.operands, choice.outputs)]
    if choice.kept:
        return f"kept {sides[1]}"
    return f"{sides[0]} -> {sides[1]}" if sides[0] else sides[1]


def _ways(plan: Plan) -> dict[tuple[tuple[str, int], str], list[Redistribution]]:
    found: dict[tuple[tuple[str, int], str], list[Redistribution]] = {}
    for r in plan.redistributions:
        found.setdefault((r.tensor, r.phase), []).append(r)
    return found


def _ways_text(plan: Plan, ways: Sequence[Redistribution]) -> str:
    """`S(0)R > RR: all_gather@dp; ...`, `no redistribution`"""
    found = []
    for r in ways:
        steps = [f"{s.collective.kind}@{plan.axes_text(s.collective.axes)}" for s in r.steps if s.collective is not None]
        found.append(f"{text(r.source)} > {text(r.target)}: {', '.join(steps) or 'local'}")
    return "; ".join(found) or "no redistribution"


# ---- prices at the op itself ------------------------------------------------------------------------------------------
def local_prices(bench: Workbench, plan: Plan, key: str, output: int = 0) -> tuple[LocalPrice, ...]:
    """What each legal placement of one tensor costs at its op while all other ops stay as in the plan, cheapest first.

    Raises:
        InvalidConstraintError: the key matches nothing or several tensors.
    """
    bench, plan, solution = _replayed(bench, plan)
    place = Place.find(bench, key, output, plan.constraints)
    if len(place.refs) > 1:
        raise InvalidConstraintError(
            f"{key} matches {len(place.refs)} tensors",
            hint=f"Name one of them, e.g. {bench.graph.nodes[place.refs[0].node].key}.",
        )
    prices = _LocalPrices(place.solver.costs, solution, place.refs[0].node)
    ref, lattice = place.refs[0], bench.space.lattice(place.refs[0])
    now = int(bench.space.strategies[ref.node].output(ref.output)[solution.strategy[ref.node]])
    found = [prices.best(ref.output, number, lattice.placements(number), number == now) for number in place.solver.legal(ref)]
    return tuple(sorted(found, key=lambda p: math.inf if p.total_us is None else p.total_us))


class _LocalPrices:
    """Prices of all strategies of one node, its neighbours being fixed; float64 [strategies] each."""

    def __init__(self, costs: CostTable, solution: Solution, node: int) -> None:
        from planner.solving.problem import uses_by_phase

        self.costs, self.solution, self.node = costs, solution, node
        self.strategies = costs.space.strategies[node]
        self.uses = uses_by_phase(costs)
        self.compute = costs.compute_us[node]
        self.inputs = self._inputs() + self._kept_by_readers()
        self.outputs = self._outputs()

    def best(self, output: int, number: int, placements: Placements, chosen: bool) -> LocalPrice:
        """The cheapest strategy with this placement."""
        total = self.compute + self.inputs + self.outputs
        rows = np.flatnonzero(self.strategies.output(output) == number)
        own = int(self.solution.strategy[self.node])
        row = own if chosen else int(rows[np.argmin(total[rows])])
        if not math.isfinite(total[row]):
            return LocalPrice(placements=placements, compute_us=None, inputs_us=None, outputs_us=None, chosen=chosen)
        return LocalPrice(
            placements=placements, compute_us=float(self.compute[row]), inputs_us=float(self.inputs[row]),
            outputs_us=float(self.outputs[row]), chosen=chosen,
        )  # fmt: skip

    def _made(self, ref: TensorRef) -> int:
        return int(self.costs.space.strategies[ref.node].output(ref.output)[self.solution.strategy[ref.node]])

    def _inputs(self) -> np.ndarray:
        node, total = self.costs.space.graph.nodes[self.node], np.zeros(len(self.strategies))
        for slot in self.strategies.operand_slots:
            ref = node.operands[slot]
            start = self.solution.shared.get((ref, node.phase), self._made(ref))
            routes = self.costs.routes_of_use(self.costs.space.lattice_of[ref], self.node, slot)
            total = total + routes.table_us[start, self.strategies.operand(slot)]
        if self.strategies.kept is None:
            return total
        read = self._read_in_forward(self.costs.space.graph.kept_from[self.node])
        taken = np.where(self.strategies.output(0) == read, 0.0, np.inf)
        return np.where(self.strategies.kept, taken, total)

    def _read_in_forward(self, ref: TensorRef) -> int | None:
        """Placement number in which the forward pass reads a tensor: the shared one, or that of its only reader."""
        if (ref, FORWARD) in self.solution.shared:
            return self.solution.shared[ref, FORWARD]
        return self._wanted(ref, *self.uses[ref, FORWARD][0])

    def _kept_by_readers(self) -> np.ndarray:
        """What this op reads of a tensor that is kept for backward must stay as it is."""
        space, total = self.costs.space, np.zeros(len(self.strategies))
        for node, ref in space.graph.kept_from.items():
            readers = self.uses[ref, FORWARD]
            kept = space.strategies[node].is_kept(int(self.solution.strategy[node]))
            if kept and len(readers) == 1 and readers[0][0] == self.node:
                now = space.strategies[node].output(0)[self.solution.strategy[node]]
                total = total + np.where(self.strategies.operand(readers[0][1]) == now, 0.0, np.inf)
        return total

    def _outputs(self) -> np.ndarray:
        """Ways of the node's results to all that read them; where several do, the shared placement may be another."""
        total = np.zeros(len(self.strategies))
        for (ref, _), uses in self.uses.items():
            if ref.node != self.node:
                continue
            lattice, made = self.costs.space.lattice_of[ref], self.strategies.output(ref.output)
            to_uses = np.zeros(len(self.costs.space.lattices[lattice]))
            for consumer, slot in uses:
                routes, wanted = self.costs.routes_of_use(lattice, consumer, slot), self._wanted(ref, consumer, slot)
                if wanted is not None:
                    to_uses = to_uses + routes.table_us[:, wanted]
            if len(uses) > 1:
                held = any(use in self.costs.unreduced for use in uses)
                routes = self.costs.routes_without_reduction[lattice] if held else self.costs.routes[lattice]
                to_uses = (routes.table_us + to_uses[None, :]).min(axis=1)
            total = total + to_uses[made]
        return total

    def _wanted(self, ref: TensorRef, consumer: int, slot: int) -> int | None:
        """Placement number, in the lattice of `ref`, that a use asks for; slot -1 is the storing of a gradient or buffer. None:
        it reads nothing, because its result is kept from forward."""
        space = self.costs.space
        strategies = space.strategies[consumer]
        if slot >= 0 and strategies.is_kept(int(self.solution.strategy[consumer])):
            return None
        if slot >= 0:
            return int(strategies.operand(slot)[self.solution.strategy[consumer]])
        stored = int(strategies.output(0)[self.solution.strategy[consumer]])
        codes = space.lattice(TensorRef(consumer, 0)).codes[stored]
        return int(space.lattice(ref).index(codes))
