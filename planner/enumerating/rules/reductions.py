"""Reductions whose DTensor rows are unsuitable."""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.placement import P, R, shard_code


@rule("aten.mean.dim", "aten.mean.default")
def mean(signature: OpSignature) -> list[Row]:
    """DTensor gives P(avg) over a sharded dim. Here it is P(sum): the exporter scales the local mean by local / global size."""
    rank = len(signature.operands[0].shape)
    named = signature.arg(1) if signature.op == "aten.mean.dim" else None
    dims = {d % rank for d in named} if named else set(range(rank))
    keep = bool(signature.arg(2, False))
    rows: list[Row] = [(R, R), (P, P)]
    for d in range(rank):
        out = d if keep else d - sum(e < d for e in dims)
        rows.append((P if d in dims else shard_code(out), shard_code(d)))
    return rows
