"""Floating-point operations of one op on whole (unsharded) tensors; a multiply-add counts as two.

Only products and attention count, and what torch counts inside a user-controlled region; pointwise ops, reductions and copies
are memory traffic and count 0. Causal attention counts half of the full square; its backward is five products where forward is
two (the scores are recomputed), 2.5 times as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from planner.graph import TensorMeta
from planner.region import REGION, REGION_BACKWARD, Region

EINSUM = "planner.einsum.default"
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def flops(op: str, args: tuple[Any, ...], operands: Sequence[TensorMeta], outputs: Sequence[TensorMeta | None]) -> float:
    """`args` as in `Node.args`; metas of the operands in order."""
    if op in (REGION, REGION_BACKWARD):
        region = Region.loads(args[0])
        return region.flops if op == REGION else region.backward_flops
    if op == EINSUM:
        terms = args[0].split("->")[0].split(",")
        sizes = {
            letter: size
            for term, meta in zip(terms, operands, strict=True)
            for letter, size in zip(term, meta.shape, strict=True)
        }
        return 2.0 * math.prod(sizes.values())
    if op == "planner.expert_product.default" and outputs[0] is not None:
        return 2.0 * operands[0].num_elements * outputs[0].shape[-1]
    if op == "planner.expert_weight_grad.default":
        return 2.0 * operands[0].num_elements * operands[1].shape[-1]
    if op == ATTENTION:
        return _attention(operands[0], operands[1], causal=bool(len(args) > 4 and args[4]))
    if op == ATTENTION_BACKWARD:
        return 2.5 * _attention(operands[1], operands[2], causal=bool(len(args) > 7 and args[7]))
    if op in ("aten.mm.default", "aten.bmm.default"):
        return 2.0 * operands[0].num_elements * operands[1].shape[-1]
    if op == "aten.convolution.default" and outputs[0] is not None:
        return 2.0 * outputs[0].num_elements * math.prod(operands[1].shape[1:])
    if op == "aten.convolution_backward.default":  # operands: gradient, input, weight; one product per gradient asked for
        one = 2.0 * operands[0].num_elements * math.prod(operands[2].shape[1:])
        return one * sum(meta is not None for meta in outputs[:2])
    return 0.0


def _attention(q: TensorMeta, k: TensorMeta, *, causal: bool) -> float:
    """Scores and weighted sum: q [batch, heads, seq_q, head_dim], k [batch, heads, seq_k, head_dim]."""
    return 4.0 * q.num_elements * k.shape[-2] * (0.5 if causal else 1.0)
