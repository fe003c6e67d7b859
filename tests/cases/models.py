"""Models of the tests of this folder, each one built around one kind of fault of a planner; its docstring says which.

The functions beside them return (module, arguments) or (module, arguments, keyword arguments). Whatever a test expects to be
split divides by 4, so that it is the rule, not the size, that allows or forbids a placement on two axes of 2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Any, ...]]
CaseWithKeywords = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


# ---- parameters and inputs ----------------------------------------------------------------------------------------------
class SharedTable(nn.Module):
    """One weight under two names. Fault: counted, stored or placed twice, or one of its two gradients lost."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.scores = nn.Linear(width, words, bias=False)
        self.scores.weight = self.table.weight

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        state = self.mix(self.table(words)).tanh()
        scores = self.scores(state)
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))


def shared_table() -> Case:
    words = torch.randint(48, size=(4, 8))
    targets = torch.randint(48, size=(4, 8))
    return SharedTable(words=48, width=20), (words, targets)


class UntrainedParts(nn.Module):
    """Parameters without a gradient: never read, frozen, of integers. Fault: dropped, or given a gradient all the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trained = nn.Linear(width, width)
        self.unread = nn.Linear(width, 2 * width)
        self.gain = nn.Parameter(torch.rand(width) + 0.5, requires_grad=False)
        self.columns = nn.Parameter(torch.randperm(width), requires_grad=False)
        self.register_buffer("unread_buffer", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        shuffled = self.trained(x)[..., self.columns]
        return self.gain * shuffled


def untrained_parts() -> Case:
    return UntrainedParts(12), (torch.randn(4, 12),)


class OneWeightTwoArguments(nn.Module):
    """Called with one object as both arguments. Fault: the two inputs become one, which a later batch does not repeat."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left * (self.weight * right)


def repeated_argument() -> Case:
    both = torch.randn(8, 12)
    return OneWeightTwoArguments(12), (both, both)


class NestedArguments(nn.Module):
    """Tensors in dicts and keywords, one argument None. Fault: one lost or swapped; `offset` [width] taken for a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, sample: dict[str, Any], *, gate: Tensor, keep: Tensor | None = None, offset: Tensor) -> Tensor:
        y = offset - sample["known"]["base"] + gate * self.dense(sample["signal"])
        if keep is not None:
            y = y * keep
        return y


def nested_arguments() -> CaseWithKeywords:
    sample = {"signal": torch.randn(8, 20), "known": {"base": torch.randn(8, 20)}}
    keywords = {"offset": torch.randn(20), "keep": None, "gate": torch.rand(8, 1)}
    return NestedArguments(20), (sample,), keywords


def nested_arguments_in_another_order() -> CaseWithKeywords:
    module, args, keywords = nested_arguments()
    return module, args, dict(reversed(keywords.items()))


class OutputsOfEveryKind(nn.Module):
    """Outputs trained, used on the way, passed through, of positions, None. Fault: a gradient where there can be none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Linear(width, width)
        self.decode = nn.Linear(width, width)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        code = self.encode(x).tanh()
        decoded = self.decode(code)
        return {"decoded": decoded, "code": code, "given": x, "winner": code.argmax(dim=1), "cache": None}


def outputs_of_every_kind() -> Case:
    return OutputsOfEveryKind(12), (torch.randn(4, 12),)


# ---- attention ----------------------------------------------------------------------------------------------------------
class Heads(nn.Module):
    """Causal attention. Fault: split along the sequence or inside a head, or query heads parted from their key heads."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.grouped = head_dim, kv_heads < heads
        self.query = nn.Linear(heads * head_dim, heads * head_dim, bias=False)
        self.key = nn.Linear(heads * head_dim, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(heads * head_dim, kv_heads * head_dim, bias=False)
        self.join = nn.Linear(heads * head_dim, heads * head_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = (linear(x) for linear in (self.query, self.key, self.value))
        query, key, value = (t.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for t in projected)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return self.join(mixed.transpose(1, 2).flatten(2))


def heads_alone() -> Case:
    """Batch, sequence and head size divide by 3 and 4; the 8 heads by 4 only."""
    return Heads(heads=8, kv_heads=8, head_dim=12), (torch.randn(12, 24, 96),)


def heads_in_groups() -> Case:
    return Heads(heads=8, kv_heads=2, head_dim=12), (torch.randn(12, 24, 96),)


class ComplexRotation(nn.Module):
    """Rotary positions as complex factors in a buffer. Fault: a view as pairs of numbers splits the pairs."""

    rotation: Tensor

    def __init__(self, positions: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.dense = nn.Linear(heads * head_dim, heads * head_dim, bias=False)
        speeds = torch.logspace(0, -3, head_dim // 2)
        angles = torch.arange(positions).unsqueeze(1) * speeds
        self.register_buffer("rotation", torch.complex(angles.cos(), angles.sin()).unsqueeze(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.dense(x).unflatten(2, (self.heads, -1, 2))
        turned = torch.view_as_complex(pairs) * self.rotation[: x.shape[1]]
        return torch.view_as_real(turned).flatten(start_dim=3)


def complex_rotation() -> Case:
    return ComplexRotation(positions=12, heads=4, head_dim=8), (torch.randn(4, 12, 32),)


# ---- pending sums and precision -----------------------------------------------------------------------------------------
class AfterTwoProducts(nn.Module):
    """Linear and other functions of a product summed over a split dim. Fault: one that is not linear takes the parts."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, inner, bias=False)
        self.narrow = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        product = self.narrow(self.widen(x).tanh())
        linear = product * 3.0 + x
        return linear, product.relu(), product.amax(dim=1), torch.linalg.vector_norm(product)


def after_two_products() -> Case:
    return AfterTwoProducts(width=20, inner=48), (torch.randn(8, 20),)


class SquareAndDouble(nn.Module):
    """A tensor that meets itself. Fault: parts multiplied by parts; one use moved, the other not; one move paid twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.dense(x)
        square, double = y.mul(y), y.add(y)
        return square, double


def square_and_double() -> Case:
    return SquareAndDouble(20), (torch.randn(8, 20),)


class ProductInBfloat16(nn.Module):
    """Casts around a product. Fault: a cast that changes the placement, or that a pending gradient cannot pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width).normal_(std=width**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        low = x.to(torch.bfloat16) @ self.weight.to(torch.bfloat16).t()
        return low.to(torch.float32)


def product_in_bfloat16() -> Case:
    return ProductInBfloat16(20), (torch.randn(8, 20),)


# ---- indices, pieces, windows -------------------------------------------------------------------------------------------
class Pickings(nn.Module):
    """Indices from the end and lists of them. Fault: looked up in a part as if it were whole, or dims counted wrongly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.dense(x)
        last_position = y.select(1, -1)
        last_columns = y[..., -4:]
        one_listed, many_listed = y[:, [-3]], y[:, [1, 2, 4, 7]]
        last_row = y.select(0, -1)
        return last_position, last_columns, one_listed, many_listed.sum(dim=1), last_row


def pickings() -> Case:
    return Pickings(12), (torch.randn(4, 8, 12),)


class CutAndJoin(nn.Module):
    """Even and uneven pieces, stacked and joined. Fault: done part by part along the dim that is cut or joined."""

    def __init__(self, width: int, first: int) -> None:
        super().__init__()
        self.sizes = (first, width - first)
        self.dense = nn.Linear(width, width * 3, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        uneven, left, right = self.dense(x).chunk(chunks=3, dim=1)
        head, tail = uneven.split(self.sizes, dim=1)
        in_front, behind = (torch.stack((left, right), dim=dim) for dim in (0, 2))
        swapped, below = torch.cat((tail, head), dim=1), torch.cat((left, right))
        return in_front, behind, swapped, below


def cut_and_join() -> Case:
    return CutAndJoin(width=12, first=4), (torch.randn(4, 12),)


class TwoConvolutions(nn.Module):
    """Windows over 3 channels, then over many. Fault: pixels split without their border; channels that do not divide split."""

    def __init__(self, channels: tuple[int, int], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels[0], kernel_size=3, padding="same")
        self.shrink = nn.Conv2d(*channels, kernel_size=3, padding=1, stride=2)
        self.classify = nn.Linear(channels[1], classes)

    def forward(self, image: Tensor) -> Tensor:
        pixels = self.stem(image).relu()
        pixels = self.shrink(pixels).relu()
        return self.classify(pixels.flatten(2).mean(dim=2))


def two_convolutions() -> Case:
    return TwoConvolutions(channels=(12, 8), classes=4), (torch.randn(4, 3, 16, 8),)


def two_large_convolutions() -> Case:
    """Large enough for copies to cost more than they save."""
    return TwoConvolutions(channels=(64, 128), classes=16), (torch.randn(64, 3, 128, 128),)


# ---- random numbers and writes ------------------------------------------------------------------------------------------
class MovingAverage(nn.Module):
    """Writes a buffer. Fault: the write is lost without a word."""

    average: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dense(x)
        with torch.no_grad():
            self.average.lerp_(y.mean(dim=0), 0.2)
        return y - self.average


def moving_average() -> Case:
    return MovingAverage(12), (torch.randn(4, 12),)


class WritesInPlace(nn.Module):
    """Writes to a tensor, to a column and to a block of it, then dropout. Fault: a write lost or put elsewhere in a part;
    random numbers drawn alike, or else than on one device."""

    def __init__(self, width: int, dropped: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.thin = nn.Dropout(dropped)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dense(x).relu_() + x
        y[:, -1] = 1.0
        y[2:, 1:3] -= 0.5
        return self.thin(y.clamp_(min=-1.5))


def writes_and_dropout() -> Case:
    return WritesInPlace(20, dropped=0.4), (torch.randn(8, 20),)


class Jitter(nn.Module):
    """Noise of its own. Fault: every device draws other noise, or the same for other elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Jittered(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.jitter = nn.Linear(width, width), Jitter()

    def forward(self, x: Tensor) -> Tensor:
        return self.jitter(self.dense(x))


def jittered() -> Case:
    return Jittered(12), (torch.randn(4, 12),)


def writes() -> Case:
    return WritesInPlace(20, dropped=0.0), (torch.randn(8, 20),)


# ---- moves and labels ---------------------------------------------------------------------------------------------------
class OneStateManyReaders(nn.Module):
    """A split state that several products read whole. Fault: gathered once per reader; each gradient reduced by itself."""

    def __init__(self, width: int, readers: int) -> None:
        super().__init__()
        self.state = nn.Linear(width, width, bias=False)
        self.readers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(readers))

    def forward(self, x: Tensor) -> Tensor:
        state = self.state(x).tanh()
        read = [reader(state).sigmoid() for reader in self.readers]
        return torch.stack(read).sum(dim=0)


def one_state_many_readers() -> Case:
    return OneStateManyReaders(width=48, readers=3), (torch.randn(24, 48),)


def one_state_one_reader() -> Case:
    return OneStateManyReaders(width=48, readers=1), (torch.randn(24, 48),)


class WordsWithoutLabels(nn.Module):
    """A table and a loss over a vocabulary that can be split; some positions have no label. Fault: a word looked up where it is
    not held, a soft maximum per part, a mean of the means of parts: NaN where no position of a part has a label."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.scores = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        scores = self.scores(self.table(words).relu())
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def plan_inputs(self) -> dict[str, dict[str, int]]:
        return {name: {"batch_dim": 0, "high": 40} for name in ("words", "labels")}


def words_without_labels() -> Case:
    words = torch.randint(40, size=(4, 10))
    labels = words.roll(-1, dims=1)
    return WordsWithoutLabels(words=40, width=12), (words, labels)
