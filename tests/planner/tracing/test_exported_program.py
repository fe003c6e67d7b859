"""Programs of `torch.export.save` as models: the same graph as the module they were made from, and clear words where not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner import Mesh, Workbench, pipeline
from planner.errors import InputError, UnknownModelError
from planner.graph import JointGraph, ModelRequest
from planner.tracing.trace import trace
from tests.oracles.random_plan import random_plan


class Small(nn.Module):
    """Attention, a table, a buffer; a loss if labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.register_buffer("scale", torch.arange(32.0) / 32)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.table(tokens) * self.scale
        for layer in self.layers:
            heads = layer(x).view(4, 8, 4, 8).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            x = mixed.transpose(1, 2).reshape(4, 8, 32) + torch.matmul(x, layer.weight)
        return x if labels is None else nn.functional.cross_entropy(x.view(-1, 32), labels.view(-1))


FACTORY = """
import torch
from tests.planner.tracing.test_exported_program import Small

def with_loss():
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    return Small(), (tokens, tokens.clone())
"""


def saved(folder: Path, *, labels: bool, device: str = "cpu") -> Path:
    tokens = torch.zeros(4, 8, dtype=torch.int64, device=device)
    with torch.device(device):
        program = torch.export.export(Small(), (tokens, tokens.clone()) if labels else (tokens,))
    path = folder / "program.pt2"
    torch.export.save(program, path)
    return path


def traced(path: Path) -> JointGraph:
    return trace(ModelRequest(model=str(path), precision="as-traced"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_program_gives_the_graph_of_its_module(tmp_path: Path, device: str) -> None:
    found = traced(saved(tmp_path, labels=True, device=device))
    factory = tmp_path / "factory.py"
    factory.write_text(FACTORY)
    own = trace(ModelRequest(model=f"{factory}:with_loss", precision="as-traced"))
    assert Counter(node.name for node in found.nodes) == Counter(node.name for node in own.nodes)
    assert [p.names for p in found.parameters] == [p.names for p in own.parameters]
    assert all(p.gradient is not None for p in found.parameters)
    products = [node for node in found.nodes if node.name in ("linear", "matmul", "attention")]
    assert {node.name for node in products} == {"linear", "matmul", "attention"}, "products and attention stay whole"
    assert {"layers.0", "layers.1"} <= {node.module for node in products}
    assert all(node.source.startswith("test_exported_program.py:") for node in products)
    assert not found.stand_in_loss


def test_a_program_without_a_loss_gets_the_stand_in(tmp_path: Path) -> None:
    found = traced(saved(tmp_path, labels=False))
    assert found.stand_in_loss
    assert all(p.gradient is not None for p in found.parameters)


@pytest.mark.slow
def test_an_exported_plan_of_a_program_equals_the_program(tmp_path: Path) -> None:
    graph = traced(saved(tmp_path, labels=True))
    plan = random_plan(Workbench.build(graph, Mesh.parse("dp=2,tp=2")).costs, 1)
    numbers = pipeline.export(plan, graph).report["numbers"]
    assert numbers["reference"]["largest_error"] <= 1e-5


def test_what_is_no_program_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="no file"):
        traced(tmp_path / "none.pt2")
    path = tmp_path / "text.pt2"
    path.write_text("not a program")
    with pytest.raises(InputError, match="cannot be read as an exported program") as caught:
        traced(path)
    assert "torch.export.save" in caught.value.hint


def test_sizes_of_a_program_are_fixed(tmp_path: Path) -> None:
    path = saved(tmp_path, labels=True)
    with pytest.raises(InputError, match="does not take batch=8"):
        trace(ModelRequest(model=str(path), batch=8))
