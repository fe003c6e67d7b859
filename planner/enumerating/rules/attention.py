"""Fused attention: rows of one batch entry and head are independent of the others, nothing else is.

q, k, v are [batch, heads, seq, head_dim]. Sequence would need a context-parallel lowering; head_dim is summed over.
Heads shard only together for q, k and v, which the graph holds widened to equal head counts.
"""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.graph import OperandRef
from planner.placement import R, shard_code


@rule(
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
)
def attention(signature: OpSignature) -> list[Row]:
    masks = _masks(signature)
    whole = [meta for slot, meta in enumerate(signature.operands) if slot not in masks]
    wide = (whole[0].shape[0], whole[0].shape[1])

    def row(dim: int) -> Row:
        cut = [
            R if slot in masks and meta.shape[dim] != wide[dim] else shard_code(dim)
            for slot, meta in enumerate(signature.operands)
        ]
        return (*[shard_code(dim)] * len(signature.outputs), *cut)

    rows: list[Row] = [(R,) * (len(signature.outputs) + len(signature.operands)), row(0)]
    return [*rows, row(1)] if len({meta.shape[1] for meta in whole}) == 1 else rows


def _masks(signature: OpSignature) -> set[int]:
    """Operand slots of a mask; it may have one entry for all of the batch or all heads."""
    return {value.index for name, value in signature.kwargs if name == "attn_mask" and isinstance(value, OperandRef)}
