"""READ FIRST. The whole engine on one screen: trace -> enumerate -> estimate -> solve -> plan -> export.

Stages are imported when they are used, so that opening a saved plan loads neither torch nor a solver.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.checkpointing import Checkpoint
from planner.clock import Clock, Progress
from planner.constraint import Constraint, Pin
from planner.device_memory import solve_to_fit
from planner.errors import InputError
from planner.graph import JointGraph, ModelRequest
from planner.matching import check_same_model, planned_graph
from planner.mesh import Mesh
from planner.plan import Plan
from planner.schedule import Schedule
from planner.workbench import Workbench

if TYPE_CHECKING:
    from planner.exporting.recipe_file import FactorySource
    from planner.exporting.recipe_verify import Price
    from planner.exporting.script import Outlook
    from planner.exporting.verify import Export
    from planner.forecast import Forecasts
    from planner.hardware import HardwareProfile
    from planner.solving.solve import Progress as SolveProgress
    from planner.tracing.sources import ModelInfo

Tracer = Callable[..., JointGraph]
"""Called like `trace`."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything a plan depends on. `constraints` are those of the user besides pins and the memory budget.

    `memory_bytes` None means what the hardware profile leaves for a program; if temporaries do not fit beside that, it is
    tightened (`device_memory.py`). A `model.batch` of None means, for a sample model,
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
    clock = Clock(progress)
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

        deadline = time.monotonic() + request.time_limit_s

        def solve(under: tuple[Constraint, ...]) -> Plan:
            left = max(deadline - time.monotonic(), 1.0)
            return bench.solve(under, time_limit_s=left, checkpoint=str(checkpoint), told=told, cancelled=cancelled)

        chosen = clock.run("solve", lambda: solve_to_fit(solve, bench.missing_bytes, constraints))
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
    texts = [plan.output_texts for plan in (a, b)]
    keys = dict.fromkeys([*b.choices, *a.choices])
    return tuple(Change(key, texts[0].get(key), texts[1].get(key)) for key in keys if texts[0].get(key) != texts[1].get(key))


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
    return export_verified(
        plan, graph, tiny, verify=verify, embed_plan=embed_plan, outlook=_outlook(plan, graph), progress=progress
    )


def _outlook(plan: Plan, graph: JointGraph) -> Outlook | None:
    """`graph`: the plan's own. None for a plan that was priced with other constants than its hardware profile has today."""
    from planner.exporting.script import Outlook
    from planner.forecast import forecast

    hardware = hardware_profile(plan.hardware_name)
    if plan.hardware_hash != hardware.content_hash:
        return None
    found = forecast(plan, graph, hardware)
    return Outlook(
        step_us=found.timeline.step_us,
        allocated_bytes=found.memory.allocated_bytes,
        reserved_bytes=found.memory.reserved_bytes,
    )


def export_recipe(
    plan: Plan,
    graph: JointGraph | None = None,
    *,
    verify: bool = True,
    progress: Progress = lambda stage: None,
    tracer: Tracer | None = None,
) -> Export:
    """The plan as a short file in the style of FSDP2 and tensor parallelism: approximate, and measured against the plan.

    Raises:
        PlanFormatError: the plan belongs to another model.
        ExportError: the plan cannot be said that way (every reason in `details`), or the file failed its comparison.
    """
    from planner.exporting.recipe_verify import export_recipe as export_verified

    progress("trace")
    if graph is None:
        graph = (tracer or trace)(plan.request)
    check_same_model(plan, graph)
    reasons = not_expressible(plan, graph)
    tiny = None if reasons else tiny_graph(graph, tracer)
    graph, tiny = planned_graph(plan, graph), None if tiny is None else planned_graph(plan, tiny)
    source, price = _factory_source(graph.request, tiny), _collective_price(plan)
    return export_verified(plan, graph, tiny, source, price, verify=verify, progress=progress)


def not_expressible(plan: Plan, graph: JointGraph) -> tuple[str, ...]:
    """Why a plan cannot be exported as a recipe; empty if it can. `graph`: as traced."""
    from planner.exporting.expressible import expressible
    from planner.exporting.module_recipe import told

    found = expressible(plan, planned_graph(plan, graph))
    return told(found) if isinstance(found, list) else ()


def _factory_source(request: ModelRequest, tiny: JointGraph | None) -> FactorySource | None:
    from planner.exporting.recipe_file import FactorySource
    from planner.tracing.sources import import_source

    found = import_source(request.model)
    if found is None:
        return None
    module, function, named, folder = found
    asked = {"batch": request.batch, "seq": request.seq, "layers": request.layers}
    full = named | {name: value for name, value in asked.items() if value is not None}
    small = None if tiny is None else named | {"size": "tiny", "layers": len(tiny.layers)}
    return FactorySource(module=module, function=function, full=full, tiny=small, folder=folder)


def _collective_price(plan: Plan) -> Price:
    import numpy as np

    from planner.costing.collective import mesh_collectives

    curves = mesh_collectives(hardware_profile(plan.hardware_name), plan.mesh, plan.gpus_per_node)
    return lambda kind, axes, num_bytes, dtype: float(curves.us(kind, axes, np.array([num_bytes]), dtype)[0])


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
