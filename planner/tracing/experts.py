"""`planner::expert_product`: each token's rows times the weights of the experts it was sent to, as ONE op; and its gradients.

Mixtures of experts without a capacity sort tokens by expert. How many go where depends on data, so a sort over all tokens could
only run on whole copies. As one op the sort is its own matter: tokens may be split (each device sorts its own), experts may be
split (each device does its own, the rest are zeros: a pending sum), and so may the dims of the weights. Importing this file
registers the ops with torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("planner::expert_product", mutates_args=())
def expert_product(x: Tensor, weight: Tensor, index: Tensor, transposed: bool) -> Tensor:
    """x [tokens, choices, k], weight [experts, n, k] ([experts, k, n] if `transposed`), index [tokens, choices] (which expert)
    -> [tokens, choices, n]."""
    rows, order, ends = _sorted(x, index, weight.shape[0])
    out = rows.new_zeros(rows.shape[0], weight.shape[2 if transposed else 1])
    start = 0
    for expert, end in enumerate(ends):
        chosen = order[start:end]
        out[chosen] = rows[chosen] @ (weight[expert] if transposed else weight[expert].t())
        start = end
    return out.view(*x.shape[:-1], -1)


@expert_product.register_fake
def _product_shape(x: Tensor, weight: Tensor, index: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[2 if transposed else 1])


@torch.library.custom_op("planner::expert_weight_grad", mutates_args=())
def expert_weight_grad(a: Tensor, b: Tensor, index: Tensor, num_experts: int) -> Tensor:
    """a [tokens, choices, n], b [tokens, choices, k] -> [experts, n, k]: per expert the sum over its rows of a x b."""
    left, order, ends = _sorted(a, index, num_experts)
    right = b.reshape(-1, b.shape[-1])
    out = a.new_zeros(num_experts, a.shape[-1], b.shape[-1])
    start = 0
    for expert, end in enumerate(ends):
        chosen = order[start:end]
        out[expert] = left[chosen].t() @ right[chosen]
        start = end
    return out


@expert_weight_grad.register_fake
def _weight_grad_shape(a: Tensor, b: Tensor, index: Tensor, num_experts: int) -> Tensor:
    return a.new_empty(num_experts, a.shape[-1], b.shape[-1])


def _sorted(x: Tensor, index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """Rows of x one by one, their order by expert, and where each expert's rows end in that order."""
    ids = index.reshape(-1)
    ends = torch.bincount(ids, minlength=num_experts).cumsum(0).tolist()
    return x.reshape(-1, x.shape[-1]), torch.argsort(ids, stable=True), ends


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.transposed = inputs[3]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, index = ctx.saved_tensors
    to_x = expert_product(gradient, weight, index, not ctx.transposed) if ctx.needs_input_grad[0] else None
    to_weight = None
    if ctx.needs_input_grad[1]:
        pair = (x, gradient) if ctx.transposed else (gradient, x)
        to_weight = expert_weight_grad(*pair, index, weight.shape[0])
    return to_x, to_weight, None, None


expert_product.register_autograd(_backward, setup_context=_save)


def experts_forward(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """A transformers module of stacked experts, exact and without a capacity: hidden [tokens, d], index and weights
    [tokens, choices] -> [tokens, d]. Has the signature that the library expects of an implementation of experts."""
    transposed = experts.is_transposed
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    spread = hidden.unsqueeze(1).expand(-1, index.shape[1], -1)
    inner = expert_product(spread, getattr(experts, name), index, transposed)
    if experts.has_bias:
        inner = inner + torch.nn.functional.embedding(index, getattr(experts, f"{name}_bias"))
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outer = expert_product(inner, experts.down_proj, index, transposed)
    if experts.has_bias:
        outer = outer + torch.nn.functional.embedding(index, experts.down_proj_bias)
    if experts.has_post_expert_norm:
        outer = experts.post_expert_norm(outer)
    return (outer * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


IMPLEMENTATION = "planned"


def register() -> str:
    """Makes `experts_forward` known to transformers, by its own interface for that -> the name to build a model with."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, experts_forward)
    return IMPLEMENTATION
