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
    aten.t, aten.slice_backward, aten.select_backward, aten.addmm, aten.baddbmm, aten.addcmul, aten.addcdiv,
    aten.native_group_norm, aten.native_group_norm_backward, aten.native_batch_norm, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training, aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update, aten.batch_norm_backward, aten.native_batch_norm_backward, aten.elu, aten.elu_backward,
    aten.hardswish, aten.hardswish_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.log_sigmoid_forward,
    aten.log_sigmoid_backward, aten.mish, aten.mish_backward, aten.softplus, aten.softplus_backward, aten.hardtanh,
    aten.hardtanh_backward, aten.glu, aten.glu_backward, aten.mv, aten.dot, aten.binary_cross_entropy_with_logits,
    aten.binary_cross_entropy, aten.binary_cross_entropy_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward,
    aten.huber_loss, aten.huber_loss_backward, aten.index_add, aten.index_select, aten.xlogy, aten.diagonal_backward,
    aten.unfold_backward, aten.linspace, aten.logsumexp, aten._safe_softmax,
)  # fmt: skip


def table() -> dict[Any, Callable[..., Any]]:
    own: dict[Any, Callable[..., Any]] = {
        aten.mean.default: _mean,
        aten.mean.dim: _mean_dim,
        aten.var_mean.correction: _var_mean,
        aten.var.correction: _var,
        aten.std.correction: _std,
        aten.unbind.int: _unbind,
        aten.linalg_vector_norm.default: _vector_norm,
        aten.tril.default: _tril,
        aten.triu.default: _triu,
        aten.eye.default: _eye,
        aten.eye.m: _eye,
        aten.copy.default: _copy,
        aten.fill.Tensor: _fill,
        aten.native_dropout.default: _dropout,
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


def _std(x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _unbind(x: Tensor, dim: int = 0) -> list[Tensor]:
    return [aten.select.int(x, dim, number) for number in range(x.shape[dim])]


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The Euclidean norm as the root of a sum, which can be pending over a split dim."""
    if ord != 2 or x.is_complex() or dtype is not None:
        return NotImplemented
    dims = list(dim) if dim else list(range(x.dim()))
    return aten.sum.dim_IntList(x * x, dims, keepdim).sqrt()


def _tril(x: Tensor, diagonal: int = 0) -> Tensor:
    return _masked(x, lambda row, column: column <= row + diagonal)


def _triu(x: Tensor, diagonal: int = 0) -> Tensor:
    return _masked(x, lambda row, column: column >= row + diagonal)


def _masked(x: Tensor, inside: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    kept = inside(rows.unsqueeze(-1), columns)
    if x.dtype == torch.bool:
        return torch.logical_and(x, kept)
    return torch.where(kept, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _eye(rows: int, columns: int | None = None, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    across = torch.arange(rows if columns is None else columns, device=device)
    return (torch.arange(rows, device=device).unsqueeze(-1) == across).to(dtype or torch.get_default_dtype())


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What `x` holds after `x.copy_(source)`."""
    return source.to(x.dtype).expand(x.shape).clone()


def _fill(x: Tensor, value: Tensor) -> Tensor:
    return value.to(x.dtype).expand(x.shape).clone()


def _dropout(x: Tensor, p: float, train: bool | None) -> Any:
    """Dropout that drops nothing draws no random numbers."""
    if p == 0 or train is False:
        return x.clone(), torch.ones(x.shape, dtype=torch.bool, device=x.device)
    return NotImplemented


def _split(x: Tensor, split_size: int, dim: int = 0) -> list[Tensor]:
    size = x.shape[dim]
    return [aten.slice.Tensor(x, dim, start, min(start + split_size, size)) for start in range(0, max(size, 1), split_size)]


def _split_with_sizes(x: Tensor, split_sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    parts, start = [], 0
    for size in split_sizes:
        parts.append(aten.slice.Tensor(x, dim, start, start + size))
        start += size
    return parts
