"""Joining and choosing: the joined dim is never local; a sum passes only if it is pending in all parts."""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.graph import TensorMeta
from planner.placement import P, R, shard_code


@rule("aten.cat.default")
def cat(signature: OpSignature) -> list[Row]:
    rank = len(signature.output.shape)
    dim = signature.arg(1, 0) % rank
    ports = 1 + len(signature.operands)
    return [(code,) * ports for code in (R, P, *(shard_code(d) for d in range(rank) if d != dim))]


@rule("aten.stack.default")
def stack(signature: OpSignature) -> list[Row]:
    """The new dim is whole; dims at or behind it are one further in the output."""
    rank = len(signature.output.shape)
    dim = signature.arg(1, 0) % rank
    parts = len(signature.operands)
    rows: list[Row] = [(code,) * (1 + parts) for code in (R, P)]
    return rows + [(shard_code(d + (d >= dim)), *(shard_code(d),) * parts) for d in range(rank - 1)]


@rule("aten.slice_scatter.default")
def slice_scatter(signature: OpSignature) -> list[Row]:
    rank = len(signature.output.shape)
    dim = signature.arg(2, 0) % rank
    return [(code,) * 3 for code in (R, P, *(shard_code(d) for d in range(rank) if d != dim))]


@rule("aten.clone.default")
def clone(signature: OpSignature) -> list[Row]:
    """DTensor's rows for clone leave out P."""
    return [(code, code) for code in (R, P, *(shard_code(d) for d in range(len(signature.output.shape))))]


@rule("aten.where.self")
def where(signature: OpSignature) -> list[Row]:
    """condition, x, y with broadcasting. P only if both branches are P."""
    out = signature.output
    rows: list[Row] = [(R, R, R, R), (P, R, P, P)]
    return rows + [(shard_code(d), *(aligned(meta, out, d) for meta in signature.operands)) for d in range(len(out.shape))]


def aligned(meta: TensorMeta, out: TensorMeta, dim: int) -> int:
    """The code of an operand that broadcasts to `out`, when `out` is sharded on `dim`."""
    own = dim - len(out.shape) + len(meta.shape)
    return shard_code(own) if own >= 0 and meta.shape[own] == out.shape[dim] else R
