"""Ops that make a tensor from nothing: every shard can be made in place, no operand is read."""

from __future__ import annotations

from planner.enumerating.registry import FACTORY_OPS, OpSignature, Row, rule
from planner.placement import P, R, shard_code

ZERO_OPS = frozenset({"aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default"})


@rule(*sorted(FACTORY_OPS))
def factory(signature: OpSignature) -> list[Row]:
    """Zeros are also a pending sum of zeros: what is added into them may stay pending."""
    pending: list[Row] = [(P,)] if signature.op in ZERO_OPS else []
    return [(R,), *pending, *((shard_code(dim),) for dim in range(len(signature.output.shape)))]
