"""A mixture-of-experts transformer as an ordinary PyTorch module: shared expert, top-k of many small experts, loss inside.

Sizes of 16B are those of "DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language Models"
(arXiv:2401.06066, section 5.1) and of the published checkpoint (`config.json` of deepseek-moe-16b-base): 28 layers, dim 2048,
16 heads of 128, 64 routed experts of width 1408 of which each token takes 6, 2 shared experts (one of twice the width), a first
layer with an ordinary feed-forward of 10,944, 102,400 tokens, context 4096, weight 0.001 of the balance loss.

Experts have a fixed capacity: of each sequence, an expert takes at most `capacity` tokens (a quarter more than its fair share),
in order; what is over is left to the shared expert and the residual stream. All shapes are therefore known in advance: tokens
are put into slots [experts, capacity] by a scatter of positions and a gather, every expert works on its slots as one batched
product, and tokens gather their results back. The dim of experts is an ordinary dim that can be split.

Inputs are token ids and labels, both int64 [batch, seq] (labels are the tokens shifted by one); the output is the mean
cross-entropy plus the balance loss, in float32. Not covered: balance across devices, dropping of sequences, jitter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sample_models.llama3 import RMSNorm, rotate


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of one model and of the batch it is traced with; `batch` counts sequences of all devices together.

    Attributes:
        layers: layers with experts; one more with an ordinary feed-forward comes first.
        ffn, shared_ffn, dense_ffn: width of one routed expert, of the shared expert, of the first layer's feed-forward.
        top: experts per token.
        capacity: slots per expert and sequence.
    """

    dim: int
    layers: int
    heads: int
    ffn: int
    shared_ffn: int
    dense_ffn: int
    experts: int
    top: int
    capacity: int
    vocab: int
    batch: int
    seq: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    balance: float = 0.001

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def capacity(seq: int, top: int, experts: int) -> int:
    """A quarter more than the fair share of the tokens of a sequence, rounded up to a multiple of 4."""
    return -(-seq * top * 5 // (experts * 16)) * 4


MOE_16B = Config(
    dim=2048, layers=27, heads=16, ffn=1408, shared_ffn=2816, dense_ffn=10944, experts=64, top=6,
    capacity=capacity(4096, 6, 64), vocab=102400, batch=64, seq=4096,
)  # fmt: skip
MOE_TINY = Config(
    dim=256, layers=2, heads=8, ffn=160, shared_ffn=320, dense_ffn=640, experts=16, top=2, capacity=capacity(128, 2, 16),
    vocab=2048, batch=32, seq=128,
)  # fmt: skip

CHECK = Config(
    dim=96, layers=2, heads=4, ffn=28, shared_ffn=60, dense_ffn=68, experts=8, top=2, capacity=6, vocab=76, batch=36, seq=20
)
"""Sizes of `size="tiny"`: those that can be split divide by 4; together with the sizes of a full model each tells what it is."""


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = (part(x).view(batch, seq, self.heads, self.head_dim) for part in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, dim))


class FeedForward(nn.Module):
    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """All routed experts of a layer as batched products over [batch, experts, capacity, dim]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.experts, config.ffn, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.experts, config.dim, config.ffn))
        self.w3 = nn.Parameter(torch.empty(config.experts, config.ffn, config.dim))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("becd,efd->becf", x, self.w1)) * torch.einsum("becd,efd->becf", x, self.w3)
        return torch.einsum("becf,edf->becd", hidden, self.w2)


class MixtureOfExperts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top, self.capacity, self.balance = config.top, config.capacity, config.balance
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared = FeedForward(config.dim, config.shared_ffn)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, seq, dim] -> the same, and the balance loss."""
        batch, seq, dim = x.shape
        probabilities = self.router(x).float().softmax(-1)
        weights, chosen = probabilities.topk(self.top, dim=-1)
        slot, taken, load = self.slots(chosen.view(batch, seq * self.top), probabilities.shape[-1])
        inside = self.experts(self.dispatch(x, slot)).reshape(batch, -1, dim)
        back = inside.gather(1, slot.clamp(max=inside.shape[1] - 1).unsqueeze(-1).expand(-1, -1, dim))
        weights = weights * taken.view(batch, seq, self.top)
        mixed = (back.view(batch, seq, self.top, dim) * weights.unsqueeze(-1).to(x.dtype)).sum(2)
        even = (load * probabilities.mean(1)).sum(-1).mean() * probabilities.shape[-1]
        return mixed + self.shared(x), self.balance * even

    def slots(self, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """chosen [batch, seq * top] -> the slot of each choice (one beyond the last if the expert is full), whether it got one,
        and the share of choices that fell on each expert [batch, experts]."""
        on_expert = (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).to(torch.int32)
        before = (on_expert.cumsum(1, dtype=torch.int32) * on_expert).sum(-1) - 1
        taken = before < self.capacity
        slot = torch.where(taken, chosen * self.capacity + before, experts * self.capacity)
        return slot, taken, on_expert.float().mean(1)

    def dispatch(self, x: Tensor, slot: Tensor) -> Tensor:
        """x [batch, seq, dim] -> [batch, experts, capacity, dim]; empty slots hold zeros."""
        batch, seq, dim = x.shape
        slots = self.experts.w1.shape[0] * self.capacity
        tokens = (torch.arange(seq * self.top, device=x.device) // self.top).expand(batch, -1)
        empty = torch.full((batch, slots + 1), seq, dtype=torch.int64, device=x.device)
        source = empty.scatter(1, slot, tokens)[:, :slots]
        filled = x.gather(1, source.clamp(max=seq - 1).unsqueeze(-1).expand(-1, -1, dim))
        filled = filled * (source < seq).unsqueeze(-1).to(x.dtype)
        return filled.view(batch, -1, self.capacity, dim)


class DenseBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.dense_ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class ExpertBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.moe = MixtureOfExperts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        mixed, balance = self.moe(self.ffn_norm(x))
        return x + mixed, balance


class Moe(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.first = DenseBlock(config)
        self.layers = nn.ModuleList(ExpertBlock(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation 0.006 (as in the paper)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.006)
            elif isinstance(module, Experts):
                for weight in module.parameters():
                    nn.init.normal_(weight, 0.0, 0.006)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        cos, sin = self.rotary(tokens.shape[1], x)
        x = self.first(x, cos, sin)
        balance = torch.zeros((), device=x.device)
        for layer in self.layers:
            x, extra = layer(x, cos, sin)
            balance = balance + extra
        logits = self.output(self.norm(x)).float()
        picked = F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1))
        return balance - picked.mean()

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
            "B": c.batch, "S": c.seq, "D": c.dim, "H": c.heads, "HD": c.head_dim, "F": c.ffn, "FS": c.shared_ffn,
            "FD": c.dense_ffn, "E": c.experts, "K": c.top, "C": c.capacity, "V": c.vocab, "HD2": c.head_dim // 2,
        }  # fmt: skip

    def plan_inputs(self) -> dict[str, dict[str, int]]:
        """Per input: the dim that counts samples, and the exclusive upper bound of its values."""
        return {name: {"batch_dim": 0, "high": self.config.vocab} for name in ("tokens", "labels")}


Made = tuple[nn.Module, tuple[Tensor, Tensor]]


def build(kind: type[Moe], full: Config, batch: int | None, seq: int | None, layers: int | None, size: str) -> Made:
    if size not in ("full", "tiny"):
        raise ValueError(f"size is 'full' or 'tiny', not {size!r}")
    depth = layers or full.layers
    if size == "full":
        length = seq or full.seq
        slots = capacity(length, full.top, full.experts)
        config = replace(full, batch=batch or full.batch, seq=length, layers=depth, capacity=slots)
    else:
        config = replace(CHECK, layers=depth)
    tokens = torch.zeros(config.batch, config.seq, dtype=torch.int64)
    return kind(config), (tokens, torch.zeros_like(tokens))


def moe_16b(*, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return build(Moe, MOE_16B, batch, seq, layers, size)


def moe_tiny(*, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return build(Moe, MOE_TINY, batch, seq, layers, size)
