"""The truth that exported files are compared with."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planner.errors import TraceError
from planner.graph import ModelRequest
from planner.tracing.reference import reference_step

MODEL = """
import torch
from torch import nn

class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return ((x.to(torch.bfloat16) @ self.w.to(torch.bfloat16)).float() ** 2).sum()

def make():
    return Cast(), (torch.zeros(3, 4),)
"""


def request(folder: Path) -> ModelRequest:
    path = folder / "cast.py"
    path.write_text(MODEL)
    return ModelRequest(model=f"{path}:make", precision="as-traced")


def test_casts_inside_the_module_are_float32_too(tmp_path: Path) -> None:
    w, x = torch.randn(4, 4), torch.randn(3, 4)
    got = reference_step(request(tmp_path), {"parameters": {"w": w}, "buffers": {}, "inputs": {"x": x}})
    exact = w.clone().requires_grad_()
    ((x @ exact) ** 2).sum().backward()
    assert torch.allclose(got["grads"]["w"], exact.grad, rtol=1e-6)


def test_other_parameters_than_planned_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not those of the plan: v, w"):
        reference_step(request(tmp_path), {"parameters": {"v": torch.zeros(4, 4)}, "buffers": {}, "inputs": {}})


def test_a_model_built_on_meta_gets_its_values() -> None:
    """The sample model at check sizes: the loss of zero weights is that of equal logits, log of the vocabulary."""
    asked = replace(ModelRequest(model="llama3-tiny", layers=1), size="tiny")
    from planner.tracing.sources import find_factory, sizes_for

    factory = find_factory(asked.model)
    module, args = factory(**sizes_for(factory, asked))[:2]
    shapes = {name: p.shape for name, p in module.named_parameters()}
    vocab = shapes["output.weight"][0]
    inputs = {name: torch.zeros(tensor.shape, dtype=torch.long) for name, tensor in zip(("tokens", "labels"), args, strict=True)}
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
    got = reference_step(asked, {"parameters": zeros, "buffers": {}, "inputs": inputs})
    assert got["loss"].item() == pytest.approx(torch.log(torch.tensor(float(vocab))).item(), rel=1e-6)
