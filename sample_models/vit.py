"""A vision transformer as an ordinary PyTorch module: patches by convolution, learned positions, GELU, loss inside.

Sizes are those of table 1 of "An Image is Worth 16x16 Words" (Dosovitskiy et al., arXiv:2010.11929): ViT-Large has 24 layers, dim
1024, feed-forward 4096, 16 heads; patches of 16 x 16 of images of 224 x 224, 1000 classes of ImageNet-1k.
The class is read off the mean of all patches, as in "Scaling Vision Transformers" (arXiv:2106.04560, section 2.2) and the paper's
appendix D.3, instead of an additional token; so the number of tokens is a square and can be split.

Inputs are images, float [batch, 3, side, side], and labels, int64 [batch]; the output is the mean cross-entropy in float32.
Dropout is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of one model and of the batch it is traced with; `batch` counts images of all devices together, `side` their pixels
    along each side."""

    dim: int
    layers: int
    heads: int
    ffn: int
    patch: int
    side: int
    classes: int
    batch: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def tokens(self) -> int:
        return (self.side // self.patch) ** 2


VIT_LARGE = Config(dim=1024, layers=24, heads=16, ffn=4096, patch=16, side=224, classes=1000, batch=64)
VIT_TINY = Config(dim=256, layers=2, heads=8, ffn=640, patch=8, side=64, classes=100, batch=32)

CHECK = Config(dim=96, layers=2, heads=4, ffn=176, patch=12, side=72, classes=52, batch=40)
"""Sizes of `size="tiny"`, 36 patches: those that can be split divide by 4, and no two are equal."""


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = (
            part(x).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.dim, eps=1e-6)
        self.fc_1 = nn.Linear(config.dim, config.ffn)
        self.fc_2 = nn.Linear(config.ffn, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.fc_2(F.gelu(self.fc_1(self.norm_2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(3, config.dim, config.patch, stride=config.patch)
        self.positions = nn.Parameter(torch.empty(config.tokens, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform products, zero biases, positions with deviation 0.02; the head starts at zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions, 0.0, 0.02)
        nn.init.zeros_(self.head.weight)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x).mean(1)).float()
        picked = F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1))
        return -picked.mean()

    def plan_sizes(self) -> dict[str, int]:
        """Names for the sizes that occur in shapes; an exported script is written in these."""
        c = self.config
        return {
            "B": c.batch, "T": c.tokens, "D": c.dim, "H": c.heads, "HD": c.head_dim, "F": c.ffn, "CL": c.classes, "SIDE": c.side,
            "PATCH": c.patch, "GRID": c.side // c.patch,
        }  # fmt: skip

    def plan_inputs(self) -> dict[str, dict[str, int]]:
        """Per input: the dim that counts samples, and the exclusive upper bound of its values."""
        return {"images": {"batch_dim": 0}, "labels": {"batch_dim": 0, "high": self.config.classes}}


Made = tuple[nn.Module, tuple[Tensor, Tensor]]


def _build(full: Config, batch: int | None, layers: int | None, size: str) -> Made:
    if size not in ("full", "tiny"):
        raise ValueError(f"size is 'full' or 'tiny', not {size!r}")
    depth = layers or full.layers
    config = replace(full, batch=batch or full.batch, layers=depth) if size == "full" else replace(CHECK, layers=depth)
    images = torch.zeros(config.batch, 3, config.side, config.side)
    return VisionTransformer(config), (images, torch.zeros(config.batch, dtype=torch.int64))


def vit_large(*, batch: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return _build(VIT_LARGE, batch, layers, size)


def vit_tiny(*, batch: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return _build(VIT_TINY, batch, layers, size)
