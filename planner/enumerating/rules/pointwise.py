"""Pointwise ops that DTensor has no rows for."""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.enumerating.rules.joining import aligned
from planner.placement import P, R, shard_code


@rule(
    "aten.floor_divide.default", "aten.logaddexp.default", "aten.logaddexp2.default", "aten.fmod.Tensor", "aten.heaviside.default"
)
def pointwise(signature: OpSignature) -> list[Row]:
    """Operands broadcast to the output. None of these is linear, so nothing pending passes."""
    out = signature.output
    rows: list[Row] = [(R,) * (1 + len(signature.operands))]
    return rows + [(shard_code(d), *(aligned(meta, out, d) for meta in signature.operands)) for d in range(len(out.shape))]


@rule("planner.dropout.default")
def dropout(signature: OpSignature) -> list[Row]:
    """The mask is known at every element: each device makes its part of it, and dropping is linear in what is dropped."""
    return [(code, code) for code in (R, P, *(shard_code(d) for d in range(len(signature.output.shape))))]
