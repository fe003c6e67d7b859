"""A decoder of any size: the families that published training runs are made of, from GPT and MPT to Llama.

`gated` decides between two MLPs: SwiGLU (three matrices) or GELU (two). `norm` is `rms` or `layer`, `positions` is `rotary`,
`learned` or `none` (attention biases by distance cost nothing and are left out), `tied` shares the embedding with the head,
`biases` gives every linear layer one. All flags are 0 or 1. Attention is causal, key-value heads may be fewer than heads.

Inputs are token ids and labels, int64 [batch, seq]; the output is the mean cross-entropy in float32. Not covered: dropout,
sliding windows, squared ReLU (priced like GELU, both are pointwise), experts.
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
    gated: int = 1
    tied: int = 0
    biases: int = 0
    norm: str = "rms"
    positions: str = "rotary"

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of x [batch, seq, heads, head_dim]."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = torch.outer(torch.arange(x.shape[1], device=x.device, dtype=torch.float32), 10_000.0**-exponents).unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.wq = nn.Linear(c.dim, c.heads * c.head_dim, bias=bool(c.biases))
        self.wk = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=bool(c.biases))
        self.wv = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=bool(c.biases))
        self.wo = nn.Linear(c.heads * c.head_dim, c.dim, bias=bool(c.biases))

    def forward(self, x: Tensor) -> Tensor:
        c, (batch, seq, _) = self.config, x.shape
        q = self.wq(x).view(batch, seq, c.heads, c.head_dim)
        k = self.wk(x).view(batch, seq, c.kv_heads, c.head_dim)
        v = self.wv(x).view(batch, seq, c.kv_heads, c.head_dim)
        if c.positions == "rotary":
            q, k = rotate(q), rotate(k)
        if c.kv_heads < c.heads:
            shape = (batch, seq, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
            k, v = (t.unsqueeze(3).expand(shape).reshape(batch, seq, c.heads, c.head_dim) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, c.heads * c.head_dim))


class FeedForward(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.up = nn.Linear(c.dim, c.ffn, bias=bool(c.biases))
        self.gate = nn.Linear(c.dim, c.ffn, bias=bool(c.biases)) if c.gated else None
        self.down = nn.Linear(c.ffn, c.dim, bias=bool(c.biases))

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate = F.silu(self.gate(x))
        return self.down(gate * self.up(x))


def _norm(c: Config) -> nn.Module:
    return nn.RMSNorm(c.dim) if c.norm == "rms" else nn.LayerNorm(c.dim, bias=bool(c.biases))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = _norm(c), _norm(c)
        self.attention = Attention(c)
        self.feed_forward = FeedForward(c)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.norm_1(x))
        x = x + mixed
        changed = self.feed_forward(self.norm_2(x))
        return x + changed


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = self.config = config
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.positions = nn.Embedding(c.seq, c.dim) if c.positions == "learned" else None
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = _norm(c)
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        logits = logits.float()
        log_probabilities = F.log_softmax(logits, dim=-1)
        picked = log_probabilities.gather(-1, labels.unsqueeze(-1))
        return -picked.mean()

    def plan_sizes(self) -> dict[str, int]:
        """Names for the sizes that occur in shapes; an exported script is written in these."""
        c = self.config
        return {"B": c.batch, "S": c.seq, "D": c.dim, "H": c.heads, "KV": c.kv_heads, "HD": c.head_dim, "F": c.ffn, "V": c.vocab}

    def plan_inputs(self) -> dict[str, dict[str, int]]:
        """Per input: the dim that counts samples, and the exclusive upper bound of its values."""
        return {name: {"batch_dim": 0, "high": self.config.vocab} for name in ("tokens", "labels")}


def decoder(
    *,
    dim: int = 4096,
    heads: int = 32,
    kv_heads: int = 32,
    ffn: int = 11008,
    vocab: int = 32000,
    layers: int | None = None,
    gated: int = 1,
    tied: int = 0,
    biases: int = 0,
    norm: str = "rms",
    positions: str = "rotary",
    batch: int | None = None,
    seq: int | None = None,
    size: str = "full",
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Sizes default to those of Llama 2 7B (arXiv 2307.09288). Tiny sizes divide by 4, so that they split over two axes of 2."""
    config = Config(
        dim=dim, layers=layers or 32, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, batch=batch or 64, seq=seq or 4096,
        gated=gated, tied=tied, biases=biases, norm=norm, positions=positions,
    )  # fmt: skip
    if size == "tiny":
        config = replace(
            config, dim=96, heads=8, kv_heads=8 if kv_heads == heads else 4, ffn=176, vocab=112, batch=40, seq=16,
            layers=layers or 2,
        )  # fmt: skip
    elif size != "full":
        raise ValueError(f"size is 'full' or 'tiny', not {size!r}")
    tokens = torch.zeros(config.batch, config.seq, dtype=torch.int64)
    return Decoder(config), (tokens, torch.zeros_like(tokens))
