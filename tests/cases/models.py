"""Small models for the cases of this folder; each function returns (module, args) or (module, args, kwargs)."""

import torch
import torch.nn.functional as F
from torch import nn


class TiedLm(nn.Module):
    def __init__(self, v=64, d=16):
        super().__init__()
        self.embed = nn.Embedding(v, d)
        self.mid = nn.Linear(d, d, bias=False)
        self.head = nn.Linear(d, v, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.mid(self.embed(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tied_lm():
    ids = torch.randint(0, 64, (8, 12))
    return TiedLm(), (ids, ids.roll(-1, 1))


class SpareParts(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.used = nn.Linear(d, d)
        self.spare = nn.Linear(d, 3 * d)
        self.frozen = nn.Parameter(torch.randn(d), requires_grad=False)
        self.order = nn.Parameter(torch.arange(d).flip(0), requires_grad=False)
        self.register_buffer("idle", torch.zeros(5))

    def forward(self, x):
        return self.used(x)[:, self.order] * self.frozen


def spare_parts():
    return SpareParts(), (torch.randn(8, 16),)


class Reuse(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.fc = nn.Linear(d, d, bias=False)

    def forward(self, x):
        h = self.fc(x)
        return h * h, h + h


def reuse():
    return Reuse(), (torch.randn(16, 32),)


class Pair(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d))

    def forward(self, a, b):
        return a * self.w * b


def same_input_twice():
    x = torch.randn(16, 16)
    return Pair(), (x, x)


class Attention(nn.Module):
    def __init__(self, d=64, heads=8, kv_heads=8):
        super().__init__()
        self.hd, self.heads, self.kv_heads = d // heads, heads, kv_heads
        self.q = nn.Linear(d, heads * self.hd, bias=False)
        self.k = nn.Linear(d, kv_heads * self.hd, bias=False)
        self.v = nn.Linear(d, kv_heads * self.hd, bias=False)
        self.o = nn.Linear(heads * self.hd, d, bias=False)

    def forward(self, x):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, self.heads, self.hd).transpose(1, 2)
        k = self.k(x).view(b, s, self.kv_heads, self.hd).transpose(1, 2)
        v = self.v(x).view(b, s, self.kv_heads, self.hd).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o(y.transpose(1, 2).reshape(b, s, self.heads * self.hd))


def attention():
    return Attention(), (torch.randn(8, 16, 64),)


def attention_gqa():
    return Attention(kv_heads=2), (torch.randn(8, 16, 64),)


class ComplexRope(nn.Module):
    def __init__(self, s=16, heads=4, hd=8):
        super().__init__()
        self.heads, self.hd = heads, hd
        self.proj = nn.Linear(heads * hd, heads * hd, bias=False)
        f = torch.outer(torch.arange(s).float(), 10000.0 ** (-torch.arange(0, hd, 2) / hd))
        self.register_buffer("turn", torch.polar(torch.ones_like(f), f), persistent=False)

    def forward(self, x):
        b, s, _ = x.shape
        h = self.proj(x).view(b, s, self.heads, self.hd)
        c = torch.view_as_complex(h.unflatten(-1, (-1, 2)))
        return torch.view_as_real(c * self.turn[:s, None]).flatten(-2)


def complex_rope():
    return ComplexRope(), (torch.randn(8, 16, 32),)


class PendingSum(nn.Module):
    """The second product contracts the hidden dim; its result may be a pending sum."""

    def __init__(self, d=32, h=64):
        super().__init__()
        self.up = nn.Linear(d, h, bias=False)
        self.down = nn.Linear(h, d, bias=True)

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return 2 * y + x, F.relu(y), y.amax(-1), y.norm()


def pending_sum():
    return PendingSum(), (torch.randn(16, 32),)


class LowPrecision(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, d) / d**0.5)

    def forward(self, x):
        return F.linear(x.bfloat16(), self.w.bfloat16()).float()


def low_precision():
    return LowPrecision(), (torch.randn(16, 32),)


class Picks(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.fc = nn.Linear(d, d, bias=False)

    def forward(self, x):
        h = self.fc(x)
        return h[:, -1], h[..., -3:], h[:, [-2]], h[:, [0, 2, 3], :].sum(1), h[-1]


def picks():
    return Picks(), (torch.randn(8, 4, 16),)


class SplitJoin(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.fc = nn.Linear(d, 3 * d, bias=False)

    def forward(self, x):
        a, b, c = self.fc(x).chunk(3, -1)
        d, e = a.split([6, 10], -1)
        return torch.stack([b, c], 0), torch.stack([b, c], -1), torch.cat([e, d], -1), torch.cat([b, c], 0)


def split_join():
    return SplitJoin(), (torch.randn(8, 16),)


class SmallConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        h = F.relu(self.c2(F.relu(self.c1(x))))
        return self.out(h.mean((2, 3)))


def small_conv():
    return SmallConv(), (torch.randn(8, 3, 8, 8),)


class NamedInputs(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.fc = nn.Linear(d, d)

    def forward(self, batch, *, scale, mask=None, shift):
        h = self.fc(batch["x"]) * scale + shift - batch["extra"]["y"]
        return h if mask is None else h * mask


def named_inputs():
    batch = {"x": torch.randn(8, 16), "extra": {"y": torch.randn(8, 16)}}
    return NamedInputs(), (batch,), {"shift": torch.randn(16), "scale": torch.randn(8, 1), "mask": None}


class ManyOutputs(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.a = nn.Linear(d, d, bias=True)
        self.b = nn.Linear(d, d, bias=True)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return {"main": self.b(h), "mid": h, "same": x, "best": h.argmax(-1), "none": None}


def many_outputs():
    return ManyOutputs(), (torch.randn(8, 16),)


class RunningStats(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.fc = nn.Linear(d, d)
        self.register_buffer("mean", torch.zeros(d))

    def forward(self, x):
        h = self.fc(x)
        self.mean.mul_(0.9).add_(h.mean(0).detach(), alpha=0.1)
        return h - self.mean


def running_stats():
    return RunningStats(), (torch.randn(16, 16),)


class Noisy(nn.Module):
    def __init__(self, d=32, p=0.25):
        super().__init__()
        self.fc = nn.Linear(d, d)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        h = self.fc(x)
        h = F.relu(h, inplace=True) + x
        h[:, 0] = 0.0
        h[1:, 2:4] += 1.0
        h.clamp_(max=2.0)
        return self.drop(h)


def noisy():
    return Noisy(), (torch.randn(16, 32),)


def quiet():
    return Noisy(p=0.0), (torch.randn(16, 32),)
