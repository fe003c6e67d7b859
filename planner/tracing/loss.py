"""The scalar that training minimises, whatever the model returns.

A model that returns one scalar, or a dict with a scalar `loss` (as Hugging Face models do), says it itself. For any other a
stand-in is made: the sum of squares, in float32, of all floating-point outputs that need gradients. It has a gradient for every
such output and costs next to nothing, so a plan for it is a plan for the model, whatever loss is put behind it later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MODEL, STAND_IN = "planned_model", "stand_in_loss"
"""Names of the user's module and of the stand-in inside `WithLoss`."""

STAND_IN_MODULE = "loss"
"""Module path of the stand-in's ops in a graph."""


class SumOfSquares(nn.Module):
    """A constant zero if none of the outputs needs a gradient."""

    def forward(self, *outputs: Tensor) -> Tensor:
        total: Tensor | None = None
        for output in outputs:
            real = torch.view_as_real(output) if output.is_complex() else output
            wide = real.to(torch.float32)
            part = (wide * wide).sum()
            total = part if total is None else total + part
        return torch.zeros(()) if total is None else total


class WithLoss(nn.Module):
    """Calls the user's module and returns a scalar. Parameters and buffers get a prefix, which `user_name` takes away."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.planned_model = model
        self.stand_in_loss = SumOfSquares()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        made = self.planned_model(*args, **kwargs)
        own = own_loss(made)
        if own is not None:
            return own
        loss: Tensor = self.stand_in_loss(*trained_outputs(made))
        return loss


def own_loss(made: Any) -> Tensor | None:
    """The scalar a model returns, alone or under the name `loss`."""
    found = made.get("loss") if isinstance(made, dict) else made
    return found if isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point() else None


def trained_outputs(made: Any) -> list[Tensor]:
    """Floating-point tensors in nested tuples, lists and dicts that need gradients, in order; one listed twice counts twice."""
    if isinstance(made, Tensor):
        return [made] if made.requires_grad else []
    if isinstance(made, dict):
        return [tensor for part in made.values() for tensor in trained_outputs(part)]
    if isinstance(made, (tuple, list)):
        return [tensor for part in made for tensor in trained_outputs(part)]
    if made is None or isinstance(made, (bool, int, float, str)):
        return []
    raise TypeError(f"the model returns a {type(made).__name__}; return tensors, or tuples, lists or dicts of tensors")


def user_name(name: str) -> str:
    """A dotted name inside `WithLoss` as the user's module spells it."""
    head, _, rest = name.partition(".")
    return rest if head == MODEL else STAND_IN_MODULE if head == STAND_IN else name
