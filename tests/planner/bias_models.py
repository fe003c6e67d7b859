"""Models whose row-parallel products have biases."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TwoPaths(nn.Module):
    """Two branches side by side, as in a parallel transformer block: both end in a product with a bias, and are added."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gate, self.back = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.down(torch.relu(self.up(x))) + self.back(torch.tanh(self.gate(x))))


class Paths(nn.Module):
    """Blocks of two paths with a nonlinear op between them; few tokens and wide products, so that splitting weights is best."""

    def __init__(self, tokens: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.sizes = {"T": tokens, "D": width, "F": hidden}
        self.layers = nn.ModuleList(TwoPaths(width, hidden) for _ in range(layers))

    def plan_sizes(self) -> dict[str, int]:
        return self.sizes

    def plan_inputs(self) -> dict[str, dict[str, int]]:
        return {"x": {"batch_dim": 0}}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def paths(size: str = "full", layers: int = 2) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens, width, hidden = (512, 4096, 16384) if size == "full" else (8, 16, 32)
    return Paths(tokens, width, hidden, layers), (torch.randn(tokens, width),)
