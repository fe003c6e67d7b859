"""Look-ups by index. A sharded table is looked up with a mask: foreign ids give zeros, so the result is a pending sum."""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.placement import P, R, shard_code


@rule("aten.embedding.default")
def embedding(signature: OpSignature) -> list[Row]:
    """weight [V, D], index [*I] -> [*I, D]. V sharded: masked look-up, P."""
    rank = len(signature.operands[1].shape)
    rows: list[Row] = [(R, R, R), (P, shard_code(0), R), (shard_code(rank), shard_code(1), R), (P, P, R)]
    return rows + [(shard_code(d), R, shard_code(d)) for d in range(rank)]


@rule("aten.embedding_dense_backward.default")
def embedding_backward(signature: OpSignature) -> list[Row]:
    """grad [*I, D], index [*I] -> [V, D]. V sharded: rows of foreign ids are masked away, nothing is sent."""
    rank = len(signature.operands[1].shape)
    rows: list[Row] = [(R, R, R), (shard_code(0), R, R), (shard_code(1), shard_code(rank), R), (P, P, R)]
    return rows + [(P, shard_code(d), shard_code(d)) for d in range(rank)]


@rule("aten.gather.default")
def gather(signature: OpSignature) -> list[Row]:
    """x, index -> index-shaped. The indexed dim sharded: masked look-up, P."""
    x, index = signature.operands
    dim = signature.args[1] % len(x.shape)
    rows: list[Row] = [(R, R, R), (P, shard_code(dim), R), (P, P, R), (shard_code(dim), R, shard_code(dim))]
    same = [d for d in range(len(x.shape)) if d != dim and x.shape[d] == index.shape[d]]
    return rows + [(shard_code(d),) * 3 for d in same]


@rule("aten.scatter_add.default", "aten.scatter.src")
def scatter_tensor(signature: OpSignature) -> list[Row]:
    """x, index, values -> x-shaped. The indexed dim sharded: foreign ids write nothing. Adding is linear in x and values."""
    x, index, values = signature.operands
    dim = signature.args[1] % len(x.shape)
    rows: list[Row] = [(R, R, R, R), (P, P, R, P), (shard_code(dim), shard_code(dim), R, R)]
    same = [d for d in range(len(x.shape)) if d != dim and x.shape[d] == index.shape[d] == values.shape[d]]
    return rows + [(shard_code(d),) * 4 for d in same]


@rule("aten.scatter.value")
def scatter_value(signature: OpSignature) -> list[Row]:
    """x, index, number -> x-shaped. The indexed dim sharded: foreign ids write nothing."""
    x, index = signature.operands
    dim = signature.args[1] % len(x.shape)
    rows: list[Row] = [(R, R, R), (shard_code(dim), shard_code(dim), R)]
    same = [d for d in range(len(x.shape)) if d != dim and x.shape[d] == index.shape[d]]
    return rows + [(shard_code(d),) * 3 for d in same]
