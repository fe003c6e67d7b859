"""Products of tokens with the weights of the experts they were sent to. Experts split: each device does its own experts' rows,
with zeros (or nothing) for the others."""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.placement import P, R, shard_code

_0, _1, _2 = shard_code(0), shard_code(1), shard_code(2)


@rule("planner.expert_product.default")
def expert_product(signature: OpSignature) -> list[Row]:
    """x [t, c, k], weight [e, n, k] (or [e, k, n]), index [t, c] -> [t, c, n]. Linear in x and in weight."""
    n, k = (_2, _1) if signature.args[3] else (_1, _2)
    return [
        (R, R, R, R), (P, P, R, R), (P, R, P, R), (_0, _0, R, _0), (_1, _1, R, _1), (_2, R, n, R), (P, _2, k, R), (P, R, _0, R),
    ]  # fmt: skip


@rule("planner.expert_weight_grad.default")
def expert_weight_grad(signature: OpSignature) -> list[Row]:
    """a [t, c, n], b [t, c, k], index [t, c] -> [e, n, k]. Linear in a and in b."""
    return [
        (R, R, R, R), (P, P, R, R), (P, R, P, R), (P, _0, _0, _0), (P, _1, _1, _1), (_1, _2, R, R), (_2, R, _2, R), (_0, R, R, R),
    ]  # fmt: skip
