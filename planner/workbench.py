"""The workbench: one graph on one mesh and hardware, with tables and solver messages kept warm for re-solves.

Stages are imported when they are used, so that opening a saved plan loads neither torch nor a solver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.checkpointing import Checkpoint
from planner.clock import Clock
from planner.constraint import BoundaryPlacement, Constraint, MemoryBudget
from planner.errors import InvalidConstraintError, PlanFormatError
from planner.graph import JointGraph, TensorRef
from planner.hardware import HardwareProfile, load_profile
from planner.matching import check_same_structure, planned_graph
from planner.memory import MemoryPolicy
from planner.mesh import Mesh
from planner.placement import Placements, Replicate, Shard
from planner.plan import Plan
from planner.variants import Variants

if TYPE_CHECKING:
    from planner.cost import CostTable
    from planner.costing.live_memory import LiveMemory
    from planner.costing.timeline import Timeline
    from planner.forecast import Forecast
    from planner.reasons import Explanation, LocalPrice, Override, Relaxation
    from planner.solving.solve import Progress as SolveProgress
    from planner.solving.solve import Solver
    from planner.strategy import BannedRow, StrategySpace


@dataclass(eq=False)
class Listeners:
    """Who looks on while a workbench and its variants solve. `told` gets value and bound after every round; `cancelled` is
    polled, and a cancelled solve ends with the best plan so far."""

    told: Callable[[SolveProgress], None] | None = None
    cancelled: Callable[[], bool] | None = None

    @contextmanager
    def instead(self, told: Callable[[SolveProgress], None] | None, cancelled: Callable[[], bool] | None) -> Iterator[None]:
        before = self.told, self.cancelled
        self.told, self.cancelled = told, cancelled
        try:
            yield
        finally:
            self.told, self.cancelled = before


class Workbench:
    """One graph on one mesh and hardware, with tables and solver messages kept warm for re-solves.

    Not thread-safe; the app keeps it in a worker process.
    """

    def __init__(self, costs: CostTable, hardware: HardwareProfile, solver: Solver) -> None:
        self.costs = costs
        self.hardware = hardware
        self.solver = solver
        self.variants = Variants(self)
        self.listeners = Listeners()

    @classmethod
    def build(
        cls,
        graph: JointGraph,
        mesh: Mesh,
        hardware: str = "h100_sxm",
        *,
        optimizer: str = "adamw",
        gpus_per_node: int = 8,
        clock: Clock | None = None,
    ) -> Workbench:
        profile = load_profile(hardware)
        return cls._of(graph, mesh, profile, MemoryPolicy(optimizer=optimizer), gpus_per_node, clock)

    @classmethod
    def _of(
        cls,
        graph: JointGraph,
        mesh: Mesh,
        profile: HardwareProfile,
        policy: MemoryPolicy,
        gpus_per_node: int,
        clock: Clock | None = None,
    ) -> Workbench:
        from planner.costing.estimate import estimate_costs
        from planner.enumerating.enumerate import enumerate_strategies
        from planner.solving.solve import Solver

        clock = clock or Clock(lambda stage: None)
        space = clock.run("enumerate", lambda: enumerate_strategies(graph, mesh))
        costs = clock.run("estimate", lambda: estimate_costs(space, profile, policy=policy, gpus_per_node=gpus_per_node))
        return cls(costs, profile, Solver(costs))

    def like(self, graph: JointGraph) -> Workbench:
        """Another graph on the same mesh and hardware."""
        other = self._of(graph, self.mesh, self.hardware, self.costs.memory.policy, self.costs.gpus_per_node)
        other.listeners = self.listeners
        return other

    def with_fresh_solver(self) -> Workbench:
        """The same prices with a solver that knows nothing yet."""
        from planner.solving.solve import Solver

        other = Workbench(self.costs, self.hardware, Solver(self.costs))
        other.listeners = self.listeners
        return other

    @property
    def space(self) -> StrategySpace:
        return self.costs.space

    @property
    def graph(self) -> JointGraph:
        return self.costs.space.graph

    @property
    def mesh(self) -> Mesh:
        return self.costs.space.mesh

    def warm_up(self) -> float:
        """Compile the solver's kernels. Returns the seconds it took (0 if they were compiled before)."""
        return self.solver.warm_up()

    def default_constraints(self, memory_bytes: int | None = None) -> tuple[Constraint, ...]:
        """Batch inputs sharded over the data axes, the loss replicated, and the memory budget."""
        budget = MemoryBudget(num_bytes=self.hardware.default_budget_bytes if memory_bytes is None else memory_bytes)
        return (*boundaries(self.graph, self.mesh), budget)

    def legal(self, key: str, output: int = 0) -> tuple[Placements, ...]:
        """Placements that output `output` of the node `key` can be pinned to."""
        bench = self.variants.holding(key)
        ref = TensorRef(bench._node(key), output)
        lattice = bench.space.lattice(ref)
        return tuple(lattice.placements(number) for number in bench.solver.legal(ref))

    def banned(self, key: str) -> tuple[BannedRow, ...]:
        """Rows of the node's rule that this mesh and shape rule out, with the reason."""
        bench = self.variants.holding(key)
        return bench.space.strategies[bench._node(key)].banned

    def overrides(
        self,
        key: str,
        output: int = 0,
        constraints: Sequence[Constraint] = (),
        *,
        checkpointed: tuple[str, ...] = (),
        exact: bool | None = False,
        time_limit_s: float = 60.0,
        row: Callable[[Override], None] = lambda override: None,
        cancelled: Callable[[], bool] | None = None,
    ) -> tuple[Override, ...]:
        """What the best plan comes to for each legal placement of a tensor; see `overrides.py`. `key` is a node key, or anything
        that a pin can name (then all its tensors are pinned together). `checkpointed`: the layers that these plans repeat."""
        from planner.overrides import Place, overrides

        place = Place.find(self.variants.bench(checkpointed), key, output, constraints)
        return overrides(place, constraints, exact=exact, time_limit_s=time_limit_s, row=row, cancelled=cancelled)

    def explain(self, plan: Plan, key: str, placements: Placements, output: int = 0, **how: Any) -> Explanation:
        """Why the plan does not have these placements at `key`, as a difference of plans taken apart; see `explain.py`."""
        from planner.explain import explain

        return explain(self, plan, key, placements, output=output, **how)

    def local_prices(self, plan: Plan, key: str, output: int = 0) -> tuple[LocalPrice, ...]:
        """What each legal placement costs at the op itself while all other ops stay as in the plan."""
        from planner.explain import local_prices

        return local_prices(self, plan, key, output)

    def relaxations(
        self, constraints: Sequence[Constraint], conflicts: Sequence[str] | None = None, **how: Any
    ) -> tuple[Relaxation, ...]:
        """For each member of a conflict of these constraints, the best plan if it alone is given up; see `relaxations.py`."""
        from planner.relaxations import relaxations

        return relaxations(self, constraints, conflicts, **how)

    def _node(self, key: str) -> int:
        if key not in self.graph.node_by_key:
            raise InvalidConstraintError(f"the model has no op {key!r}", hint="Keys are listed by `show plan.json --json`.")
        return self.graph.node_by_key[key]

    def solve(
        self,
        constraints: Sequence[Constraint],
        *,
        time_limit_s: float = 60.0,
        exact: bool | None = None,
        checkpoint: str | tuple[str, ...] = "none",
        told: Callable[[SolveProgress], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Plan:
        """The best plan under the constraints. `exact` False answers at once with the gap it has; None goes on to the integer
        program if what is left open is small; True whatever its size. Bound and status speak of the layers that the plan
        checkpoints; with `checkpoint` `auto` the method says how many other numbers of layers were tried. `checkpoint` can also
        be the layers themselves. `told` is called with value and bound after every round of the solver; `cancelled` is polled,
        and a cancelled solve ends with the best plan so far and its gap.

        Raises:
            InvalidConstraintError: a pin that matches nothing or has no legal strategy.
            InfeasibleError: constraints that cannot hold together, or a budget that is too small.
            InputError: more layers to checkpoint than the model has.
        """
        with self.listeners.instead(told, cancelled):
            if isinstance(checkpoint, tuple):
                return self.variants.bench(checkpoint).solve_here(constraints, time_limit_s=time_limit_s, exact=exact)[0]
            return self.variants.solve(Checkpoint.parse(checkpoint), constraints, time_limit_s=time_limit_s, exact=exact)

    def solve_here(self, constraints: Sequence[Constraint], *, time_limit_s: float, exact: bool | None) -> tuple[Plan, float]:
        """The best plan of this very graph, and what a byte more of memory would be worth, in µs."""
        from planner.solving.assemble import assemble

        solution = self.solver.solve(
            constraints, time_limit_s=time_limit_s, exact=exact, progress=self.listeners.told, cancelled=self.listeners.cancelled
        )
        return assemble(self.costs, solution, constraints), solution.us_per_byte

    def timeline(self, plan: Plan, schedule: str = "overlapped") -> Timeline:
        """When each kernel and collective of a plan runs; see `costing/timeline.py`. `schedule` is `serial` or `overlapped`.

        Raises:
            InputError: no such schedule. PlanFormatError: the plan is of another model or hardware.
        """
        return self.forecast(plan, schedule).timeline

    def live_memory(self, plan: Plan, schedule: str = "overlapped") -> LiveMemory:
        """Peak with temporaries, its moment and the largest tensors; see `costing/live_memory.py`. Raises as `timeline`."""
        return self.forecast(plan, schedule).memory

    def forecast(self, plan: Plan, schedule: str = "overlapped") -> Forecast:
        """Timeline and live memory, from one walk. Raises as `timeline`."""
        from planner.forecast import forecast

        bench = self if self.graph.checkpointed == plan.checkpointed else self.variants.bench(plan.checkpointed)
        check_same_structure(plan, bench.graph)
        return forecast(plan, bench.graph, self.hardware, schedule)

    def missing_bytes(self, plan: Plan) -> int:
        """What the device lacks for all that is alive at once in the exported order, 0 if the plan fits. Raises as `timeline`."""
        return self.forecast(plan).missing_bytes

    def replay(self, plan: Plan) -> Plan:
        """The decisions of a plan on this model, mesh and hardware, checked and priced anew, without solving.

        Raises:
            PlanFormatError: another model, mesh, or a choice that is no legal strategy here.
        """
        from planner.solving.assemble import assemble
        from planner.solving.replay import solution_of

        if self.graph.checkpointed != plan.checkpointed:
            planned_graph(plan, self.graph)
            return self.variants.bench(plan.checkpointed).replay(plan)
        check_same_structure(plan, self.graph)
        if plan.mesh != self.mesh:
            raise PlanFormatError(
                f"the plan is for the mesh {plan.mesh}, not {self.mesh}", hint=f"Give --mesh {plan.mesh}, or plan again."
            )
        return replace(assemble(self.costs, solution_of(plan, self.costs), plan.constraints), checkpoint=plan.checkpoint)


def boundaries(graph: JointGraph, mesh: Mesh) -> tuple[BoundaryPlacement, ...]:
    """What the data loader delivers: the batch dim of every input sharded over the mesh's data axes (dp, fsdp, ...); without
    a data axis inputs are free. A scalar loss leaves replicated."""
    found = []
    for item in graph.inputs:
        if item.batch_dim is not None and mesh.data_axes:
            placements = tuple(Shard(item.batch_dim) if axis in mesh.data_axes else Replicate() for axis in range(mesh.num_axes))
            found.append(BoundaryPlacement(where=f"input:{item.name}", placements=placements))
    found.append(BoundaryPlacement(where="output:loss", placements=(Replicate(),) * mesh.num_axes))
    return tuple(found)
