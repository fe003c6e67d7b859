"""Look-ups by index. A sharded table is looked up with a mask: foreign ids give zeros, so the result is a pending sum."""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.graph import OperandRef, TensorMeta
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
    if signature.op == "aten.scatter_add.default":  # each part of the values is added by its own device
        rows.append((P, P, shard_code(dim), shard_code(dim)))
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


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(signature: OpSignature) -> list[Row]:
    """x[:, i, j]: dims that are not indexed pass, positions may be split, indexed dims are whole."""
    return [(out, x, *positions) for out, x, positions in _indexed(signature)]


@rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(signature: OpSignature) -> list[Row]:
    """x[:, i, j] = values, or += values. Split positions leave each device with the sum of its own part."""
    values = signature.operands[-1]
    rows: list[Row] = []
    for out, code, positions in _indexed(signature):
        if out == P:
            rows.append((P, P, *positions, P))
        elif code != R or all(position == R for position in positions):
            rows.append((code, code, *positions, _aligned(values, out, _result_rank(signature))))
        elif signature.arg(3, False):
            rows.append((P, P, *positions, _aligned(values, out, _result_rank(signature))))
    return rows


def _positions(signature: OpSignature) -> list[tuple[int, TensorMeta]]:
    """(indexed dim, its tensor of positions)"""
    return [(dim, signature.operands[item.index]) for dim, item in enumerate(signature.args[1]) if isinstance(item, OperandRef)]


def _result_rank(signature: OpSignature) -> int:
    found = _positions(signature)
    return len(signature.operands[0].shape) - len(found) + max(len(meta.shape) for _, meta in found)


def _indexed(signature: OpSignature) -> list[tuple[int, int, list[int]]]:
    """(code of x[positions], code of x, codes of the positions). Adjacent indexed dims are replaced where they stand, others
    by leading dims."""
    x, found = signature.operands[0], _positions(signature)
    dims = [dim for dim, _ in found]
    width = max(len(meta.shape) for _, meta in found)
    first = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    whole = [R] * len(found)
    rows = [(R, R, whole), (P, P, whole)]
    rest = [d for d in range(len(x.shape)) if d not in dims]
    for number, d in enumerate(rest):
        rows.append((shard_code(number + (width if number >= first else 0)), shard_code(d), whole))
    for d in range(width):
        size = max(meta.shape[d - width + len(meta.shape)] for _, meta in found if d - width + len(meta.shape) >= 0)
        cut = []
        for _, meta in found:
            own = d - width + len(meta.shape)
            cut.append(shard_code(own) if own >= 0 and meta.shape[own] == size else R)
        rows.append((shard_code(first + d), R, cut))
    return rows


def _aligned(values: TensorMeta, code: int, rank: int) -> int:
    """The code of values that broadcast to a result of `rank` dims with this code."""
    if code < shard_code(0):
        return code
    own = code - shard_code(0) - rank + len(values.shape)
    return shard_code(own) if own >= 0 and values.shape[own] > 1 else R
