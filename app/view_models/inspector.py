"""What the inspector says about one box: its tensors, where they come from, and which redistributions it pays for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.view_models.graph_messages import step_text
from app.view_models.placements import local_shape, placement_of, placements_text
from planner import JointGraph, Plan, TensorRef

KIND_NAMES = {
    "param": "parameter", "buffer": "buffer", "input": "input", "tangent": "gradient of the loss", "output": "output", "op": "op",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """An operand or output.

    Attributes:
        name: producer (`wq.weight`, `norm/mul`) or `output 0`.
        key: box to show when clicked, "" for the box itself.
        shape, local: global text (`bfloat16[64,4096]`) and one device's shape (`8,4096`).
        placement: what is read or made; `source` what the producer made if that differs.
        steps: the redistribution in words, one entry a step.
        us: what the redistribution costs; 0 if another consumer of the same result is named as paying.
    """

    name: str
    key: str
    shape: str
    local: str
    placement: str
    source: str = ""
    steps: tuple[str, ...] = ()
    us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Inspection:
    key: str
    title: str
    phase: str
    source: str
    op: str
    compute_us: float
    operands: tuple[TensorRow, ...]
    outputs: tuple[TensorRow, ...]


def inspect(graph: JointGraph, plan: Plan, key: str) -> Inspection | None:
    """None if the graph has no such box."""
    if key.startswith("grad:"):
        return _inspect_gradient(graph, plan, key)
    index = graph.node_by_key.get(key)
    if index is None:
        return None
    node = graph.nodes[index]
    choice = plan.choices.get(key)
    return Inspection(
        key=key, title=node.name if node.is_op else key.partition(":")[2],
        phase=node.phase if node.is_op else KIND_NAMES[node.kind], source=node.source, op=node.op if node.is_op else "",
        compute_us=choice.compute_us if choice else 0.0,
        operands=tuple(_operand(graph, plan, key, slot, ref) for slot, ref in enumerate(node.operands)),
        outputs=tuple(
            _row(plan, f"output {number}" if len(node.outputs) > 1 else "output", "", meta, placement_of(plan, key, number))
            for number, meta in enumerate(node.outputs) if meta is not None
        ),
    )  # fmt: skip


def _inspect_gradient(graph: JointGraph, plan: Plan, key: str) -> Inspection | None:
    parameter = graph.parameter_by_name.get(key[5:])
    if parameter is None or parameter.gradient is None:
        return None
    node = graph.nodes[parameter.node]
    row = _operand(graph, plan, node.key, -1, parameter.gradient)
    meta = graph.meta(TensorRef(parameter.node, 0))
    return Inspection(
        key=key, title=f"gradient of {parameter.name}", phase="stored as the parameter is", source=node.source, op="",
        compute_us=0.0, operands=(row,), outputs=(_row(plan, "gradient", "", meta, placement_of(plan, node.key)),),
    )  # fmt: skip


def short_name(graph: JointGraph, index: int) -> str:
    """`wq/linear`, `wq.weight`: enough to recognise a producer."""
    node = graph.nodes[index]
    if not node.is_op:
        return ".".join(node.key.partition(":")[2].split(".")[-2:])
    module = node.module.rpartition(".")[2]
    return f"{module}/{node.name}" if module else node.name


def _operand(graph: JointGraph, plan: Plan, consumer: str, slot: int, ref: TensorRef) -> TensorRow:
    producer = graph.nodes[ref.node]
    made = placement_of(plan, producer.key, ref.output)
    steps, us, target = _redistributions(plan, consumer, slot)
    choice = plan.choices.get(consumer)
    if choice is not None and choice.kept:
        steps = ("not read: the result is kept from forward",)
    read = target
    if read is None and choice is not None and 0 <= slot < len(choice.operands):
        read = choice.operands[slot]
    row = _row(plan, short_name(graph, ref.node), producer.key, graph.meta(ref), read if read is not None else made)
    source = placements_text(made)
    return TensorRow(
        name=row.name, key=row.key, shape=row.shape, local=row.local, placement=row.placement,
        source=source if source != row.placement else "", steps=steps, us=us,
    )  # fmt: skip


def _redistributions(plan: Plan, consumer: str, slot: int) -> tuple[tuple[str, ...], float, Any]:
    """Steps in words, µs, and the placement they end in (None without any) for one use."""
    steps: list[str] = []
    us, target = 0.0, None
    uses = [r for r in plan.redistributions if (consumer, slot) in r.consumers]
    for r in sorted(uses, key=lambda r: not r.shared):  # the others start from the shared one
        shared = f" (shared by {len(r.consumers)})" if len(r.consumers) > 1 else ""
        steps += [step_text(plan, step) + shared for step in r.steps]
        us += r.us
        target = r.target
    return tuple(steps), us, target


def _row(plan: Plan, name: str, key: str, meta: Any, placements: Any) -> TensorRow:
    local = local_shape(meta.shape, placements, plan.mesh.axis_sizes)
    return TensorRow(name=name, key=key, shape=str(meta), local=",".join(map(str, local)), placement=placements_text(placements))
