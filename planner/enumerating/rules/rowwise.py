"""Ops that work along given dims, one row at a time: those dims are whole, every other dim may be split.

DTensor's rows for some of these take a negative dim for none, and split the dim that the op works along.
"""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.placement import P, R, shard_code


def _rows(signature: OpSignature, along: set[int], *, linear: bool) -> list[Row]:
    """All outputs have the shape of the operand, but for the length along the dims."""
    ports = len(signature.outputs) + 1
    rank = len(signature.operands[0].shape)
    codes = [R, *([P] if linear else []), *(shard_code(d) for d in range(rank) if d not in along)]
    return [(code,) * ports for code in codes]


def _dim(signature: OpSignature, position: int, default: int = -1) -> int:
    named = dict(signature.kwargs).get("dim")
    dim = signature.arg(position, default) if named is None else named
    return int(dim) % max(1, len(signature.operands[0].shape))


@rule("aten.cumsum.default")
def cumsum(signature: OpSignature) -> list[Row]:
    return _rows(signature, {_dim(signature, 1)}, linear=True)


@rule("aten.cumprod.default", "aten.logcumsumexp.default", "aten.sort.default", "aten.cummax.default", "aten.cummin.default")
def cumulative(signature: OpSignature) -> list[Row]:
    return _rows(signature, {_dim(signature, 1)}, linear=False)


@rule("aten.topk.default")
def topk(signature: OpSignature) -> list[Row]:
    return _rows(signature, {_dim(signature, 2)}, linear=False)


@rule("aten.sort.stable")
def sort_stable(signature: OpSignature) -> list[Row]:
    return _rows(signature, {_dim(signature, 9)}, linear=False)


@rule("aten.flip.default")
def flip(signature: OpSignature) -> list[Row]:
    rank = len(signature.operands[0].shape)
    return _rows(signature, {d % rank for d in signature.args[1]}, linear=True)


@rule("aten.roll.default")
def roll(signature: OpSignature) -> list[Row]:
    """Without dims the flattened tensor is rolled."""
    rank = len(signature.operands[0].shape)
    dims = signature.arg(2) or tuple(range(rank))
    return _rows(signature, {d % rank for d in dims}, linear=True)


@rule("aten.unfold.default")
def unfold(signature: OpSignature) -> list[Row]:
    """[..., length, ...] -> [..., windows, ..., size]"""
    return _rows(signature, {_dim(signature, 1)}, linear=True)


@rule("aten.constant_pad_nd.default")
def pad(signature: OpSignature) -> list[Row]:
    """Pairs of widths from the last dim on. Linear if the padding is zeros."""
    rank = len(signature.operands[0].shape)
    widths = signature.args[1]
    padded = {rank - 1 - number // 2 for number, width in enumerate(widths) if width}
    return _rows(signature, padded, linear=not signature.arg(2, 0))


@rule("aten.diagonal.default")
def diagonal(signature: OpSignature) -> list[Row]:
    """The two dims are replaced by one at the end."""
    rank = len(signature.operands[0].shape)
    taken = {signature.arg(2, 0) % rank, signature.arg(3, 1) % rank}
    kept = [d for d in range(rank) if d not in taken]
    return [(R, R), (P, P), *((shard_code(out), shard_code(d)) for out, d in enumerate(kept))]
