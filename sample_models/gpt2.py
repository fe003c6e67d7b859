"""GPT-2 as an ordinary PyTorch module: LayerNorm, biases, learned positions, GELU, tied embeddings, loss inside.

Sizes are those of table 2 of "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019): layers 12 / 48, width
768 / 1600, context 1024, with 12 / 25 heads and 50,257 tokens as in the published checkpoints (`hparams.json`). The table of
embeddings has 50,304 rows, the next multiple of 64, as training code for GPU clusters pads it (nanoGPT does the same).

Inputs are token ids and labels, both int64 [batch, seq] (labels are the tokens shifted by one); the output is the mean
cross-entropy in float32. Dropout, which the original used at 0.1, is left out. Not covered: padding, inference with a cache.
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
    ffn: int
    vocab: int
    context: int
    batch: int
    seq: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


GPT2_SMALL = Config(dim=768, layers=12, heads=12, ffn=3072, vocab=50304, context=1024, batch=64, seq=1024)
GPT2_XL = Config(dim=1600, layers=48, heads=25, ffn=6400, vocab=50304, context=1024, batch=64, seq=1024)
GPT2_TINY = Config(dim=256, layers=2, heads=8, ffn=1024, vocab=2048, context=128, batch=32, seq=128)

CHECK = Config(dim=96, layers=2, heads=8, ffn=176, vocab=112, context=56, batch=40, seq=16)
"""Sizes of `size="tiny"`: each divides by 4, so that it can be split over two axes of 2; no size equals another or a product of
two others. The context is larger than a sequence, so positions are cut from their table at both sizes."""


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.query = nn.Linear(config.dim, config.dim)
        self.key = nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = (
            part(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, seq, dim))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc = nn.Linear(config.dim, config.ffn)
        self.proj = nn.Linear(config.ffn, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.dim)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.dim)
        self.wpe = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.head.weight = self.wte.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation 0.02, projections into the residual stream smaller by the root of their number."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                into_residual = name.endswith(".proj")
                nn.init.normal_(module.weight, 0.0, 0.02 * ((2 * self.config.layers) ** -0.5 if into_residual else 1.0))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x)).float()
        picked = F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1))
        return -picked.mean()

    def plan_sizes(self) -> dict[str, int]:
        """Names for the sizes that occur in shapes; an exported script is written in these."""
        c = self.config
        return {
            "B": c.batch, "S": c.seq, "D": c.dim, "H": c.heads, "HD": c.head_dim, "F": c.ffn, "V": c.vocab, "C": c.context,
        }  # fmt: skip

    def plan_inputs(self) -> dict[str, dict[str, int]]:
        """Per input: the dim that counts samples, and the exclusive upper bound of its values."""
        return {name: {"batch_dim": 0, "high": self.config.vocab} for name in ("tokens", "labels")}


Made = tuple[nn.Module, tuple[Tensor, Tensor]]


def _build(full: Config, batch: int | None, seq: int | None, layers: int | None, size: str) -> Made:
    if size not in ("full", "tiny"):
        raise ValueError(f"size is 'full' or 'tiny', not {size!r}")
    depth = layers or full.layers
    if size == "full":
        config = replace(full, batch=batch or full.batch, seq=seq or full.seq, layers=depth)
        if config.seq > config.context:
            raise ValueError(f"GPT-2 has positions for {config.context} tokens, not {config.seq}")
    else:
        config = replace(CHECK, layers=depth)
    tokens = torch.zeros(config.batch, config.seq, dtype=torch.int64)
    return Gpt2(config), (tokens, torch.zeros_like(tokens))


def gpt2_small(*, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return _build(GPT2_SMALL, batch, seq, layers, size)


def gpt2_xl(*, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return _build(GPT2_XL, batch, seq, layers, size)


def gpt2_tiny(*, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return _build(GPT2_TINY, batch, seq, layers, size)
