"""Pooling over windows of the trailing dims: batch and channels are independent, windows are never cut."""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.placement import P, R, shard_code

_WINDOW_DIMS = 2


def _rows(signature: OpSignature, *, linear: bool) -> list[Row]:
    """All operands and outputs have the same leading dims."""
    ports = len(signature.outputs) + len(signature.operands)
    leading = range(len(signature.operands[0].shape) - _WINDOW_DIMS)
    return [(R,) * ports, *([(P,) * ports] if linear else []), *((shard_code(d),) * ports for d in leading)]


@rule("aten.avg_pool2d.default", "aten._adaptive_avg_pool2d.default")
def average(signature: OpSignature) -> list[Row]:
    return _rows(signature, linear=True)


@rule("aten.avg_pool2d_backward.default", "aten._adaptive_avg_pool2d_backward.default")
def average_backward(signature: OpSignature) -> list[Row]:
    """Only the shape of the second operand is read."""
    return [*_rows(signature, linear=False), (P, P, R)]


@rule("aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default")
def largest(signature: OpSignature) -> list[Row]:
    return _rows(signature, linear=False)
