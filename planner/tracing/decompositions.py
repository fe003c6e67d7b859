"""Which operators are broken into simpler ones, so that a few rules cover many models.

Chosen so that the loss can be split along the vocabulary (softmax as amax, sub, exp, sum, log), a mean is `sum / count` (a
pending mean would be wrong for a batch shard unless scaled), a variance is two such sums, and rotary halves are slices.
Attention, embedding and its backward, silu and products stay whole: they have rules and prices of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner import torch_compat

aten = torch.ops.aten

_BY_TORCH = (
    aten._log_softmax, aten._log_softmax_backward_data, aten._softmax, aten._softmax_backward_data,
    aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward,
    aten.mse_loss, aten.mse_loss_backward, aten.native_layer_norm, aten.native_layer_norm_backward,
    aten.silu_backward, aten.gelu_backward, aten.tanh_backward, aten.sigmoid_backward, aten.threshold_backward,
    aten.t, aten.slice_backward, aten.select_backward, aten.addmm,
)  # fmt: skip


def table() -> dict[Any, Callable[..., Any]]:
    own: dict[Any, Callable[..., Any]] = {
        aten.mean.default: _mean,
        aten.mean.dim: _mean_dim,
        aten.var_mean.correction: _var_mean,
        aten.var.correction: _var,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split_with_sizes,
    }
    return torch_compat.decompositions(_BY_TORCH) | own


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.div.Scalar(aten.sum.default(x, dtype=dtype), x.numel())


def _mean_dim(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = list(dim) if dim else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims)
    return aten.div.Scalar(aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype), count)


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Two passes, as accurate as the fused operator: mean first, then the squares of the differences. Each sum over a split dim
    is a pending sum that the next op needs reduced."""
    dims = [d % x.dim() for d in dim] if dim else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims)
    mean = aten.div.Scalar(aten.sum.dim_IntList(x, dims, True), count)
    apart = x - mean
    squares = aten.sum.dim_IntList(apart * apart, dims, keepdim)
    var = aten.div.Scalar(squares, count - (1 if correction is None else correction))
    return var, mean if keepdim else aten.squeeze.dims(mean, dims)


def _var(x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _split(x: Tensor, split_size: int, dim: int = 0) -> list[Tensor]:
    size = x.shape[dim]
    return [aten.slice.Tensor(x, dim, start, min(start + split_size, size)) for start in range(0, max(size, 1), split_size)]


def _split_with_sizes(x: Tensor, split_sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    parts, start = [], 0
    for size in split_sizes:
        parts.append(aten.slice.Tensor(x, dim, start, start + size))
        start += size
    return parts
