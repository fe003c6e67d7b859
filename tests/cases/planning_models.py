"""Models of `test_planning.py`: small ones whose sizes are the point. The functions return (module, arguments)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Case = tuple[nn.Module, tuple[Tensor, ...]]


class TwoLayers(nn.Module):
    """Two products with a function between. Fault: sizes that do not divide taken as if they did."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def nine_outputs() -> Case:
    return TwoLayers(16, 32, 9), (torch.randn(24, 16),)


def sizes_of_three() -> Case:
    return TwoLayers(36, 72, 36), (torch.randn(18, 36),)


def sizes_of_two() -> Case:
    return TwoLayers(32, 64, 32), (torch.randn(16, 32),)


class LargeAndSmall(nn.Module):
    """One large weight and many small ones. Fault: a budget that counts tensors instead of bytes."""

    def __init__(self, width: int, small: int) -> None:
        super().__init__()
        self.large = nn.Linear(width, width, bias=False)
        self.small = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(small))

    def forward(self, x: Tensor) -> Tensor:
        x = self.large(x)
        for scale in self.small:
            x = x * scale
        return x.square().mean()


def large_and_small() -> Case:
    return LargeAndSmall(256, 6), (torch.randn(8, 256),)


class ShortOffset(nn.Module):
    """A parameter with fewer elements than the mesh has devices. Fault: it is split, or the budget expects that it could be."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(4))
        self.dense = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return (x.reshape(-1, 16, 4) + self.offset).square().mean()


def short_offset() -> Case:
    return ShortOffset(), (torch.randn(16, 64),)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Deep(nn.Module):
    """Equal blocks. Fault: a pin on one acts on all, or tying them is sold as the optimum."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def deep_2() -> Case:
    return Deep(512, 2), (torch.randn(512, 512),)


def deep_4() -> Case:
    return Deep(512, 4), (torch.randn(512, 512),)


def deep_8() -> Case:
    return Deep(512, 8), (torch.randn(512, 512),)
