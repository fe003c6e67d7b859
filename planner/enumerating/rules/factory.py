"""Ops that make a tensor from nothing: every shard can be made in place, no operand is read."""

from __future__ import annotations

from planner.enumerating.registry import FACTORY_OPS, OpSignature, Row, rule
from planner.placement import R, shard_code


@rule(*sorted(FACTORY_OPS))
def factory(signature: OpSignature) -> list[Row]:
    return [(R,), *((shard_code(dim),) for dim in range(len(signature.output.shape)))]
