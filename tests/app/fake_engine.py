"""Stands in for the planner in worker processes: made-up plans at once, and every way in which a command can end."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from app.engine import OpenSpec, Progress
from planner import InfeasibleError, JointGraph, Plan
from planner.constraint import Constraint
from tests.app.synthetic import legal, make_plan, small_graph


class FakeEngine:
    """A pin's note says what should happen: `infeasible`, `die`, `bug`, `slow`; `unproved`: the first answer is not proved,
    the search for a proof finds it, after `slow proof` only when it is cancelled."""

    def __init__(self, spec: OpenSpec, progress: Progress) -> None:
        progress("trace")
        self.mesh = spec.mesh
        self.graph = JointGraph.load(spec.graph_path) if spec.graph_path else small_graph(spec.request.layers or 4)

    def ready(self, progress: Progress, memory_bytes: int | None) -> None:
        pass

    def start(self, progress: Progress, memory_bytes: int | None, time_limit_s: float) -> tuple[JointGraph, Plan]:
        progress("solve")
        return self.graph, make_plan(self.graph, self.mesh, memory_bytes=memory_bytes)

    def legal(self, progress: Progress, key: str, output: int = 0) -> tuple[Any, ...]:
        return legal(self.graph, key, self.mesh)

    def solve(
        self,
        progress: Progress,
        pins: tuple[Constraint, ...],
        memory_bytes: int | None,
        time_limit_s: float,
        exact: bool | None,
        layers: tuple[str, ...] | None = None,
    ) -> Plan:
        progress("solve")
        notes = {getattr(pin, "note", "") for pin in pins}
        if "infeasible" in notes:
            raise InfeasibleError(
                "no plan satisfies all pins", hint="Remove one of them.", conflicts=[pin.describe() for pin in pins]
            )
        if "die" in notes:
            os._exit(3)
        if "bug" in notes:
            raise ZeroDivisionError("a fault of the program")
        if "news" in notes:
            progress.news("612.30 ms, within 1.3 %")
            progress.news("611.00 ms, within 1 %")  # too soon after the other
            time.sleep(60)
        if "slow" in notes:
            time.sleep(60)
        plan = make_plan(self.graph, self.mesh, pins, memory_bytes=memory_bytes)
        if notes & {"unproved", "slow proof"} and exact is False:
            report = replace(plan.report, status="feasible", bound_us=0.99 * plan.objective_us)
            return replace(plan, report=report)
        if "slow proof" in notes:
            time.sleep(60)
        return plan

    def export(self, progress: Progress, plan: Plan) -> Any:
        progress("write")
        return SimpleNamespace(
            script="print('train')\n",
            plan_json=plan.dumps(),
            report={"passed": True, "dry_run": ["dry-run rank 0/64: fine -> PASS"], "seconds": 1.0, "not_run": "real GPUs"},
        )
