"""Commands of a worker that answer "compared with what?": recipes, other hardware, other meshes. Lives in the child process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner import MemoryBudget, Plan, Recipe, Workbench
from planner.sweep import SweepRequest, sweep


class Comparing:
    """Part of the engine. `bench` is what is open, `checkpoint` how its layers to checkpoint are chosen."""

    bench: Workbench
    checkpoint: str

    def recipe(self, progress: Any, name: str, memory_bytes: int | None, time_limit_s: float) -> Plan:
        """What experts write by hand, in its best version, on all axes of the mesh."""
        progress("solve")
        constraints = (*self.bench.default_constraints(memory_bytes), Recipe.parse(name, self.bench.mesh))
        plan = self.bench.solve(
            constraints, time_limit_s=time_limit_s, exact=False, checkpoint=self.checkpoint, cancelled=progress.stopped
        )
        return replace(plan, checkpoint=self.checkpoint)

    def what_if(self, progress: Any, plan: Plan, hardware: str, time_limit_s: float) -> tuple[Plan, Plan]:
        """On other hardware, with the memory that it leaves for a program: the same decisions priced anew, and the best ones
        under the same constraints. Nothing is traced."""
        progress("strategies and prices")
        other = Workbench.build(
            self.bench.graph, plan.mesh, hardware, optimizer=plan.memory_policy.optimizer, gpus_per_node=plan.gpus_per_node
        )
        kept = (c for c in plan.constraints if not isinstance(c, MemoryBudget))
        constraints = (*kept, MemoryBudget(num_bytes=other.hardware.default_budget_bytes))
        same = other.replay(replace(plan, constraints=constraints))
        progress("compile")
        other.warm_up()
        progress("solve")
        best = other.solve(
            constraints, time_limit_s=time_limit_s, exact=False, checkpoint=plan.checkpoint, cancelled=progress.stopped
        )
        return same, replace(best, checkpoint=plan.checkpoint)

    def sweep(self, progress: Any, request: SweepRequest) -> None:
        """Rows of (entry, plan or None), one per mesh, as they end."""
        rows = sweep(
            request, self.bench.graph,
            progress=lambda now: progress.news(f"{now.mesh}, {now.done + 1} of {now.total}: {now.stage}"),
        )  # fmt: skip
        for row in rows:
            progress.row(row)
