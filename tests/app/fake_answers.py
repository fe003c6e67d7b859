"""Made-up answers to what the inspector and a conflict ask."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from app.answering import Exposed
from app.engine import Progress
from planner import Explanation, JointGraph, Mesh, Override, Plan, Relaxation, resolve
from planner.constraint import Constraint
from planner.placement import parse
from planner.reasons import LocalPrice, Term
from tests.app.synthetic import legal


def reason_of(constraint: object) -> str:
    """Its note without who signed it and when."""
    return str(getattr(constraint, "note", "")).partition(" (")[0]


class FakeAnswers:
    graph: JointGraph
    mesh: Mesh

    def overrides(
        self, progress: Progress, where: str, constraints: tuple[Constraint, ...], layers: tuple[str, ...]
    ) -> tuple[Override, ...]:
        """The first legal placement is the cheapest, the last one impossible; `slow prices` in a note: after the first row the
        rest waits for the word to stop."""
        node = resolve(where, self.graph)[0].node if where not in self.graph.node_by_key else self.graph.node_by_key[where]
        key = self.graph.nodes[node].key
        found = [_override(number, placements) for number, placements in enumerate(legal(self.graph, key, self.mesh))]
        found[-1] = replace(found[-1], status="infeasible", delta_us=None, delta_bytes=None, conflicts=("pin other = RR",))
        if "slow prices" in map(reason_of, constraints):
            progress.row(found[0])
            deadline = time.monotonic() + 300
            while not progress.stopped() and time.monotonic() < deadline:
                time.sleep(0.01)
            return (found[0],)
        for override in found:
            progress.row(override)
        return tuple(found)

    def explain(self, progress: Progress, plan: Plan, where: str, placements: Any) -> Explanation:
        terms = [
            Term(what="compute", key="layers.*.attention.wq/linear/fwd#0", phase="forward", count=4, us=400.0,
                 before="S(0)R, RS(0) -> S(0)S(2)", after="S(0)R, RR -> S(0)R", here=True),
            Term(what="redistribution", key="layers.*.add/fwd#0", phase="backward", count=4, us=-50.0,
                 before="S(0)R > RR: all_gather@dp", after="no redistribution", here=False),
        ]  # fmt: skip
        return Explanation(
            where=where, count=1, chosen=(parse("S(0)S(1)", self.mesh),), asked=placements, verdict="dearer here",
            override=replace(_override(0, placements), delta_us=350.0), terms=tuple(terms), memory=(("activation_bytes", 2**30),),
        )  # fmt: skip

    def local_prices(self, progress: Progress, plan: Plan, key: str) -> tuple[LocalPrice, ...]:
        return tuple(
            LocalPrice(placements=placements, compute_us=100.0, inputs_us=7.5, outputs_us=0.0, chosen=number == 1)
            for number, placements in enumerate(legal(self.graph, key, self.mesh))
        )

    def exposed(self, progress: Progress, plan: Plan) -> Exposed:
        return Exposed(0.8 * plan.objective_us, 0.01 * plan.objective_us)

    def give_up(
        self, progress: Progress, demands: tuple[Constraint, ...], memory_bytes: int | None, conflicts: tuple[str, ...]
    ) -> tuple[Relaxation, ...]:
        found = [Relaxation(constraint=text, status="optimal", objective_us=5000.0, peak_bytes=2**33) for text in conflicts]
        for relaxation in found:
            progress.row(relaxation)
        return tuple(found)


def _override(number: int, placements: Any) -> Override:
    return Override(
        placements=placements, status="optimal", objective_us=1e6, bound_us=1e6, peak_bytes=2**33, delta_us=700.0 * number,
        delta_bytes=number * 2**30, chosen=number == 0,
    )  # fmt: skip
