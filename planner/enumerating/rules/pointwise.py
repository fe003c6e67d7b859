"""Pointwise ops that DTensor has no rows for. None of them is linear, so nothing pending passes."""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.enumerating.rules.joining import aligned
from planner.placement import R, shard_code


@rule(
    "aten.floor_divide.default", "aten.logaddexp.default", "aten.logaddexp2.default", "aten.fmod.Tensor", "aten.heaviside.default"
)
def pointwise(signature: OpSignature) -> list[Row]:
    """Operands broadcast to the output."""
    out = signature.output
    rows: list[Row] = [(R,) * (1 + len(signature.operands))]
    return rows + [(shard_code(d), *(aligned(meta, out, d) for meta in signature.operands)) for d in range(len(out.shape))]
