"""Step time and memory of a training run, by planning it.

The model is traced once per structure and sequence length, at one and at two layers. Each row is planned on those two graphs
at its own batch, mesh and recipe; what the second layer adds is added for every layer more. A stack of equal layers has an
optimal plan that repeats, so this is the plan of the whole model, up to ties (0.2 % on 24 layers).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from planner.accuracy.rescale import PRIME, with_batch
from planner.accuracy.rows import Skip
from planner.accuracy.runs import Run
from planner.checkpointing import checkpointed, layer_names
from planner.constraint import Constraint, MemoryBudget
from planner.costing.collective import MeshCollectives, mesh_collectives
from planner.errors import InfeasibleError, PlannerError
from planner.graph import BACKWARD, FORWARD, VIEW_OPS, JointGraph, ModelRequest, layer_path
from planner.hardware import HardwareProfile, load_profile
from planner.memory import MemoryPolicy
from planner.plan import Plan
from planner.redistribution import CollectiveKind

CAST_OP = "aten._to_copy.default"
ATTENTION, MATMUL = "aten._scaled_dot_product", "planner.einsum"
NO_LIMIT = MemoryBudget(num_bytes=10**15)
GPUS_PER_NODE = 8
DEPTHS = (1, 2)
HIDDEN_SLOWDOWN = 0.19
"""Share by which a transfer that hides behind compute slows that down (arXiv 2507.03114: 1.19 on average)."""


Message = tuple[str, str | None, CollectiveKind, tuple[int, ...], str]
"""Phase, layer, kind, axes, dtype: what goes into one message."""


@dataclass(frozen=True)
class Parts:
    """One micro-step of a plan, in µs, and its bytes; linear in the number of layers.

    Attributes:
        forward, backward: kernels.
        attention, matmul: of the kernels, those.
        exchanged: redistributions of activations: in the way of what follows.
        gathered: parameters gathered before use; in both phases.
        reduced: sums of gradients over devices.
        update: the optimizer.
        launches: kernels of a compiled program; operators: those that eager PyTorch runs one by one; calls: collectives.
        state, kept: bytes of parameters, gradients and optimizer; of saved activations.
    """

    forward: float = 0.0
    backward: float = 0.0
    attention: float = 0.0
    matmul: float = 0.0
    exchanged: float = 0.0
    gathered: float = 0.0
    reduced: float = 0.0
    update: float = 0.0
    launches: float = 0.0
    operators: float = 0.0
    calls: float = 0.0
    state: float = 0.0
    kept: float = 0.0

    def extended(self, shallower: Parts, more: int) -> Parts:
        """With `more` further layers, each adding what this has beyond `shallower`."""
        names = self.__dataclass_fields__
        return Parts(*(getattr(self, n) + more * (getattr(self, n) - getattr(shallower, n)) for n in names))


@dataclass(frozen=True)
class Predicted:
    """Of a whole step; `parts` are those of one micro-step."""

    step_us: float
    memory_bytes: float
    parts: Parts


@dataclass
class Predictor:
    """Keeps graphs by structure, so that many rows of one model are traced once."""

    graphs: dict[tuple[str, int, int], JointGraph] = field(default_factory=dict)
    parts: dict[object, Parts] = field(default_factory=dict)

    def predict(self, run: Run) -> Predicted:
        """With checkpoint `auto` all layers are repeated if memory runs out. Raises Skip if the planner refuses the run."""
        if run.checkpoint == "auto":
            kept = self.predict(replace(run, checkpoint="none"))
            fits = kept.memory_bytes <= load_profile(run.hardware).usable_bytes
            return kept if fits else self.predict(replace(run, checkpoint="full"))
        profile = load_profile(run.hardware)
        if run.attention:
            profile = replace(profile, attention=replace(profile.attention, library=run.attention))
        try:
            few, more = (self._parts(run, profile, depth) for depth in DEPTHS)
        except PlannerError as error:
            raise Skip(f"not planned: {error.message}"[:160]) from error
        parts = more.extended(few, run.layers - DEPTHS[1])
        state = parts.state
        data = run.mesh.num_devices // max(1, _size(run, "tp"))
        if run.zero in (1, 2) and _size(run, "fsdp") == 1:
            state = state * (8 + 8 / data) / 16
            parts = Parts(**{**vars(parts), "update": parts.update / data})
        return Predicted(step_us(parts, run, profile), state + parts.kept + profile.reserve_bytes, parts)

    def _parts(self, run: Run, profile: HardwareProfile, depth: int) -> Parts:
        key = (
            run.model,
            run.seq,
            run.hardware,
            run.mesh,
            run.recipes,
            run.batch,
            run.checkpoint,
            run.compiled,
            run.attention,
            depth,
        )
        if key not in self.parts:
            graph = with_batch(self._graph(run.model, run.seq, depth), run.batch)
            if run.checkpoint == "full":
                graph = checkpointed(graph, layer_names(graph))
            collectives = mesh_collectives(profile, run.mesh, GPUS_PER_NODE)
            self.parts[key] = parts_of(_planned(graph, run, profile), graph, collectives)
        return self.parts[key]

    def _graph(self, model: str, seq: int, depth: int) -> JointGraph:
        key = (model, seq, depth)
        if key not in self.graphs:
            from planner.pipeline import trace

            self.graphs[key] = trace(ModelRequest(model=model, batch=PRIME, seq=seq, layers=depth))
        return self.graphs[key]


def _size(run: Run, axis: str) -> int:
    return run.mesh.axis_sizes[run.mesh.axis_names.index(axis)] if axis in run.mesh.axis_names else 1


def _planned(graph: JointGraph, run: Run, profile: HardwareProfile) -> Plan:
    from planner.costing.estimate import estimate_costs
    from planner.enumerating.enumerate import enumerate_strategies
    from planner.solving.assemble import assemble
    from planner.solving.solve import Solver
    from planner.workbench import boundaries

    space = enumerate_strategies(graph, run.mesh)
    costs = estimate_costs(space, profile, policy=MemoryPolicy(), gpus_per_node=GPUS_PER_NODE, compiled=run.compiled)
    constraints: tuple[Constraint, ...] = (*boundaries(graph, run.mesh), NO_LIMIT, *run.recipes)
    try:
        return assemble(costs, Solver(costs).solve(constraints, exact=False), constraints)
    except InfeasibleError as error:
        raise Skip("the recipe does not fit the sizes") from error


def parts_of(plan: Plan, graph: JointGraph, collectives: MeshCollectives) -> Parts:
    """Sorts what a plan pays for. Parameters of one layer are gathered in one message, and so are its gradients summed, as
    frameworks do."""
    node_of = graph.node_by_key
    parameters = _of_parameters_alone(graph)
    gradients = _on_the_way_to_gradients(graph)
    compute = {FORWARD: 0.0, BACKWARD: 0.0}
    of_op = {ATTENTION: 0.0, MATMUL: 0.0}
    update = launches = operators = 0.0
    for key, choice in plan.choices.items():
        node = graph.nodes[node_of[key]]
        if node.kind == "param":
            update += choice.compute_us
        else:
            compute[node.phase] += choice.compute_us
            for prefix in of_op:
                of_op[prefix] += choice.compute_us if node.op.startswith(prefix) else 0.0
            launches += choice.compute_us > 1.5
            operators += node.is_op and node.op not in VIEW_OPS and node.op != CAST_OP
    exchanged = calls = 0.0
    messages: dict[str, dict[Message, float]] = {"gathered": {}, "reduced": {}}
    for redistribution in plan.redistributions:
        number = node_of[redistribution.tensor[0]]
        kind = "gathered" if number in parameters else "reduced" if number in gradients else ""
        for step in redistribution.steps:
            if not kind or step.collective is None:
                exchanged += step.us
                operators += 1
                launches += 1
                calls += step.collective is not None
                continue
            call = step.collective
            message = (redistribution.phase, layer_path(graph.nodes[number].module), call.kind, call.axes, call.dtype)
            messages[kind][message] = messages[kind].get(message, 0.0) + call.full_bytes
    moved = {
        kind: sum(
            float(collectives.us(collective, axes, np.array([size]), dtype)[0])
            for (_, _, collective, axes, dtype), size in found.items()
        )
        for kind, found in messages.items()
    }
    memory = plan.memory
    return Parts(
        forward=compute[FORWARD],
        backward=compute[BACKWARD],
        attention=of_op[ATTENTION],
        matmul=of_op[MATMUL],
        update=update,
        launches=launches,
        operators=operators,
        state=memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes,
        kept=memory.activation_bytes,
        exchanged=exchanged,
        calls=calls + sum(map(len, messages.values())),
        **moved,
    )


def step_us(parts: Parts, run: Run, profile: HardwareProfile) -> float:
    """Micro-steps one after the other, the update at the end.

    Transfers of parameters and gradients run beside kernels as long as these last and slow them down; gradients of replicated
    parameters are summed once, with the last micro-step. The host must have started every kernel; some stretches of a step wait
    for the host and others for the device, so the two make a smooth maximum.
    """
    compute = parts.forward + parts.backward
    once = _size(run, "fsdp") == 1
    beside, between = (parts.exchanged, 0.0) if run.hides_exchanges else (0.0, parts.exchanged)
    every = compute + between + _beside(beside + parts.gathered + (0.0 if once else parts.reduced), compute)
    last = compute + between + _beside(beside + parts.gathered + parts.reduced, compute)
    launch = profile.launch
    host = parts.launches * launch.compiled_us if run.compiled else parts.operators * launch.eager_us
    host += parts.calls * launch.collective_us
    return _slower(every, host) * (run.accumulation - 1) + _slower(last, host) + parts.update


def _slower(device: float, host: float) -> float:
    return (device**3 + host**3) ** (1 / 3)


def _beside(transfer: float, compute: float) -> float:
    """What a transfer adds to compute that it can hide behind."""
    hidden = min(transfer, compute)
    return transfer - hidden + HIDDEN_SLOWDOWN * hidden


def _of_parameters_alone(graph: JointGraph) -> set[int]:
    found: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if node.kind == "param" or (node.is_op and node.operands and all(ref.node in found for ref in node.operands)):
            found.add(index)
    return found


def _on_the_way_to_gradients(graph: JointGraph) -> set[int]:
    """Gradients of parameters, and what they are casts or views of."""
    found: set[int] = set()
    for parameter in graph.parameters:
        ref = parameter.gradient
        while ref is not None:
            found.add(ref.node)
            node = graph.nodes[ref.node]
            ref = node.operands[0] if node.op in VIEW_OPS or node.op == CAST_OP else None
    return found
