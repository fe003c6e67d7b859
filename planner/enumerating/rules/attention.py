"""Fused attention: rows of one batch entry and head are independent of the others, nothing else is.

q, k, v are [batch, heads, seq, head_dim]. Sequence would need a context-parallel lowering; head_dim is summed over.
Heads shard only together for q, k and v, which the graph holds widened to equal head counts.
"""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.placement import R, shard_code


@rule(
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
)
def attention(signature: OpSignature) -> list[Row]:
    ports = len(signature.outputs) + len(signature.operands)
    heads = {meta.shape[1] for meta in signature.operands}
    rows: list[Row] = [(R,) * ports, (shard_code(0),) * ports]
    return rows + [(shard_code(1),) * ports] if len(heads) == 1 else rows
