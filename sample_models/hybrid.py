"""A hybrid of state-space layers and attention as an ordinary PyTorch module: Mamba-2 with a few attention layers, loss inside.

Sizes of 2.7B are those of "Transformers are SSMs" (Dao and Gu, arXiv:2405.21060, section 9.2.3) and of the published checkpoint
(`config.json` of mamba2attn-2.7b): 64 layers of which 6 are attention, dim 2560, inner dim twice that in 80 heads of 64, state
128, convolution over 4 tokens, 30 attention heads of 128 with rotary embedding on half of each, tied embeddings; the table of
embeddings has 50,288 rows (50,277 rounded up to a multiple of 16), context 2048.

Simplified: only the channels go through a convolution, not the read and write vectors nor attention; read vectors are scaled by
the root of the state's length, as attention scales its scores (the projection before them could do the same).

The scan is the chunked form of the paper (section 6 and listing 1) in ordinary operators: within a chunk of tokens a masked
product like attention, between chunks a product with the decays of whole chunks; no step depends on the one before it.

Inputs are token ids and labels, both int64 [batch, seq] (labels are the tokens shifted by one); the output is the mean
cross-entropy in float32. Not covered: padding, inference with a state.
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
        heads, head_dim: of the state-space layers; `state` is the length of the state of one channel.
        chunk: tokens per chunk of the scan; the sequence is a multiple of it.
        attention_layers: numbers of the layers that are attention.
    """

    dim: int
    layers: int
    heads: int
    head_dim: int
    state: int
    conv: int
    chunk: int
    attention_layers: tuple[int, ...]
    attention_heads: int
    attention_head_dim: int
    vocab: int
    batch: int
    seq: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


HYBRID_2_7B = Config(
    dim=2560, layers=64, heads=80, head_dim=64, state=128, conv=4, chunk=256, attention_layers=(9, 18, 27, 36, 45, 56),
    attention_heads=30, attention_head_dim=128, vocab=50288, batch=64, seq=2048,
)  # fmt: skip
HYBRID_TINY = Config(
    dim=256, layers=3, heads=16, head_dim=32, state=64, conv=4, chunk=32, attention_layers=(1,), attention_heads=8,
    attention_head_dim=48, vocab=2048, batch=32, seq=128,
)  # fmt: skip

CHECK = Config(
    dim=88, layers=3, heads=12, head_dim=10, state=28, conv=4, chunk=6, attention_layers=(1,), attention_heads=8,
    attention_head_dim=32, vocab=116, batch=36, seq=24,
)  # fmt: skip
"""Sizes of `size="tiny"`: those that can be split divide by 4; together with the sizes of a full model each tells what it is."""


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.attention_heads, config.attention_head_dim
        self.wq, self.wk, self.wv = (nn.Linear(config.dim, self.heads * self.head_dim, bias=False) for _ in range(3))
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (part(x).view(batch, seq, self.heads, self.head_dim) for part in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (half_rotated(q, cos, sin), half_rotated(k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim))


def half_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first half of each head."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((rotate(first, cos, sin), second), dim=-1)


class StateSpace(nn.Module):
    """Mamba-2: gate, channels, read and write vectors and step sizes from x; convolution, scan, gated norm, projection back."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.inner, bias=False)
        self.channels = nn.Linear(config.dim, config.inner, bias=False)
        self.write = nn.Linear(config.dim, config.state, bias=False)
        self.read = nn.Linear(config.dim, config.state, bias=False)
        self.step = nn.Linear(config.dim, config.heads, bias=False)
        self.step_bias = nn.Parameter(torch.empty(config.heads))
        self.log_decay = nn.Parameter(torch.empty(config.heads))
        self.skip = nn.Parameter(torch.ones(config.heads))
        self.conv = nn.Conv1d(config.inner, config.inner, config.conv, groups=config.inner, padding=config.conv - 1)
        self.norm = RMSNorm(config.inner, config.norm_eps)
        self.out = nn.Linear(config.inner, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        c = self.config
        mixed = self.conv(self.channels(x).transpose(1, 2))[:, :, :seq]
        channels = F.silu(mixed).transpose(1, 2).reshape(batch, seq, c.heads, c.head_dim)
        steps = F.softplus(self.step(x).float() + self.step_bias)
        write, read = F.silu(self.write(x)), F.silu(self.read(x)) * c.state**-0.5
        scanned = scan(channels, steps, -self.log_decay.float().exp(), write, read, c.chunk)
        scanned = scanned + channels * self.skip.unsqueeze(-1)
        gated = scanned.reshape(batch, seq, c.inner) * F.silu(self.gate(x))
        return self.out(self.norm(gated))


def scan(x: Tensor, steps: Tensor, decay: Tensor, write: Tensor, read: Tensor, chunk: int) -> Tensor:
    """h_t = exp(decay * step_t) h_{t-1} + step_t * write_t x_t;  y_t = read_t h_t, for all t at once.

    Args:
        x: [batch, seq, heads, head_dim]; steps: float32 [batch, seq, heads]; decay: float32 [heads], negative.
        write, read: [batch, seq, state], the same for all heads.
    """
    batch, seq, heads, _ = x.shape
    chunks = seq // chunk
    log_decays = (steps * decay).view(batch, chunks, chunk, heads)
    scaled = (x * steps.unsqueeze(-1).to(x.dtype)).view(batch, chunks, chunk, heads, -1)
    write, read = write.view(batch, chunks, chunk, -1), read.view(batch, chunks, chunk, -1)
    total = log_decays.cumsum(2)
    within = decays_between(total.permute(0, 1, 3, 2)).to(x.dtype)  # [batch, chunks, heads, to, from]
    scores = torch.einsum("bctn,bcsn->bcts", read, write).unsqueeze(2) * within
    inside = torch.einsum("bchts,bcshp->bcthp", scores, scaled)
    to_end = (total[:, :, -1:] - total).exp().to(x.dtype)
    states = torch.einsum("bcshp,bcsn->bchpn", scaled * to_end.unsqueeze(-1), write)
    carried = carry(states, total[:, :, -1])
    across = torch.einsum("bctn,bchpn->bcthp", read, carried) * total.exp().to(x.dtype).unsqueeze(-1)
    return (inside + across).reshape(batch, seq, heads, -1)


def carry(states: Tensor, log_decays: Tensor) -> Tensor:
    """What each chunk begins with: states [batch, chunks, heads, head_dim, state] of the chunks before it, decayed by the chunks
    between; log_decays [batch, chunks, heads] of whole chunks."""
    before = F.pad(log_decays.cumsum(1).permute(0, 2, 1), (1, 0))[:, :, :-1]  # [batch, heads, chunks], up to the chunk's begin
    after = log_decays.cumsum(1).permute(0, 2, 1)
    chunks = before.shape[-1]
    order = torch.arange(chunks, device=states.device)
    earlier = order < order.unsqueeze(-1)
    differences = torch.where(earlier, before.unsqueeze(-1) - after.unsqueeze(-2), float("-inf"))
    return torch.einsum("bhzc,bchpn->bzhpn", differences.exp().to(states.dtype), states)


def decays_between(total: Tensor) -> Tensor:
    """total [..., tokens]: cumulated logarithms -> [..., to, from]: decay from one token to a later one, 0 to an earlier one."""
    tokens = torch.arange(total.shape[-1], device=total.device)
    differences = total.unsqueeze(-1) - total.unsqueeze(-2)
    return torch.where(tokens <= tokens.unsqueeze(-1), differences, float("-inf")).exp()


class Layer(nn.Module):
    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.is_attention = number in config.attention_layers
        if self.is_attention:
            self.attention = Attention(config)
        else:
            self.state_space = StateSpace(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + (self.attention(normed, cos, sin) if self.is_attention else self.state_space(normed))


class Hybrid(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Step sizes around 0.01 (softplus of -4.6), decays between 1 and 16 as in the paper, the rest normal."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.02)
            elif isinstance(module, StateSpace):
                nn.init.constant_(module.step_bias, -4.6)
                nn.init.uniform_(module.log_decay, 0.0, 2.7725887)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.rotary(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        picked = F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1))
        return -picked.mean()

    def rotary(self, seq: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [seq, 1, head_dim / 4] of the rotary angles, computed in float32, in the dtype of `like`."""
        width = self.config.attention_head_dim // 2
        exponents = torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width
        positions = torch.arange(seq, device=like.device, dtype=torch.float32)
        angles = torch.outer(positions, self.config.rope_base**-exponents).unsqueeze(1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def plan_sizes(self) -> dict[str, int]:
        """Names for the sizes that occur in shapes; an exported script is written in these."""
        c = self.config
        return {
            "B": c.batch, "S": c.seq, "D": c.dim, "H": c.heads, "HD": c.head_dim, "N": c.state, "L": c.chunk,
            "CH": c.seq // c.chunk,
            "AH": c.attention_heads, "AD": c.attention_head_dim, "V": c.vocab,
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
        if config.seq % config.chunk:
            raise ValueError(f"a sequence of {config.seq} is no multiple of the chunk of {config.chunk} tokens")
    else:
        config = replace(CHECK, layers=depth, attention_layers=full.attention_layers)
    tokens = torch.zeros(config.batch, config.seq, dtype=torch.int64)
    return Hybrid(config), (tokens, torch.zeros_like(tokens))


def hybrid_2_7b(*, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return _build(HYBRID_2_7B, batch, seq, layers, size)


def hybrid_tiny(*, batch: int | None = None, seq: int | None = None, layers: int | None = None, size: str = "full") -> Made:
    return _build(HYBRID_TINY, batch, seq, layers, size)
