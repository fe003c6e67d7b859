"""Stands in for the planner in worker processes: made-up plans at once, and every way in which a command can end."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from app.engine import OpenSpec, Progress
from planner import InfeasibleError, InvalidConstraintError, JointGraph, Pin, Plan, Recipe
from planner.constraint import Constraint
from planner.errors import SolverError
from planner.placement import parse
from planner.sweep import Entry, SweepRequest, meshes
from tests.app.fake_answers import FakeAnswers, reason_of
from tests.app.synthetic import legal, make_plan, small_graph


class FakeEngine(FakeAnswers):
    """A pin's note says what should happen: `infeasible`, `over budget`, `die`, `bug`, `slow`, `listening` (until it is asked to
    stop), `nothing found` (the same, without a plan); `unproved`: the first answer is
    not proved, the search for a proof finds it, after `slow proof` only when it is cancelled."""

    def __init__(self, spec: OpenSpec, progress: Progress) -> None:
        progress("trace")
        self.mesh = spec.mesh
        self.graph = JointGraph.load(spec.graph_path) if spec.graph_path else small_graph(spec.request.layers or 4)

    def ready(self, progress: Progress, memory_bytes: int | None) -> None:
        pass

    def start(
        self, progress: Progress, memory_bytes: int | None, time_limit_s: float, demands: tuple[Any, ...] = ()
    ) -> tuple[JointGraph, Plan]:
        progress("solve")
        return self.graph, make_plan(self.graph, self.mesh, demands, memory_bytes=memory_bytes)

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
        notes = set(map(reason_of, pins))
        if "infeasible" in notes:
            raise InfeasibleError(
                "no plan satisfies all pins", hint="Remove one of them.", conflicts=[pin.describe() for pin in pins]
            )
        if "over budget" in notes and memory_bytes != 41 * 2**30:
            names = ["memory budget 80.00 GiB", *(pin.describe() for pin in pins)]
            raise InfeasibleError("too little memory", hint="Raise it.", conflicts=names, shortfall_bytes=2**30)
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
        if notes & {"listening", "nothing found"}:
            while not progress.stopped():
                time.sleep(0.01)
            if "nothing found" in notes:
                raise SolverError("no plan was found", hint="Give it more time.")
        plan = make_plan(self.graph, self.mesh, pins, memory_bytes=memory_bytes)
        if "listening" in notes:
            return replace(plan, report=replace(plan.report, status="feasible", bound_us=0.9 * plan.objective_us))
        if notes & {"unproved", "slow proof"} and exact is False:
            report = replace(plan.report, status="feasible", bound_us=0.99 * plan.objective_us)
            return replace(plan, report=report)
        if "slow proof" in notes:
            time.sleep(60)
        return plan

    def recipe(self, progress: Progress, name: str, memory_bytes: int | None, time_limit_s: float) -> Plan:
        if name == "ep":
            raise InvalidConstraintError("recipe ep on dp, tp: the model has no experts", hint="Take another recipe.")
        everywhere = Pin(where="layers.*.attention.wq", placements=parse("RR", self.mesh))
        plan = make_plan(self.graph, self.mesh, (everywhere,), memory_bytes=memory_bytes)
        return replace(plan, constraints=(*plan.constraints[:2], Recipe.parse(name, self.mesh)))

    def what_if(self, progress: Progress, plan: Plan, hardware: str, time_limit_s: float) -> tuple[Plan, Plan]:
        same = replace(plan, hardware_name=hardware)
        return same, replace(make_plan(self.graph, self.mesh), hardware_name=hardware)

    def sweep(self, progress: Progress, request: SweepRequest) -> None:
        for mesh in meshes(request.devices, request.axes):
            if mesh.axis_sizes == (2, 32):
                progress.row((Entry(mesh=str(mesh), status="infeasible", reason="nothing fits"), None))
            elif mesh.num_axes == 2:
                plan = make_plan(self.graph, mesh)
                progress.row((Entry.of(mesh, plan, 0.1), plan))

    def export(self, progress: Progress, plan: Plan, format: str = "script") -> Any:
        progress("write")
        return SimpleNamespace(
            script="print('train')\n",
            plan_json=plan.dumps(),
            report={"passed": True, "dry_run": ["dry-run rank 0/64: fine -> PASS"], "seconds": 1.0, "not_run": "real GPUs"},
        )
