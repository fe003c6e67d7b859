"""One-axis rows asked from DTensor's own tables. Never its N-axis expansion or its redistribute costs."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from planner.enumerating.registry import OpSignature, Row
from planner.graph import DtypeRef, OperandRef, TensorMeta
from planner.placement import R
from planner.torch_compat import DTensorRules, operator_by_name, placement_code


def rows_from_dtensor(signature: OpSignature, tables: DTensorRules) -> list[Row] | None:
    """Rows of DTensor for this op, outputs first; None if it has no rule (or none for this torch)."""
    try:
        op = operator_by_name(signature.op)
    except AttributeError:
        return None
    metas = [tables.tensor_meta(meta.shape, _dtype(meta.dtype)) for meta in signature.operands]
    args = tuple(_to_torch(arg, metas) for arg in signature.args)
    kwargs = {name: _to_torch(value, metas) for name, value in signature.kwargs}
    if tables.knows_one_axis(op):
        found = tables.one_axis_rows(op, args, kwargs)
        width = len(signature.outputs) + len(signature.operands)
        return _encode([[Replicate()] * width, *found], width)
    if tables.knows_many_axes(op) and len(metas) == 1:
        return _encode(
            tables.many_axes_rows(op, args, kwargs, metas[0], _offers(signature.operands[0])), len(signature.outputs) + 1
        )
    return None


def _offers(meta: TensorMeta) -> list[Any]:
    shards = [Shard(dim) for dim, size in enumerate(meta.shape) if size > 1]
    return [Replicate(), *shards, *([Partial()] if meta.is_floating else [])]


def _encode(rows: list[list[Any]], width: int) -> list[Row]:
    """Placements -> codes; rows with a placement we do not plan with, or with another number of ports, are left out."""
    encoded = []
    for row in rows:
        codes = [placement_code(placement) if placement is not None else R for placement in row]
        if len(codes) == width and None not in codes:
            encoded.append(tuple(code for code in codes if code is not None))
    return encoded


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _to_torch(value: Any, metas: list[Any]) -> Any:
    if isinstance(value, OperandRef):
        return metas[value.index]
    if isinstance(value, DtypeRef):
        return _dtype(value.name)
    if isinstance(value, tuple):
        return [_to_torch(item, metas) for item in value]
    return value
