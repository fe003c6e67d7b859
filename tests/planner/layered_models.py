"""Small models whose layers make checkpointing hard: buffers that change, several outputs, two stacks, sums outside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


class Counting(nn.Module):
    """Reads a buffer, writes it, and reads what it wrote."""

    average: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x) * self.scale + self.average)
        self.average.copy_(0.9 * self.average + 0.1 * y.detach().mean((0, 1)))
        return x + y * (1 + self.average)


class Pair(nn.Module):
    """Two tensors in, two out; the second skips the next layer's products."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.one(x)) * torch.sigmoid(z)
        return x + self.two(hidden), z + hidden


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.cos(x)
        for layer in self.layers:
            x, z = layer(x, z)
        return (x * z).mean()


class TwoStacks(nn.Module):
    """Encoder and decoder, both numbered from 0; sums outside the layers; one weight that all decoder layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(Pair() for _ in range(2))
        self.decoder[1].two.weight = self.decoder[0].two.weight

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = memory + torch.tanh(layer(memory))
        y, z = x, memory
        for layer in self.decoder:
            y, z = layer(y, z)
            y = y * torch.sigmoid(memory)
        return (y * z).mean()


def _batch(batch: int) -> tuple[Tensor]:
    return (torch.zeros(batch, 8, WIDTH),)


def counted(batch: int = 8) -> tuple[nn.Module, tuple[Tensor]]:
    return Counted(), _batch(batch)


def pairs(batch: int = 8) -> tuple[nn.Module, tuple[Tensor]]:
    return Pairs(), _batch(batch)


def two_stacks(batch: int = 8) -> tuple[nn.Module, tuple[Tensor]]:
    return TwoStacks(), _batch(batch)
