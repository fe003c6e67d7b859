"""Placements in a plan: of a tensor, as text, as bytes of one device's piece."""

from __future__ import annotations

from typing import Any

from planner import JointGraph, Plan, TensorRef


def placements_text(placements: Any) -> str:
    """`S(0)R`; placements are in mesh-axis order."""
    return "".join(map(str, placements)) if placements is not None else ""


def placement_of(plan: Plan, key: str, output: int = 0) -> Any:
    """Placements of an output in the plan. A node without the output asked for answers with its first real one.

    A stored gradient (`grad:NAME`) lies as its parameter does.
    """
    choice = plan.choices.get(f"param:{key[5:]}" if key.startswith("grad:") else key)
    if choice is None:
        return None
    if output < len(choice.outputs) and choice.outputs[output] is not None:
        return choice.outputs[output]
    return next((p for p in (*choice.outputs, *choice.operands) if p is not None), None)


def local_shape(shape: tuple[int, ...], placements: Any, axis_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one device's piece; shards are even."""
    local = list(shape)
    for placement, size in zip(placements or (), axis_sizes, strict=False):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            local[dim] //= size
    return tuple(local)


def local_bytes(plan: Plan, graph: JointGraph, ref: TensorRef) -> int:
    meta = graph.meta(ref)
    total = meta.itemsize
    for size in local_shape(meta.shape, placement_of(plan, graph.nodes[ref.node].key, ref.output), plan.mesh.axis_sizes):
        total *= size
    return total
