"""One small trainable model per family of operators, so that every rule in use is run against whole tensors.

`x` is [4, 8, 16] and is computed from a parameter, so that forward and backward operators both occur.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Applied(nn.Module):
    def __init__(self, function: Callable[..., Any], *extra: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.extra = nn.ModuleList(extra)
        self.function = function

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.function(x * self.scale, ids, *self.extra)


def rope(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def heads(x: Tensor) -> Tensor:
    return x.view(4, 8, 4, 4).transpose(1, 2)


OPS: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: Applied(lambda x, ids, norm: norm(x), nn.LayerNorm(16)),
    "group_norm": lambda: Applied(lambda x, ids, norm: norm(x.transpose(1, 2)), nn.GroupNorm(4, 16)),
    "rms_norm": lambda: Applied(lambda x, ids: F.rms_norm(x, (16,))),
    "linear_bias": lambda: Applied(lambda x, ids, fc: fc(x), nn.Linear(16, 24)),
    "linear_2d": lambda: Applied(lambda x, ids, fc: fc(x[:, 0]), nn.Linear(16, 24)),
    "addmm": lambda: Applied(lambda x, ids, fc: torch.addmm(fc.bias, x[:, 0], fc.weight.t(), beta=0.5), nn.Linear(16, 24)),
    "baddbmm": lambda: Applied(lambda x, ids: torch.baddbmm(x[:, :, :8], x, x.transpose(1, 2))),
    "bmm": lambda: Applied(lambda x, ids: torch.bmm(x, x.transpose(1, 2))),
    "matmul_broadcast": lambda: Applied(lambda x, ids: heads(x) @ x[:, :4, :4].unsqueeze(1)),
    "matmul_vector": lambda: Applied(lambda x, ids: x @ x[0, 0]),
    "einsum": lambda: Applied(lambda x, ids, fc: torch.einsum("bsd,ndf->bsnf", x, fc.weight.view(4, 16, 8)), nn.Linear(16, 32)),
    "einsum_three": lambda: Applied(lambda x, ids: torch.einsum("bsd,btd,btf->bsf", x, x, x)),
    "gelu": lambda: Applied(lambda x, ids: F.gelu(x) + F.gelu(x, approximate="tanh")),
    "activations": lambda: Applied(
        lambda x, ids: F.silu(x) + F.softplus(x) + F.leaky_relu(x) + F.elu(x) + F.hardswish(x) + F.mish(x) + F.logsigmoid(x)
    ),
    "relu_squared": lambda: Applied(lambda x, ids: F.relu(x).square() + F.relu6(x) + F.hardtanh(x)),
    "glu": lambda: Applied(lambda x, ids: F.glu(x)),
    "exponentials": lambda: Applied(lambda x, ids: x.exp() + x.exp2() + x.expm1() + x.sigmoid() + x.tanh() + x.erf()),
    "logarithms": lambda: Applied(lambda x, ids: x.square().add(1).log() + x.square().log1p() + x.square().add(1).log2()),
    "trigonometry": lambda: Applied(lambda x, ids: x.sin() + x.cos() + x.atan()),
    "powers": lambda: Applied(lambda x, ids: (x * x + 1).pow(1.5) + x.pow(3) + 2.0**x + x.abs() + (x * x + 1).rsqrt()),
    "signs": lambda: Applied(lambda x, ids: x.abs() * x.sign() + x.clamp(-1, 1) + torch.maximum(x, x * 2) + x.clamp(max=0.5)),
    "comparisons": lambda: Applied(lambda x, ids: torch.where((x > 0) & ~(x > 1) | (ids.unsqueeze(-1) == 3), x, 2 * x)),
    "masked_fill": lambda: Applied(lambda x, ids: x.masked_fill(ids.unsqueeze(-1) > 3, 0.0)),
    "lerp": lambda: Applied(lambda x, ids: torch.lerp(x, x * x, 0.25) + torch.addcmul(x, x, x, value=0.5)),
    "floor_division": lambda: Applied(lambda x, ids: x * (ids // 2 + ids % 3).unsqueeze(-1)),
    "softmax": lambda: Applied(lambda x, ids: x.softmax(-1) + x.log_softmax(1)),
    "logsumexp": lambda: Applied(lambda x, ids: x.logsumexp(-1)),
    "means": lambda: Applied(lambda x, ids: (x.mean(), x.mean((0, 2)), x.mean(-1, keepdim=True))),
    "variances": lambda: Applied(lambda x, ids: (x.var(-1), x.std((0, 1), unbiased=False), x.norm(dim=-1), x.norm())),
    "sums": lambda: Applied(lambda x, ids: (x.sum(), x.sum((0, 2)), x.prod(-1))),
    "extremes": lambda: Applied(lambda x, ids: (x.amax(-1), x.amin(1), x.max(-1).values, x.min(1)[0], x.max())),
    "arg_extremes": lambda: Applied(lambda x, ids: x * x.argmax(-1, keepdim=True) + x.argmin(-1, keepdim=True)),
    "any_all": lambda: Applied(lambda x, ids: x * (ids > 3).any(-1)[:, None, None] + x * (ids > 1).all()),
    "cumulative": lambda: Applied(lambda x, ids: x.cumsum(1) + x.cumsum(-1) + torch.logcumsumexp(x, 1)),
    "topk": lambda: Applied(lambda x, ids: x.topk(4, -1)[0] * x.topk(4, -1, sorted=False)[1]),
    "sort": lambda: Applied(lambda x, ids: x.sort(-1)[0] + x.argsort(1)),
    "one_hot": lambda: Applied(lambda x, ids: x * F.one_hot(ids, 16)),
    "embedding": lambda: Applied(lambda x, ids, table: table(ids) * x, nn.Embedding(16, 16)),
    "embedding_padding": lambda: Applied(lambda x, ids, table: table(ids) * x, nn.Embedding(16, 16, padding_idx=2)),
    "positions": lambda: Applied(lambda x, ids, table: x + table(torch.arange(8)), nn.Embedding(12, 16)),
    "positions_sliced": lambda: Applied(lambda x, ids, table: x + table.weight[:8], nn.Embedding(12, 16)),
    "cross_entropy": lambda: Applied(lambda x, ids: F.cross_entropy(x.flatten(0, 1), ids.flatten(), label_smoothing=0.1)),
    "losses": lambda: Applied(
        lambda x, ids: F.mse_loss(x, x * x) + F.smooth_l1_loss(x, x * x) + F.binary_cross_entropy_with_logits(x, x.sigmoid())
    ),
    "kl_div": lambda: Applied(lambda x, ids: F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="batchmean")),
    "gather": lambda: Applied(lambda x, ids: x.gather(1, ids.unsqueeze(-1).expand(4, 8, 16) % 8)),
    "scatter": lambda: Applied(lambda x, ids: torch.zeros_like(x).scatter(-1, ids.unsqueeze(-1) % 16, x[..., :1])),
    "scatter_add": lambda: Applied(lambda x, ids: torch.zeros_like(x).scatter_add(1, (ids % 8)[..., None].expand_as(x), x)),
    "index_select": lambda: Applied(lambda x, ids: x.index_select(1, ids[0] % 8)),
    "index_list": lambda: Applied(lambda x, ids: (x[:, [0, 2, 3]], x[:, [-2]], x[..., [0, 1]])),
    "index_pairs": lambda: Applied(lambda x, ids: x[torch.arange(4), ids[:, 0] % 8]),
    "index_tensor": lambda: Applied(lambda x, ids: x[0][ids % 8]),
    "index_add": lambda: Applied(lambda x, ids: torch.zeros(8, 16).index_add(0, ids[0] % 8, x[0])),
    "slices": lambda: Applied(lambda x, ids: (x[:, -1], x[..., -3:], x[-1], x[:, ::2], x[:, 2:6])),
    "stack": lambda: Applied(lambda x, ids: (torch.stack([x, 2 * x], 0), torch.stack([x, x * x], -1), torch.stack([x, x], -2))),
    "cat": lambda: Applied(lambda x, ids: (torch.cat([x, x], 0), torch.cat([x, x * x], -1))),
    "split": lambda: Applied(lambda x, ids: (x.split([6, 10], -1), x.chunk(4, 1), x.unbind(0), x.tensor_split(2, -1))),
    "rotary": lambda: Applied(lambda x, ids: x * x.cos() + rope(x) * x.sin()),
    "shapes": lambda: Applied(
        lambda x, ids: (x.flatten(0, 1), x.unflatten(-1, (4, 4)), x.permute(2, 0, 1), x.movedim(0, 1), x[:, None].squeeze(1))
    ),
    "repeats": lambda: Applied(lambda x, ids: (x.repeat(1, 2, 1), x.repeat_interleave(2, 1), x[:, :1].expand(4, 8, 16))),
    "flip_roll": lambda: Applied(lambda x, ids: x.flip(1) + x.roll(1, 1) + x.roll(-1, 0)),
    "pad": lambda: Applied(lambda x, ids: F.pad(x, (1, 2)) .sum() + F.pad(x, (0, 0, 2, 2), value=1.0).sum()),
    "identity": lambda: Applied(lambda x, ids: x @ torch.eye(16) + torch.eye(8, 16)),
    "triangles": lambda: Applied(lambda x, ids: (x @ x.transpose(1, 2)).tril() + (x @ x.transpose(1, 2)).triu(1)),
    "causal_mask": lambda: Applied(
        lambda x, ids: (x @ x.transpose(1, 2)).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    ),
    "diagonal": lambda: Applied(lambda x, ids: x[:, :, :8].diagonal(dim1=1, dim2=2)),
    "unfold": lambda: Applied(lambda x, ids: x.unfold(1, 4, 2)),
    "attention": lambda: Applied(lambda x, ids: F.scaled_dot_product_attention(heads(x), heads(x), heads(x))),
    "attention_mask": lambda: Applied(
        lambda x, ids: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=(ids > 3)[:, None, None])
    ),
    "attention_bias": lambda: Applied(
        lambda x, ids: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=x[:, :, :8].unsqueeze(1))
    ),
    "conv1d": lambda: Applied(lambda x, ids, conv: conv(x.transpose(1, 2)), nn.Conv1d(16, 8, 3, padding=1)),
    "conv1d_depthwise": lambda: Applied(lambda x, ids, c: c(x.transpose(1, 2)), nn.Conv1d(16, 16, 4, padding=3, groups=16)),
    "conv1d_no_bias": lambda: Applied(lambda x, ids, c: c(x.transpose(1, 2)), nn.Conv1d(16, 32, 3, groups=16, bias=False)),
    "conv2d_patches": lambda: Applied(lambda x, ids, conv: conv(x.unsqueeze(1)), nn.Conv2d(1, 8, 4, stride=4)),
    "pooling": lambda: Applied(lambda x, ids: F.avg_pool1d(x, 2) + F.max_pool1d(x, 2)),
    "complex": lambda: Applied(
        lambda x, ids: torch.view_as_real(as_complex(x) * as_complex(x)[0, 0].conj())
    ),
    "casts": lambda: Applied(lambda x, ids: (x.bfloat16() * 2).float() + ids.unsqueeze(-1).to(x.dtype) + x.type_as(x)),
    "outer": lambda: Applied(lambda x, ids: torch.outer(x[0, 0], x[0, 1]) + torch.linspace(0, 1, 16)),
    "in_place": lambda: Applied(lambda x, ids: x.clone().mul_(2).add_(x).clamp_(max=1.0)),
    "writes": lambda: Applied(lambda x, ids: written(x.clone())),
    "detach": lambda: Applied(lambda x, ids: x * x.detach() + x.clone().contiguous()),
    "bucketize": lambda: Applied(lambda x, ids: x * torch.bucketize(x.detach(), torch.tensor([0.0, 0.5]))),
}  # fmt: skip
"""name -> builds the model"""


def as_complex(x: Tensor) -> Tensor:
    """[..., 16] -> complex [..., 8]"""
    return torch.view_as_complex(x.unflatten(-1, (8, 2)))


def written(x: Tensor) -> Tensor:
    x[:, 0] = 0.0
    x[1:, 2:4] += 1.0
    x[..., -1] = x[..., 0]
    return x


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, 16), torch.randint(0, 16, (4, 8))


class AllOps(nn.Module):
    """Every model above, side by side: one graph with every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleDict({name: build() for name, build in OPS.items()})

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Any]:
        return {name: tame(model(x, ids)) for name, model in self.models.items()}


def tame(made: Any) -> Any:
    """Outputs of like size and without symmetry, so that no gradient drowns in another's rounding or is zero by itself."""
    if isinstance(made, tuple | list):
        return [tame(part) for part in made]
    waves = torch.arange(made.numel()).to(made.dtype).sin().reshape(made.shape) + 1.5
    return made * waves / (1 + (made * waves).abs())


def all_ops() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return AllOps(), inputs()
