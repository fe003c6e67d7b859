"""READ FIRST. The whole engine on one screen: trace -> enumerate -> estimate -> solve -> plan -> export.

Stages are imported when they are used, so that opening a saved plan loads neither torch nor a solver.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from planner.checkpointing import Checkpoint, checkpointed, layer_names
from planner.constraint import BoundaryPlacement, Constraint, MemoryBudget, Pin
from planner.errors import InputError, InvalidConstraintError, PlanFormatError
from planner.graph import JointGraph, ModelRequest, TensorRef
from planner.memory import MemoryPolicy
from planner.mesh import Mesh
from planner.placement import Placements, Replicate, Shard
from planner.plan import Plan
from planner.schedule import Schedule
from planner.variants import Variants

if TYPE_CHECKING:
    from planner.cost import CostTable
    from planner.costing.live_memory import LiveMemory
    from planner.costing.timeline import Timeline
    from planner.exporting.verify import Export
    from planner.forecast import Forecast, Forecasts
    from planner.hardware import HardwareProfile
    from planner.reasons import Explanation, LocalPrice, Override, Relaxation
    from planner.solving.solve import Progress as SolveProgress
    from planner.solving.solve import Solver
    from planner.strategy import BannedRow, StrategySpace
    from planner.tracing.sources import ModelInfo

T = TypeVar("T")
Progress = Callable[[str], None]
"""Called with the name of each stage as it begins: `trace`, `enumerate`, `estimate`, `solve`, `verify`."""
Tracer = Callable[..., JointGraph]
"""Called like `trace`."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything a plan depends on. `constraints` are those of the user besides pins and the memory budget.

    `memory_bytes` None means what the hardware profile leaves for a program. A `model.batch` of None means, for a sample model,
    one sequence per device, so that every axis could be a data axis. `checkpoint` is `auto`, `none`, `full` or `full:16`
    (`checkpointing.py`).
    """

    model: ModelRequest
    mesh: Mesh
    hardware: str = "h100_sxm"
    memory_bytes: int | None = None
    optimizer: str = "adamw"
    gpus_per_node: int = 8
    pins: tuple[Pin, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    time_limit_s: float = 60.0
    checkpoint: str = "auto"

    @property
    def sized_model(self) -> ModelRequest:
        """The model request with the batch filled in; a factory or program of the user's keeps its own default."""
        if self.model.batch is not None or self.model.is_users_own:
            return self.model
        return replace(self.model, batch=self.mesh.num_devices)


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


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What planning took. Imports are not in the times; just-in-time compilation is `compile_s`."""

    trace_s: float
    enumerate_s: float
    estimate_s: float
    solve_s: float
    compile_s: float
    num_nodes: int
    num_strategies: int
    peak_rss_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A plan with the graph as traced; that of the plan itself is `planned_graph(plan, graph)`."""

    plan: Plan
    graph: JointGraph
    stats: Stats


def make_plan(
    request: PlanRequest,
    *,
    graph: JointGraph | None = None,
    replay: Plan | None = None,
    progress: Progress = lambda stage: None,
    tracer: Tracer | None = None,
    told: Callable[[SolveProgress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Planned:
    """Model, mesh, hardware, constraints -> a plan.

    A graph traced before saves the trace; a plan to `replay` gives all decisions, so that nothing is solved: it is checked
    against the model and priced anew. `tracer` is `trace` unless said otherwise (see `planner.loading`). `told` and
    `cancelled` are as in `Workbench.solve`.

    Raises:
        PlannerError: see planner/errors.py; every subclass says what to try.
    """
    check_batch(request)
    checkpoint = Checkpoint.parse(request.checkpoint)
    clock = _Clock(progress)
    found = graph or clock.run("trace", lambda: (tracer or trace)(request.sized_model))
    bench = Workbench.build(
        found, request.mesh, request.hardware, optimizer=request.optimizer, gpus_per_node=request.gpus_per_node, clock=clock
    )
    compile_s = 0.0
    if replay is not None:
        chosen = clock.run("solve", lambda: bench.replay(replay))
    else:
        compile_s = bench.warm_up()
        constraints = (*bench.default_constraints(request.memory_bytes), *request.constraints, *request.pins)
        chosen = clock.run(
            "solve",
            lambda: bench.solve(
                constraints, time_limit_s=request.time_limit_s, checkpoint=str(checkpoint), told=told, cancelled=cancelled
            ),
        )
    stats = Stats(
        trace_s=clock.seconds.get("trace", 0.0),
        enumerate_s=clock.seconds["enumerate"],
        estimate_s=clock.seconds["estimate"],
        solve_s=clock.seconds["solve"],
        compile_s=compile_s,
        num_nodes=len(chosen.choices),
        num_strategies=bench.variants.bench(chosen.checkpointed).space.num_strategies,
        peak_rss_bytes=peak_rss_bytes(),
    )
    return Planned(plan=chosen, graph=found, stats=stats)


def models() -> tuple[ModelInfo, ...]:
    """The sample models, by name. Does not import torch."""
    from planner.tracing.sources import list_models

    return list_models()


def hardware_names() -> tuple[str, ...]:
    from planner.hardware import profile_names

    return profile_names()


def hardware_profile(name: str) -> HardwareProfile:
    from planner.hardware import load_profile

    return load_profile(name)


def trace(request: ModelRequest, repeated: tuple[int, ...] | None = None) -> JointGraph:
    """Load the model and trace forward and backward into one graph. Imports torch and runs the model's Python code.

    `repeated` of the graph of the same model at another size gives this one the same structure.
    """
    from planner.tracing.trace import trace as trace_model

    return trace_model(request, repeated)


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
        clock: _Clock | None = None,
    ) -> Workbench:
        profile = hardware_profile(hardware)
        return cls._of(graph, mesh, profile, MemoryPolicy(optimizer=optimizer), gpus_per_node, clock)

    @classmethod
    def _of(
        cls,
        graph: JointGraph,
        mesh: Mesh,
        profile: HardwareProfile,
        policy: MemoryPolicy,
        gpus_per_node: int,
        clock: _Clock | None = None,
    ) -> Workbench:
        from planner.costing.estimate import estimate_costs
        from planner.enumerating.enumerate import enumerate_strategies
        from planner.solving.solve import Solver

        clock = clock or _Clock(lambda stage: None)
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
        self, constraints: Sequence[Constraint], conflicts: Sequence[str] | None = None, *, time_limit_s: float = 60.0
    ) -> tuple[Relaxation, ...]:
        """For each member of a conflict of these constraints, the best plan if it alone is given up; see `relaxations.py`."""
        from planner.relaxations import relaxations

        return relaxations(self.solver, constraints, conflicts, time_limit_s=time_limit_s)

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


def forecasts(plan: Plan, graph: JointGraph) -> Forecasts:
    """Step time and memory of a plan under both schedules. `graph` is the model's as traced; nothing is enumerated or solved.

    Raises:
        PlanFormatError: the graph is another model's, or the plan was priced with other hardware constants.
    """
    from planner.actions import OVERLAPPED, SERIAL
    from planner.forecast import Forecasts, forecast

    check_same_model(plan, graph)
    own, hardware = planned_graph(plan, graph), hardware_profile(plan.hardware_name)
    return Forecasts(forecast(plan, own, hardware, SERIAL), forecast(plan, own, hardware, OVERLAPPED))


def workbench_of(
    plan: Plan,
    graph: JointGraph | None = None,
    *,
    progress: Progress = lambda stage: None,
    tracer: Tracer | None = None,
) -> Workbench:
    """The workbench that a plan came from. The model is traced again unless its graph is given.

    Raises:
        PlanFormatError: the graph is another model's, or at other sizes.
    """
    found = graph
    if found is None:
        progress("trace")
        found = (tracer or trace)(plan.request)
    check_same_model(plan, found)
    progress("strategies and prices")
    return Workbench.build(
        found, plan.mesh, plan.hardware_name, optimizer=plan.memory_policy.optimizer, gpus_per_node=plan.gpus_per_node
    )


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


def check_batch(request: PlanRequest) -> None:
    """Refuse a batch that the boundary cannot split, before the model is traced."""
    batch, mesh = request.sized_model.batch, request.mesh
    groups = 1
    for axis in mesh.data_axes:
        groups *= mesh.axis_sizes[axis]
    if batch is not None and batch < 1:
        raise InputError(f"batch {batch} is not a positive number", hint="Give --batch 1 or more.")
    if batch is not None and batch % groups:
        near = [n for n in (batch // groups * groups, (batch // groups + 1) * groups) if n]
        names = ",".join(f"{mesh.axis_names[a]}={mesh.axis_sizes[a]}" for a in mesh.data_axes)
        raise InputError(
            f"a batch of {batch} cannot be split evenly over {names} ({groups} groups)",
            hint=f"Nearest batch sizes that work: {', '.join(map(str, near))}.",
        )


@dataclass(frozen=True)
class Change:
    """A tensor whose placement differs between two plans (output 0 of the node; None: the node is in one plan only)."""

    key: str
    before: str | None
    after: str | None


def diff(a: Plan, b: Plan) -> tuple[Change, ...]:
    """Nodes whose output placements differ, in the order of plan `b`."""
    texts = [{key: "".join(map(str, c.outputs[0] or ())) for key, c in plan.choices.items()} for plan in (a, b)]
    keys = dict.fromkeys([*b.choices, *a.choices])
    return tuple(Change(key, texts[0].get(key), texts[1].get(key)) for key in keys if texts[0].get(key) != texts[1].get(key))


def planned_graph(plan: Plan, graph: JointGraph) -> JointGraph:
    """The graph of a plan: the model's, with the layers repeated that the plan checkpoints.

    Raises:
        PlanFormatError: the model does not have those layers.
    """
    unknown = sorted(set(plan.checkpointed) - set(layer_names(graph)))
    if unknown:
        raise PlanFormatError(
            f"the plan was made for another model than {graph.request.model}: it checkpoints {unknown[0]}, which is not in it",
            hint="Plan again for this model; pins are named by module and can be given again.",
        )
    return checkpointed(graph, plan.checkpointed)


def check_same_structure(plan: Plan, graph: JointGraph) -> None:
    """Raises PlanFormatError naming the first difference if the plan's ops are not those of the graph."""
    graph = planned_graph(plan, graph)
    if plan.structure_fingerprint == graph.structure_fingerprint:
        return
    missing = [key for key in plan.choices if key not in graph.node_by_key]
    added = [node.key for node in graph.nodes if node.key not in plan.choices]
    first = "the same ops are wired differently"
    if missing:
        first = f"it places {missing[0]}, which the model does not have"
    elif added:
        first = f"it does not place {added[0]}"
    raise PlanFormatError(
        f"the plan was made for another model than {graph.request.model}: {first}",
        hint="Plan again for this model; pins are named by module and can be given again.",
    )


def check_same_model(plan: Plan, graph: JointGraph) -> None:
    """As check_same_structure, and shapes, dtypes and arguments must agree too."""
    check_same_structure(plan, graph)
    if plan.fingerprint != planned_graph(plan, graph).fingerprint:
        raise PlanFormatError(
            f"the plan was made for {graph.request.model} at other sizes: shapes, dtypes or arguments differ",
            hint="Use the batch, sequence length and precision of the plan (see `show`), or replay it: plan --from plan.json.",
        )


def export(
    plan: Plan,
    graph: JointGraph | None = None,
    *,
    verify: bool = True,
    embed_plan: bool = False,
    progress: Progress = lambda stage: None,
    tracer: Tracer | None = None,
) -> Export:
    """The plan as one PyTorch file, verified against the user's module before it is handed out.

    The model is traced again at full size unless its graph is given, and at tiny size to write sizes as symbols.

    Raises:
        PlanFormatError: the plan belongs to another model.
        ExportError: an op that cannot be written, or a file that failed its verification.
    """
    from planner.exporting.verify import export_verified

    progress("trace")
    if graph is None:
        graph = (tracer or trace)(plan.request)
    check_same_model(plan, graph)
    tiny = tiny_graph(graph, tracer)
    graph, tiny = planned_graph(plan, graph), None if tiny is None else planned_graph(plan, tiny)
    return export_verified(plan, graph, tiny, verify=verify, embed_plan=embed_plan, progress=progress)


def schedule(plan: Plan, graph: JointGraph) -> Schedule:
    """When the exported step of a plan computes each op, and issues and awaits each redistribution. `graph`: as traced.

    Raises:
        PlanFormatError: the plan belongs to another model.
    """
    from planner.exporting.lower import lower
    from planner.exporting.parts import schedule_of

    check_same_model(plan, graph)
    return schedule_of(lower(plan, planned_graph(plan, graph)))


def tiny_graph(graph: JointGraph, tracer: Tracer | None = None) -> JointGraph | None:
    """The same model at tiny size, None if its factory has no tiny size."""
    if not graph.symbols:
        return None
    request = replace(graph.request, size="tiny", batch=None, layers=len(graph.layers) or None)
    return (tracer or trace)(request, graph.repeated)


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far (ru_maxrss is KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Clock:
    """Runs stages, reports their beginning and keeps their seconds."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def run(self, stage: str, work: Callable[[], T]) -> T:
        self.progress(stage)
        start = time.perf_counter()
        result = work()
        self.seconds[stage] = time.perf_counter() - start
        return result
