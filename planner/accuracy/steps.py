"""Step time and memory of a training run, by planning it and simulating the exported order.

A decoder is traced once per structure (`rescale.py`), one to three layers deep. Each row is planned on shallow graphs at its own
sizes, mesh and recipe and simulated by the planner's timeline (`costing/timeline.py`), after what the framework of the row does
differently (`described.py`). What one layer more adds to time and to memory is added for every layer that is missing: a stack
of equal layers has an optimal plan and an order that repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from planner.accuracy import described
from planner.accuracy.deep_memory import DEPTHS as MEMORY_DEPTHS
from planner.accuracy.deep_memory import DeepMemory, Walked, deep_memory
from planner.accuracy.rescale import Sizes, at_sizes, parsed, traced_sizes
from planner.accuracy.rows import Skip
from planner.accuracy.runs import Run
from planner.actions import OVERLAPPED, Action, Actions
from planner.checkpointing import checkpointed, layer_names
from planner.constraint import Constraint, MemoryBudget
from planner.costing.assumptions import CONSTANTS
from planner.costing.collective import mesh_collectives
from planner.costing.live_memory import walk
from planner.costing.timeline import simulate
from planner.errors import InfeasibleError, PlannerError
from planner.graph import JointGraph, ModelRequest, Node
from planner.hardware import HardwareProfile, load_profile
from planner.issuing import actions_of
from planner.memory import MemoryPolicy
from planner.plan import Plan

CAST_OP = "aten._to_copy.default"
ATTENTION = "aten._scaled_dot_product"
NO_LIMIT = MemoryBudget(num_bytes=10**15)
GPUS_PER_NODE = 8
DEPTHS = (1, 2)
SHARPNESS: float = CONSTANTS["host.sharpness"].value
EAGER_OPERATORS: float = CONSTANTS["host.eager_operators"].value
MOST_KEPT = 8
"""Plans; one takes a few MB."""


@dataclass(frozen=True)
class Times:
    """µs of a micro-step that others follow and of the last one; linear in the number of layers. The first neither updates
    parameters nor, if these are whole on every device, sums gradients."""

    micro: float
    last: float

    def extended(self, shallower: Times, more: int) -> Times:
        """With `more` further layers, each adding what this has beyond `shallower`."""
        return Times(
            self.micro + more * (self.micro - shallower.micro),
            self.last + more * (self.last - shallower.last),
        )

    def beside(self, host: Times) -> Times:
        """What both take together: a little more than the longer, since either waits for the other now and then."""
        pairs = ((self.micro, host.micro), (self.last, host.last))
        micro, last = (sum(us**SHARPNESS for us in pair) ** (1 / SHARPNESS) for pair in pairs)
        return Times(micro, last)


@dataclass(frozen=True, kw_only=True)
class Described:
    """A shallow model, planned: the plan and its actions as exported."""

    plan: Plan
    graph: JointGraph
    actions: Actions


@dataclass
class Predictor:
    """Keeps profiles, graphs by structure, times by description, and the plans made last."""

    profiles: dict[tuple[str, str], HardwareProfile] = field(default_factory=dict)
    graphs: dict[object, JointGraph] = field(default_factory=dict)
    planned: dict[object, Described] = field(default_factory=dict)
    simulated: dict[object, tuple[Times, Times]] = field(default_factory=dict)

    def step_us(self, run: Run) -> float:
        """A whole step. Raises Skip if the planner refuses the run."""
        times = self.times(self.settled(run))
        return (run.accumulation - 1) * times.micro + times.last

    def memory(self, run: Run) -> DeepMemory:
        """Peak on one device. Raises Skip if the planner refuses the run."""
        return self._memory(self.settled(run))

    def settled(self, run: Run) -> Run:
        """With checkpoint `auto` all layers are repeated if memory runs out."""
        if run.checkpoint != "auto":
            return run
        kept = replace(run, checkpoint="none")
        fits = self._memory(kept).reserved_bytes <= self.profile(run).usable_bytes
        return kept if fits else replace(run, checkpoint="full")

    def profile(self, run: Run) -> HardwareProfile:
        """Of the machine, with the library that the run's attention is from."""
        key = (run.hardware, run.attention)
        if key not in self.profiles:
            profile = load_profile(run.hardware)
            attention = replace(profile.attention, library=run.attention or profile.attention.library)
            self.profiles[key] = replace(profile, attention=attention)
        return self.profiles[key]

    # ---- time -------------------------------------------------------------------------------------------------------
    def times(self, run: Run, clock: float | None = None, operators: float = EAGER_OPERATORS) -> Times:
        """`clock`: another sustained clock than the profile's; `operators`: per kernel, of eager frameworks."""
        (few, few_host), (more, more_host) = (self._times(run, depth, clock) for depth in DEPTHS)
        missing = run.layers - DEPTHS[1]
        device, host = more.extended(few, missing), more_host.extended(few_host, missing)
        return device if run.compiled else device.beside(Times(operators * host.micro, operators * host.last))

    def _times(self, run: Run, depth: int, clock: float | None) -> tuple[Times, Times]:
        """Of the step as simulated, and of the issuing CPU alone."""
        key = (replace(run, layers=0, accumulation=1), depth, clock)
        if key not in self.simulated:
            self.simulated[key] = self._simulated(run, depth, clock)
        return self.simulated[key]

    def _simulated(self, run: Run, depth: int, clock: float | None) -> tuple[Times, Times]:
        found, profile = self._described(run, depth), self.profile(run)
        actions = as_described(found, run, profile)
        if clock is not None:
            actions = described.slower_products(actions, profile.sustained_clock / clock)
        launch = profile.launch
        if not run.compiled:
            profile = replace(profile, launch=replace(launch, compiled_us=launch.eager_us))
        last = simulate(actions, profile)
        without = described.without_update(actions)
        if not run.shards_parameters:
            without = described.without_gradient_sums(without)
        micro = simulate(without, profile)
        return Times(micro.step_us, last.step_us), Times(micro.issue_us, last.issue_us)

    # ---- memory -----------------------------------------------------------------------------------------------------
    def _memory(self, run: Run) -> DeepMemory:
        few, more = (self._walked(run, depth) for depth in MEMORY_DEPTHS)
        return deep_memory(few, more, run)

    def _walked(self, run: Run, depth: int) -> Walked:
        found, profile = self._described(run, depth), self.profile(run)
        actions = found.actions
        if run.accumulation > 1 or run.has_master:
            actions = described.with_standing_gradients(actions)
        if run.keeps_root:
            actions = described.with_root_gathered(actions, layer_names(found.graph))
        memory = walk(actions, simulate(actions, profile))
        return Walked(actions=actions, memory=memory, elements=found.plan.memory.parameter_bytes / 4, num_layers=depth)

    # ---- plans ------------------------------------------------------------------------------------------------------
    def _described(self, run: Run, depth: int) -> Described:
        key = (
            run.model, run.seq, run.hardware, run.mesh, run.recipes, run.batch, run.checkpoint, run.compiled, run.attention, depth
        )  # fmt: skip
        if key not in self.planned:
            try:
                self.planned[key] = self._planned(run, depth)
            except InfeasibleError as error:
                raise Skip("the recipe does not fit the sizes") from error
            except PlannerError as error:
                raise Skip(f"not planned: {error.message}"[:160]) from error
            if len(self.planned) > MOST_KEPT:
                del self.planned[next(iter(self.planned))]
        return self.planned[key]

    def _planned(self, run: Run, depth: int) -> Described:
        profile = self.profile(run)
        graph = self._graph(run, depth)
        if run.checkpoint != "none":
            keeps = every_other_product(graph) if run.checkpoint == "ops" else None
            graph = checkpointed(graph, layer_names(graph), keeps)
        plan = _solved(graph, run, profile)
        return Described(plan=plan, graph=graph, actions=actions_of(plan, graph, profile, OVERLAPPED))

    def _graph(self, run: Run, depth: int) -> JointGraph:
        sizes, flags = parsed(run.model, run.batch, run.seq)
        request = ModelRequest(model=run.model, batch=run.batch, seq=run.seq, layers=depth)
        return at_sizes(self._traced(traced_sizes(sizes), flags, depth), sizes, request)

    def _traced(self, sizes: Sizes, flags: str, depth: int) -> JointGraph:
        key = (sizes, flags, depth)
        if key not in self.graphs:
            from planner.pipeline import trace

            self.graphs[key] = trace(ModelRequest(model=sizes.model(flags), batch=sizes.batch, seq=sizes.seq, layers=depth))
        return self.graphs[key]


def every_other_product(graph: JointGraph) -> Callable[[Node], bool]:
    """What `selective op` keeps of a layer: attention, and every second product in order of execution. (TorchTitan's name and
    rule, https://github.com/pytorch/torchtitan, activation checkpointing.)"""
    kept: set[str] = set()
    for layer in layer_names(graph):
        products = [n for n in graph.nodes if n.flops > 0 and n.phase == "forward" and f"{n.module}.".startswith(f"{layer}.")]
        plain = [n for n in products if not n.op.startswith(ATTENTION)]
        kept |= {n.key for n in plain[::2]} | {n.key for n in products if n.op.startswith(ATTENTION)}
    return lambda node: node.key in kept


def _solved(graph: JointGraph, run: Run, profile: HardwareProfile) -> Plan:
    from planner.costing.estimate import estimate_costs
    from planner.enumerating.enumerate import enumerate_strategies
    from planner.solving.assemble import assemble
    from planner.solving.solve import Solver
    from planner.workbench import boundaries

    space = enumerate_strategies(graph, run.mesh)
    costs = estimate_costs(space, profile, policy=MemoryPolicy(), gpus_per_node=GPUS_PER_NODE, compiled=run.compiled)
    constraints: tuple[Constraint, ...] = (*boundaries(graph, run.mesh), NO_LIMIT, *run.recipes)
    return assemble(costs, Solver(costs).solve(constraints, exact=False), constraints)


def as_described(found: Described, run: Run, profile: HardwareProfile) -> Actions:
    """The exported step with what the framework of the run does differently."""
    actions = described.narrow_sums(found.actions) if run.narrow_sums else found.actions
    actions = described.bundled(actions, mesh_collectives(profile, run.mesh, GPUS_PER_NODE))
    if run.hides_exchanges:
        actions = described.pipelined(actions)
    if run.zero in (1, 2) and not run.shards_parameters:
        actions = described.split_update(actions, run.data_ranks)
    if run.compiled:
        return actions
    casts = {node.key for node in found.graph.nodes if node.op == CAST_OP}

    def launches(action: Action) -> int:
        """Eager casts of parameters are one kernel per block, which is left out."""
        return 0 if action.name in casts else action.launches

    return described.launched(actions, launches)
