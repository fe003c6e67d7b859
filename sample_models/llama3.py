"""Llama 3 as an ordinary PyTorch module: grouped-query attention, rotary embedding, SwiGLU, RMSNorm, loss inside.

Sizes of 8B and 70B are those of table 3 of "The Llama 3 Herd of Models" (arXiv:2407.21783): dim 4096 / 8192, layers 32 / 80,
heads 32 / 64, key-value heads 8, feed-forward 14336 / 28672, vocabulary 128,000 (128,256 rows with the reserved special tokens
of the published checkpoints, `params.json` and `config.json`), rotary base 500,000; context 8192 in pre-training.

Inputs are token ids and labels, both int64 [batch, seq] (labels are the tokens shifted by one); the output is the mean
cross-entropy in float32. Not covered: padding, ignored labels, dropout, inference with a cache, long-context rope scaling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of one model and of the batch it is traced with; `batch` counts sequences of all devices together."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    batch: int
    seq: int
    rope_base: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def groups(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads


LLAMA3_8B = Config(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, batch=64, seq=8192)
LLAMA3_70B = Config(dim=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256, batch=64, seq=8192)
LLAMA3_TINY = Config(dim=512, layers=2, heads=16, kv_heads=8, ffn=1280, vocab=2048, batch=32, seq=128)

CHECK = Config(dim=384, layers=2, heads=48, kv_heads=4, ffn=48, vocab=72, batch=40, seq=16)
"""Sizes of `size="tiny"`. Each, also heads per group and half a head, divides by 4, so that it can be split over two axes of 2.
Each differs from that of every full model, and no size, nor batch * seq or kv_heads * head_dim, equals another product of two
sizes both here and in a full model with any usual batch and seq: so a number in a shape tells which sizes it is made of."""


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, seq, heads, head_dim]; cos, sin [seq, 1, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = rotate(self.wq(x).view(batch, seq, self.heads, self.head_dim), cos, sin)
        k = rotate(self.wk(x).view(batch, seq, self.kv_heads, self.head_dim), cos, sin)
        v = self.wv(x).view(batch, seq, self.kv_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in (q, self.repeat(k), self.repeat(v)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim))

    def repeat(self, x: Tensor) -> Tensor:
        """[batch, seq, kv_heads, head_dim] -> [batch, seq, heads, head_dim]: each key-value head serves a group of heads."""
        batch, seq, kv_heads, head_dim = x.shape
        wide = x.unsqueeze(3).expand(batch, seq, kv_heads, self.heads // kv_heads, head_dim)
        return wide.reshape(batch, seq, self.heads, head_dim)


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama3(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        cos, sin = self.rotary(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x)).float()
        log_probabilities = F.log_softmax(logits, dim=-1)
        picked = log_probabilities.gather(-1, labels.unsqueeze(-1))
        return -picked.mean()

    def rotary(self, seq: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [seq, 1, head_dim / 2] of the rotary angles, computed in float32, in the dtype of `like`."""
        head_dim = self.config.head_dim
        exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
        positions = torch.arange(seq, device=like.device, dtype=torch.float32)
        angles = torch.outer(positions, self.config.rope_base**-exponents).unsqueeze(1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def plan_sizes(self) -> dict[str, int]:
        """Names for the sizes that occur in shapes; an exported script is written in these."""
        c = self.config
        return {
            "B": c.batch, "S": c.seq, "D": c.dim, "H": c.heads, "KV": c.kv_heads, "HD": c.head_dim,
            "F": c.ffn, "V": c.vocab, "G": c.groups, "HD2": c.head_dim // 2,
        }  # fmt: skip

    def plan_inputs(self) -> dict[str, dict[str, int]]:
        """Per input: the dim that counts samples, and the exclusive upper bound of its values."""
        return {name: {"batch_dim": 0, "high": self.config.vocab} for name in ("tokens", "labels")}


def _build(
    full: Config, batch: int | None, seq: int | None, layers: int | None, size: str
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    if size not in ("full", "tiny"):
        raise ValueError(f"size is 'full' or 'tiny', not {size!r}")
    depth = layers or full.layers
    if size == "full":
        config = replace(full, batch=batch or full.batch, seq=seq or full.seq, layers=depth)
    else:
        config = replace(CHECK, layers=depth)
    tokens = torch.zeros(config.batch, config.seq, dtype=torch.int64)
    return Llama3(config), (tokens, torch.zeros_like(tokens))


def llama3_8b(
    *, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full"
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return _build(LLAMA3_8B, batch, seq, layers, size)


def llama3_70b(
    *, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full"
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return _build(LLAMA3_70B, batch, seq, layers, size)


def llama3_tiny(
    *, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full"
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return _build(LLAMA3_TINY, batch, seq, layers, size)
