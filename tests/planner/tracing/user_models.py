"""Models as a user would write them, each with what a tracer can trip over. Loaded by the tests as `user_models.py:factory`."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SCALE = 2.0


class Mlp(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.first, self.second = nn.Linear(16, hidden), nn.Linear(hidden, 16)

    def forward(self, x):
        return F.mse_loss(self.second(F.relu(self.first(x))) * SCALE, x)


def mlp():
    return Mlp(), (torch.randn(8, 16),)


def mlp_with_sizes(batch=8):
    return Mlp(), (torch.randn(batch, 16),)


class TiedLm(nn.Module):
    """The table is also the head; labels may be ignored; the loss flattens its input."""

    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(64, 16), nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.mid(self.embed(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def tied_lm():
    ids = torch.randint(0, 64, (8, 12))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return TiedLm(), (ids, labels)


class SpareParts(nn.Module):
    """Parameters that are unused, frozen or whole numbers, and an idle buffer."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(16, 16), nn.Linear(16, 48)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.order = nn.Parameter(torch.arange(16).flip(0), requires_grad=False)
        self.register_buffer("idle", torch.zeros(5))
        self.register_buffer("offset", torch.full((16,), 0.5))

    def forward(self, x):
        return ((self.used(x) + self.offset)[:, self.order] * self.frozen).pow(2).mean()


def spare_parts():
    return SpareParts(), (torch.randn(8, 16),)


class NamedInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, batch, *, scale, mask=None, shift):
        h = self.fc(batch["x"]) * scale + shift - batch["extra"]["y"]
        return (h if mask is None else h * mask).pow(2).mean()


def named_inputs():
    batch = {"x": torch.randn(8, 16), "extra": {"y": torch.randn(8, 16)}}
    return NamedInputs(), (batch,), {"shift": torch.randn(16), "scale": torch.randn(8, 1), "mask": None}


class SelfAttention(nn.Module):
    """Grouped heads without repetition, biases, layer norm, gelu, an additive in-place write, a written-out constant."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.kv, self.out = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 64)

    def forward(self, x):
        b, s, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(b, s, 8, 8).transpose(1, 2)
        k, v = self.kv(h).view(b, s, 2, 16).transpose(1, 2).chunk(2, -1)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = F.gelu(self.out(h.transpose(1, 2).reshape(b, s, 64))) * 1.0
        h[:, 1:, :4] += 1.0
        h = h @ self.out.weight
        return h[:, [0, 2, 3]].sum() / 7 + torch.softmax(h, -1).mul(torch.tensor([2.0] * 64)).mean()


def self_attention():
    return SelfAttention(), (torch.randn(4, 6, 64),)


class OwnInit(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(8, 8) / 4)
        self.shifted = nn.Parameter(torch.rand(8) * 2 - 1)
        self.truncated = nn.Parameter(torch.empty(8, 8))
        self.row_apart = nn.Parameter(torch.empty(8, 8))
        self.linear, self.padded = nn.Linear(8, 8), nn.Embedding(8, 8, padding_idx=0)
        self.norm = nn.LayerNorm(8)
        nn.init.trunc_normal_(self.truncated)
        nn.init.normal_(self.row_apart, 0.0, 0.5)
        with torch.no_grad():
            self.row_apart[0].zero_()
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.normal_(self.linear.weight, 0.25, 0.125)
        nn.init.zeros_(self.linear.bias)

    def forward(self, ids):
        h = self.norm(self.linear(self.padded(ids)) * self.shifted)
        return (h @ self.scaled @ self.truncated @ self.row_apart).mean()


def own_init():
    return OwnInit(), (torch.randint(0, 8, (4, 6)),)


class ManyOutputs(nn.Module):
    """Nested, with None, a number, positions, an input returned as it is, a tensor that is output and operand, views."""

    def __init__(self):
        super().__init__()
        self.loss = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        h = torch.tanh(self.loss(x))
        main = self.head(h)
        return {"main": main, "mid": h, "same": x, "best": h.argmax(-1), "none": None, "more": [(main[:, -1], 3), main[1:]]}


def many_outputs():
    return ManyOutputs(), (torch.randn(8, 16),)


class NamedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        h = self.fc(x)
        return {"loss": h.exp().mean(), "logits": h}


def named_loss():
    return NamedLoss(), (torch.randn(8, 16),)


# ---- buffers ------------------------------------------------------------------------------------------------------------
class Tables(nn.Module):
    """Buffers as models make them: frequencies, a mask, positions, waves written row by row, numbers from lists and arrays."""

    def __init__(self, seq=12, heads=4, width=32, base=10000.0):
        super().__init__()
        self.heads = heads
        self.sizes = {"S": seq, "H": heads, "HD": width // heads, "D": width}
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        rates = torch.arange(0, width // heads, 2, dtype=torch.int64).float() / (width // heads)
        self.register_buffer("inv_freq", 1.0 / base**rates, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(seq, seq)).view(1, 1, seq, seq))
        self.register_buffer("positions", torch.arange(seq).expand((1, -1)), persistent=False)
        waves = torch.zeros(seq, width)
        speed = torch.exp(torch.arange(0, width, 2).float() * (-math.log(base) / width))
        waves[:, 0::2] = torch.sin(torch.arange(seq).unsqueeze(1) * speed)
        waves[:, 1::2] = torch.cos(torch.arange(seq).unsqueeze(1) * speed)
        self.register_buffer("waves", waves)
        self.register_buffer("slopes", torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]).view(1, heads, 1, 1))
        self.register_buffer("bends", torch.tensor([math.sin(i) for i in range(4 * width)]).view(4, width)[1])
        self.register_buffer("features", torch.randn(width, width) / 4)
        self.register_buffer("table", torch.full((seq,), -1).scatter_(0, torch.tensor([1, 3]), torch.tensor([5, 6])))

    def plan_sizes(self):
        return self.sizes

    def forward(self, x):
        b, s, d = x.shape
        h = (x + self.waves) @ self.features + self.bends + self.table.unsqueeze(-1)
        q = self.q(h).view(b, s, self.heads, -1).transpose(1, 2)
        angles = self.positions.float()[..., None] * self.inv_freq
        angles = torch.cat((angles, angles), -1)[:, None]
        q = q * angles.cos() + q.roll(1, -1) * angles.sin()
        scores = (q @ q.transpose(-1, -2) + self.slopes).masked_fill(self.mask[:, :, :s, :s] == 0, float("-inf"))
        return self.out((scores.softmax(-1) @ q).transpose(1, 2).reshape(b, s, d)).pow(2).mean()


def tables(size="full"):
    full = size == "full"
    module = Tables(seq=12, heads=4, width=32) if full else Tables(seq=8, heads=2, width=8)
    return module, (torch.randn(8 if full else 4, 12 if full else 8, 32 if full else 8),)


class Statistics(nn.Module):
    """Buffers that a step writes: running statistics, a counter, a moving average, the last batch; two are read after that."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(8, 8), persistent=False)

    def forward(self, x):
        self.steps += 1
        h = self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))
        with torch.no_grad():
            self.average.lerp_(h.float().mean(0), 0.1)
            self.last.copy_(h)
        return (h * (self.average + 1)).pow(2).mean() / self.steps


def statistics():
    return Statistics(), (torch.randn(8, 4, 8, 8),)


class Averaged(nn.Module):
    """A moving average of a weight, as large as the weight, in each of two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(AveragedLayer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class AveragedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.register_buffer("slow", torch.zeros(16, 16))

    def forward(self, x):
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.weight, alpha=0.1)
        return x @ self.weight + x @ self.slow


def averaged():
    return Averaged(), (torch.randn(8, 16),)


class ManyNumbers(nn.Module):
    """Numbers from outside: few of them, and far too many."""

    def __init__(self, count):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("outside", torch.frombuffer(random_bytes(count), dtype=torch.uint8).float().view(-1, 16))

    def forward(self, x):
        return (self.fc(x) + self.outside.mean(0)).pow(2).mean()


def random_bytes(count):
    state, out = 1, bytearray()
    for _ in range(count):
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        out.append(state >> 56)
    return out


def few_numbers():
    return ManyNumbers(256), (torch.randn(8, 16),)


def many_numbers():
    return ManyNumbers(1 << 20), (torch.randn(8, 16),)


# ---- dropout, activation checkpointing ------------------------------------------------------------------------------------
class DroppingLayer(nn.Module):
    """Attention probabilities, two sites of one module, a function; the layer may be checkpointed by its owner."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.25)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (part.view(b, s, 4, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True).transpose(1, 2).reshape(b, s, 32)
        x = x + self.drop(self.out(h))
        return x + self.drop(self.down(F.dropout(F.gelu(self.up(x)), 0.1)))


class Dropping(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.layers = nn.ModuleList(DroppingLayer() for _ in range(2))
        self.channels, self.written = nn.Dropout1d(0.5), nn.Dropout(0.3, inplace=True)
        self.idle = nn.Dropout(0.0)

    def forward(self, x):
        h = F.dropout(self.first(x), 0.1)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.checkpointed else layer(h)
        return self.channels(self.last(self.idle(self.written(h * 1.0)))).pow(2).mean()


def dropping():
    return Dropping(checkpointed=False), (torch.randn(8, 12, 16),)


def dropping_checkpointed():
    return Dropping(checkpointed=True), (torch.randn(8, 12, 16),)


class Checkpointed(nn.Module):
    """Linears inside a checkpointed region, called the old way and the new way."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, x):
        x = x + checkpoint(self.layers[0], x, use_reentrant=True)
        return (x + checkpoint(self.layers[1], x, use_reentrant=False)).pow(2).mean()


def checkpointed():
    return Checkpointed(), (torch.randn(4, 8, 16),)


# ---- convolutions, complex numbers, indices, writes -----------------------------------------------------------------------
class Convolutions(nn.Module):
    """One dim: strides, a depthwise one, groups, dilation without bias."""

    def __init__(self):
        super().__init__()
        self.halve, self.apart = nn.Conv1d(8, 16, 5, stride=2, padding=2), nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.grouped, self.wide = nn.Conv1d(16, 8, 1, groups=4), nn.Conv1d(8, 8, 3, padding=2, dilation=2, bias=False)

    def forward(self, x):
        return self.wide(F.silu(self.grouped(self.apart(self.halve(x)))))


def convolutions():
    return Convolutions(), (torch.randn(4, 8, 16),)


class Windows(nn.Module):
    """Two dims: patches, groups, a channel multiplier, a transposed convolution, pooling."""

    def __init__(self):
        super().__init__()
        self.patch, self.grouped = nn.Conv2d(4, 8, 4, stride=4), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.more, self.back = nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = self.back(self.more(self.grouped(self.patch(x)).relu()))
        return self.head(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1).flatten(1))


def windows():
    return Windows(), (torch.randn(4, 4, 16, 16),)


class ComplexRotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(32, 32)
        angles = torch.outer(torch.arange(12.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x):
        pairs = torch.view_as_complex(self.dense(x).float().unflatten(2, (4, 4, 2)))
        return torch.view_as_real(pairs * self.turns[: x.shape[1], None]).flatten(2)


def complex_rotation():
    return ComplexRotation(), (torch.randn(4, 12, 32),)


class Pickings(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(12, 12)

    def forward(self, x):
        y = self.dense(x)
        ends = y[:, -1], y[..., [0, -1]], y[-2:], y[:, None, 2:-1]
        return *ends, y[:, torch.tensor([1, 2, -1])], y[[0, 2], :, [1, 3]], y[..., ::2], y.flip(1)[:, :3]


def pickings():
    return Pickings(), (torch.randn(4, 8, 12),)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(12, 12)

    def forward(self, x):
        y = self.dense(x).clone()
        y.mul_(2)
        y[:, 0] = 0
        y[:, 2:4].add_(1)
        y[y.detach() > 1.5] = 0.0
        y.masked_fill_(y < -1.0, -1)
        z = torch.zeros_like(y)
        z[:, :6] = y[:, 6:]
        z.index_add_(0, torch.tensor([0, 1]), y[:2])
        return z + y.t().t()


def writes():
    return Writes(), (torch.randn(4, 12),)


# ---- operators of the user's own ------------------------------------------------------------------------------------------
@torch.library.custom_op("user_models::soft_cut", mutates_args=())
def soft_cut(x: Tensor, height: float) -> Tensor:
    return height * torch.tanh(x / height)


@torch.library.custom_op("user_models::soft_cut_backward", mutates_args=())
def soft_cut_backward(gradient: Tensor, out: Tensor, height: float) -> Tensor:
    return gradient * (1 - (out / height) ** 2)


@soft_cut.register_fake
def _(x, height):
    return torch.empty_like(x)


@soft_cut_backward.register_fake
def _(gradient, out, height):
    return torch.empty_like(out)


def _keep(ctx, inputs, output):
    ctx.height = inputs[1]
    ctx.save_for_backward(output)


soft_cut.register_autograd(lambda ctx, g: (soft_cut_backward(g, *ctx.saved_tensors, ctx.height), None), setup_context=_keep)


class SoftCut(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(soft_cut(self.up(x), 0.5)).pow(2).mean()


def own_operator():
    return SoftCut(), (torch.randn(8, 16),)


# ---- what cannot be traced ----------------------------------------------------------------------------------------------
class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(16))


class BadShape(Failing):
    def forward(self, x):
        return (self.fc(x) + torch.ones(7)).sum()  # bad_shape


class DataBranch(Failing):
    def forward(self, x):
        h = self.fc(x)
        return (h * 2 if h.sum().item() > 0 else h).sum()  # data_branch


class Raises(Failing):
    def forward(self, x):
        raise ValueError("no such thing")  # raises


class DataShape(Failing):
    def forward(self, x):
        h = self.fc(x)
        return h[h > 0].sum()  # data_shape


class Positions(Failing):
    def forward(self, x):
        return self.fc(x).argmax(-1), None, 3


class Holder:
    def __init__(self, value):
        self.value = value


class ReturnsUnknown(Failing):
    def forward(self, x):
        return Holder(self.fc(x))


class Random(Failing):
    def forward(self, x):
        return (self.fc(x) + torch.rand(16)).sum()  # random


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x):
        total = self.fc(x)
        dist.all_reduce(total)  # reduces
        return total.sum()


class Reducing(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixing = Mixing()

    def forward(self, x):
        return self.mixing(x)


def reduces():
    return Reducing(), (torch.randn(8, 16),)


def wrapped():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.DataParallel(Mlp())

        def forward(self, x):
            return self.inner(x)

    return Holder(), (torch.randn(8, 16),)


def laid_out():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    module, args = Reducing(), (torch.randn(8, 16),)
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    weight = DTensor.from_local(module.mixing.fc.weight.detach(), mesh, [Replicate()], run_check=False)
    module.mixing.fc.weight = nn.Parameter(weight)
    return module, args


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0].sum()


def recurrent():
    return Recurrent(), (torch.randn(4, 3, 16),)


class WritesWeight(Failing):
    def forward(self, x):
        with torch.no_grad():
            self.fc.weight.clamp_(-1.0, 1.0)  # writes_weight
        return self.fc(x).sum()


class WritesInput(Failing):
    def forward(self, x):
        x.add_(1.0)  # writes_input
        return self.fc(x).sum()


class NoParameters(nn.Module):
    def forward(self, x):
        return x.sum()


def bad_shape():
    return BadShape(), (torch.randn(8, 16),)


def data_branch():
    return DataBranch(), (torch.randn(8, 16),)


def raises():
    return Raises(), (torch.randn(8, 16),)


def data_shape():
    return DataShape(), (torch.randn(8, 16),)


def returns_positions():
    return Positions(), (torch.randn(8, 16),)


def returns_unknown():
    return ReturnsUnknown(), (torch.randn(8, 16),)


def random():
    return Random(), (torch.randn(8, 16),)


def writes_weight():
    return WritesWeight(), (torch.randn(8, 16),)


def writes_input():
    return WritesInput(), (torch.randn(8, 16),)


def no_parameters():
    return NoParameters(), (torch.randn(8, 16),)


def fails_to_build():
    raise RuntimeError("the configuration is missing")  # fails_to_build


def returns_module_only():
    return Mlp()


def builds_with_values():
    """Reads a value while building: impossible on the meta device."""
    rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
    return Mlp(hidden=8 * len(rates)), (torch.randn(8, 16),)
