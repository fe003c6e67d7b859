"""What a device holds: whether it fits, which tensors, for how long. Counted as the planner's memory budget counts it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from app.view_models.placements import local_bytes, local_shape, placement_of, placements_text
from app.view_models.status import GIB, Quantity, budget_bytes
from planner import JointGraph, Plan, PlannerError, TensorRef, hardware_profile, layer_of, without_layer
from planner.graph import TensorMeta

COUNTED = "parameters, gradients, optimizer state, and activations and gathered parameters kept for backward"
NOT_COUNTED = (
    "temporaries inside an op, parameters gathered for the moment, the layer that runs again under checkpointing, buffers, "
    "and the allocator's slack"
)
KEPT = "kept parameters"
CATEGORIES = ("parameters", "gradients", "optimizer state", "saved activations", KEPT)
WHOLE_STEP = "whole step"


@dataclass(frozen=True, kw_only=True)
class Held:
    """One tensor that a device holds.

    Attributes:
        category: one of CATEGORIES.
        key: the box that holds it; `name` for the reader; `output` its number.
        shape, local, placements: global text, one device's shape, and where it lies.
        born, dies: numbers of the first and last node of the graph that need it, None for the whole step.
        born_key, dies_key: those nodes.
    """

    category: str
    key: str
    name: str
    output: int
    module: str
    shape: str
    local: str
    placements: str
    num_bytes: int
    born: int | None = None
    dies: int | None = None
    born_key: str = WHOLE_STEP
    dies_key: str = WHOLE_STEP


@dataclass(frozen=True, kw_only=True)
class HeldGroup:
    """The same tensor in one or more layers; `first` is the one to show."""

    name: str
    count: int
    num_bytes: int
    first: Held


def held(graph: JointGraph, plan: Plan) -> tuple[Held, ...]:
    """Everything that counts, largest first. `graph` is that of the plan."""
    rows: list[Held] = []
    copies = plan.memory_policy.optimizer_bytes_per_element
    for parameter in graph.parameters:
        ref = TensorRef(parameter.node, 0)
        own = _held(graph, plan, ref, "parameters", graph.nodes[ref.node].key, parameter.name)
        rows.append(own)
        if parameter.gradient is not None:
            rows.append(_like(own, "gradients", f"grad:{parameter.name}", own.num_bytes))
            state = own.num_bytes // graph.meta(ref).itemsize * copies
            if state:
                rows.append(_like(own, "optimizer state", own.key, state))
    rows += _saved(graph, plan)
    rows += _kept(graph, plan)
    return tuple(sorted(rows, key=lambda row: (-row.num_bytes, row.key, row.category)))


def _held(graph: JointGraph, plan: Plan, ref: TensorRef, category: str, key: str, name: str) -> Held:
    node, meta = graph.nodes[ref.node], graph.meta(ref)
    placements = placement_of(plan, node.key, ref.output)
    local = local_shape(meta.shape, placements, plan.mesh.axis_sizes)
    return Held(
        category=category, key=key, name=name, output=ref.output, module=node.module or name.rpartition(".")[0], shape=str(meta),
        local=f"[{','.join(map(str, local))}]", placements=placements_text(placements), num_bytes=local_bytes(plan, graph, ref),
    )  # fmt: skip


def _like(own: Held, category: str, key: str, num_bytes: int) -> Held:
    return Held(**{**own.__dict__, "category": category, "key": key, "num_bytes": num_bytes})


def _saved(graph: JointGraph, plan: Plan) -> list[Held]:
    """Tensors of `JointGraph.saved_for_backward`: from the op that made the storage to the last reader of any view of it."""
    last: dict[TensorRef, int] = {}
    for index, node in enumerate(graph.nodes):
        for ref in node.operands:
            last[graph.storage_root(ref)] = index
    rows = []
    for ref in graph.saved_for_backward:
        root = graph.storage_root(ref)
        own = _held(graph, plan, ref, "saved activations", graph.nodes[ref.node].key, graph.nodes[ref.node].key)
        born, dies = root.node, last[root]
        life = {"born": born, "dies": dies, "born_key": graph.nodes[born].key, "dies_key": graph.nodes[dies].key}
        rows.append(Held(**{**own.__dict__, **life}))
    return rows


def _kept(graph: JointGraph, plan: Plan) -> list[Held]:
    """Parameters as the forward pass reads them, kept for backward: from there to their last reader."""
    rows = []
    for node, ref in graph.kept_from.items():
        key = graph.nodes[node].key
        if plan.choices[key].kept:
            own = _held(graph, plan, TensorRef(node, 0), KEPT, key, graph.nodes[ref.node].key)
            dies = max((user for user, _ in graph.users.get(TensorRef(node, 0), ())), default=node)
            life = {"born": ref.node, "dies": dies, "born_key": graph.nodes[ref.node].key, "dies_key": graph.nodes[dies].key}
            rows.append(Held(**{**own.__dict__, **life}))
    return rows


def total(rows: Iterable[Held], category: str) -> int:
    return sum(row.num_bytes for row in rows if row.category == category)


def grouped(rows: Iterable[Held]) -> tuple[HeldGroup, ...]:
    """The same tensor of all layers together, largest sum first."""
    groups: dict[tuple[str, ...], list[Held]] = {}
    for row in rows:
        key = (without_layer(row.name), row.category, row.placements, row.local)
        groups.setdefault(key, []).append(row)
    found = [
        HeldGroup(name=key[0], count=len(group), num_bytes=sum(row.num_bytes for row in group), first=group[0])
        for key, group in groups.items()
    ]
    return tuple(sorted(found, key=lambda group: (-group.num_bytes, group.name)))


def alone(row: Held) -> HeldGroup:
    return HeldGroup(name=row.name, count=1, num_bytes=row.num_bytes, first=row)


def tensor_of(graph: JointGraph, key: str, output: int) -> TensorMeta | None:
    """What the tensor of a box is; of a node without that output its first one. None if there is none."""
    index = graph.node_by_key.get(f"param:{key[5:]}" if key.startswith("grad:") else key)
    if index is None:
        return None
    node = graph.nodes[index]
    if output < len(node.outputs) and node.outputs[output] is not None:
        return node.outputs[output]
    return next((meta for meta in node.outputs if meta is not None), None)


def saved_by(rows: Iterable[Held], by: str, most: int = 14) -> dict[str, int]:
    """Bytes of saved activations per layer in order, or per module (without the layer's number), largest first."""
    found: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for row in rows:
        if row.category == "saved activations":
            layer = layer_of(row.module)
            outside = "outside layers" if by == "layer" else "top level"
            name = (f"layer {layer}" if layer is not None else outside) if by == "layer" else without_layer(row.module) or outside
            found[name] = found.get(name, 0) + row.num_bytes
            numbers[name] = -1 if layer is None else layer
    if by == "layer":
        return dict(sorted(found.items(), key=lambda item: numbers[item[0]]))
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    if len(ranked) > most + 1:
        ranked = [*ranked[:most], (f"{len(ranked) - most} other modules", sum(size for _, size in ranked[most:]))]
    return dict(ranked)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Bytes of saved activations and kept parameters that are alive after each node at which that changes.

    Attributes:
        nodes: numbers in the order of the graph, ascending; num_bytes: alive from there on; keys: of the nodes.
        backward: number of the first node of the backward pass.
        constant_bytes: parameters, gradients and optimizer state, counted for the whole step.
        peak_node: where most is alive.
    """

    nodes: tuple[int, ...]
    num_bytes: tuple[int, ...]
    keys: tuple[str, ...]
    backward: int
    last: int
    constant_bytes: int
    peak_node: int

    @property
    def peak_bytes(self) -> int:
        return self.constant_bytes + max(self.num_bytes)


def live(graph: JointGraph, rows: Iterable[Held]) -> Curve:
    change: dict[int, int] = {0: 0}
    constant = 0
    for row in rows:
        if row.born is None or row.dies is None:
            constant += row.num_bytes
        else:
            change[row.born] = change.get(row.born, 0) + row.num_bytes
            change[row.dies + 1] = change.get(row.dies + 1, 0) - row.num_bytes
    alive, sizes = 0, []
    nodes = tuple(sorted(change))
    for node in nodes:
        alive += change[node]
        sizes.append(alive)
    last = len(graph.nodes) - 1
    backward = next((i for i, node in enumerate(graph.nodes) if node.phase == "backward"), last)
    return Curve(
        nodes=nodes, num_bytes=tuple(sizes), keys=tuple(graph.nodes[min(node, last)].key for node in nodes), backward=backward,
        last=last, constant_bytes=constant, peak_node=nodes[max(range(len(nodes)), key=sizes.__getitem__)],
    )  # fmt: skip


def categories(plan: Plan) -> tuple[tuple[str, int], ...]:
    memory = plan.memory
    sizes = (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes, memory.activation_bytes)
    kept = ((KEPT, memory.kept_parameter_bytes),) if memory.kept_parameter_bytes else ()
    return (*zip(CATEGORIES, sizes, strict=False), *kept)


def quantities(plan: Plan) -> tuple[Quantity, ...]:
    """Peak, its parts, the budget and what the device has."""
    how = "counted from the plan, one device, shards are even"
    sources = {
        "parameters": f"{how}: each parameter in its placement",
        "gradients": f"{how}: in dtype and placement of the parameter",
        "optimizer state": f"{how}: {plan.memory_policy.optimizer}, "
        f"{plan.memory_policy.optimizer_bytes_per_element} bytes per parameter element",
        "saved activations": f"{how}: what forward keeps for backward, once per storage, as produced"
        + (f"; {plan.checkpointed_text}" if plan.checkpointed else ""),
        KEPT: f"{how}: {plan.kept_text}",
    }
    parts = [_gib(name, size, sources[name]) for name, size in categories(plan)]
    peak = _gib("peak memory", plan.memory.peak_bytes, f"sum of {COUNTED}. Not counted: {NOT_COUNTED}")
    budget = budget_bytes(plan)
    asked = [] if budget is None else [_gib("budget", budget, "limit of this plan: bounds the peak memory")]
    return (*parts, peak, *asked, *([] if device_problem(plan) else _device(plan)))


def _device(plan: Plan) -> list[Quantity]:
    profile = hardware_profile(plan.hardware_name)
    constants = [("usable memory of the device", "memory.usable_bytes"), ("reserve of it", "memory.reserve_bytes")]
    sizes = (profile.usable_bytes, profile.reserve_bytes)
    return [
        _gib(name, size, f"hardware profile {plan.hardware_name}: {profile.constants[key].kind}, {profile.constants[key].source}")
        for (name, key), size in zip(constants, sizes, strict=True)
    ]


def _gib(name: str, num_bytes: int, source: str) -> Quantity:
    if num_bytes < 0.1 * GIB:
        return Quantity(label=name, value=num_bytes / 2**20, unit="MiB", digits=1, source=source)
    return Quantity(label=name, value=num_bytes / GIB, unit="GiB", digits=2, source=source)


# ---- checkpointing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointOption:
    """Checkpointing `count` of `layers` layers, everything else as it lies in the plan.

    Attributes:
        activation_bytes, peak_bytes: what would be counted then.
        extra_us: local kernels that would run again; their communication comes on top.
    """

    count: int
    layers: int
    activation_bytes: int
    peak_bytes: int
    extra_us: float
    fits: bool | None

    @property
    def policy(self) -> str:
        return "none" if self.count == 0 else f"full:{self.count}"


def checkpoint_options(traced: JointGraph, plan: Plan) -> tuple[CheckpointOption, ...]:
    """None, quarters and all of the layers that are worth checkpointing. `traced` is the model's graph without checkpointing."""
    from planner.checkpointing import checkpoint_order, checkpointed, first_layers

    order = checkpoint_order(traced)
    rest = plan.memory.peak_bytes - plan.memory.activation_bytes
    budget = budget_bytes(plan)
    found = []
    for count in sorted({math.ceil(len(order) * share / 4) for share in range(5)}):
        graph = checkpointed(traced, first_layers(traced, order, count))
        kept = sum(local_bytes(plan, graph, ref) for ref in graph.saved_for_backward)
        again = sum(_forward_us(plan, node.key) for node in graph.nodes if graph.repeated_layer(node) is not None)
        fits = None if budget is None else rest + kept <= budget
        found.append(
            CheckpointOption(
                count=count, layers=len(order), activation_bytes=kept, peak_bytes=rest + kept, extra_us=again, fits=fits
            )
        )
    return tuple(found)


def _forward_us(plan: Plan, key: str) -> float:
    """Time of the forward op that a repeated one is named after (`.../recompute#0` after `.../fwd#0`)."""
    choice = plan.choices.get(key) or plan.choices.get(key.replace("/recompute#", "/fwd#"))
    return choice.compute_us if choice is not None else 0.0


def usable_bytes(plan: Plan) -> int | None:
    """Memory of the device that a program can have; None if the profile is not known here."""
    return None if device_problem(plan) else hardware_profile(plan.hardware_name).usable_bytes


def device_problem(plan: Plan) -> str:
    """Why nothing is said of the device, "" if the profile is known."""
    try:
        hardware_profile(plan.hardware_name)
    except PlannerError as error:
        return error.message
    return ""
