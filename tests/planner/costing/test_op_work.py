"""Work of single ops: convolutions by FLOPs like products, look-ups by the bytes they touch, shares of every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.costing.fusion import fused_traffic
from planner.enumerating.enumerate import enumerate_strategies
from planner.graph import ModelRequest
from planner.mesh import Mesh
from planner.placement import S0, P
from planner.strategy import KernelShapes
from planner.tracing.flops import flops
from planner.tracing.trace import trace
from tests.planner.enumerating.one_op import graph_of, tensor


def convolution(out: int, groups: int, *, stride: int = 1, window: int = 3, transposed: bool = False) -> tuple[Any, ...]:
    """1024 samples of 16 channels, 32 wide."""
    weight = tensor(16, out // groups, window) if transposed else tensor(out, 16 // groups, window)
    more = ((stride,), (window // 2,), (1,), transposed, (0,), groups)
    return "aten.convolution.default", tensor(1024, 16, 32), weight, None, *more


def backward(out: int, groups: int, wanted: tuple[bool, bool, bool]) -> tuple[Any, ...]:
    more = ((out,), (1,), (1,), (1,), False, (0,), groups, wanted)
    return (
        "aten.convolution_backward.default", tensor(1024, out, 32), tensor(1024, 16, 32), tensor(out, 16 // groups, 3), *more
    )  # fmt: skip


CONVOLUTIONS = [
    convolution(8, 1), convolution(32, 16), convolution(16, 16), convolution(8, 2), convolution(8, 1, stride=2),
    backward(8, 1, (True, True, True)), backward(16, 16, (True, True, False)), backward(8, 1, (False, True, True)),
]  # fmt: skip


def work(kernel: KernelShapes) -> np.ndarray:
    dims = kernel.dims
    return 2.0 * dims["batch"] * dims["m"] * dims["n"] * dims["k"]


@pytest.mark.parametrize("call", CONVOLUTIONS)
def test_a_convolution_is_a_product_of_its_flops_and_its_devices_share_them(call: tuple[Any, ...]) -> None:
    op, *args = call
    graph = graph_of(op, *args)
    node = graph.nodes[-1]
    whole = flops(op, node.args, [graph.meta(ref) for ref in node.operands], node.outputs)
    space = enumerate_strategies(graph, Mesh.parse("tp=4"))
    strategies = space.strategies[-1]
    assert strategies.kernel.kind == "gemm" and whole > 0
    lattices = [space.lattice(ref) for ref in node.operands]
    codes = np.stack([lattice.codes[strategies.operand(slot), 0] for slot, lattice in enumerate(lattices)], 1)
    split = (codes >= S0).any(1)
    assert split.any() and not split.all()
    np.testing.assert_allclose(work(strategies.kernel), np.where(split, whole / 4, whole))
    assert not ((codes == P).any(1) & split).any()


def test_a_transposed_convolution_counts_one_product_per_pixel_of_its_input() -> None:
    op, *args = convolution(8, 1, stride=2, window=4, transposed=True)
    strategies = enumerate_strategies(graph_of(op, *args), Mesh.parse("tp=1")).strategies[-1]
    assert work(strategies.kernel).tolist() == [2.0 * 1024 * 32 * 16 * 8 * 4]


LOOK_UPS = """
import torch
from torch import nn

class LookUps(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, 16))

    def forward(self, ids):
        x = self.scale.sin()
        columns = x.gather(0, ids[:, None].expand(-1, 16))  # one position for a whole row
        return columns * x[ids]

def look_ups():
    return LookUps(), (torch.zeros(8, dtype=torch.int64),)
"""


def test_look_ups_touch_the_rows_they_take(tmp_path: Path) -> None:
    (tmp_path / "look_ups.py").write_text(LOOK_UPS)
    graph = trace(ModelRequest(model=f"{tmp_path / 'look_ups.py'}:look_ups", precision="as-traced"))
    space = enumerate_strategies(graph, Mesh.parse("tp=1"))
    traffic = dict(zip([node.op for node in graph.nodes], fused_traffic(space), strict=True))
    gather, index = traffic["aten.gather.default"], traffic["aten.index.Tensor"]
    assert gather.reads[0] == index.reads[0] == 0, "the table is not read as a whole"
    assert gather.writes[0] + index.writes[0] >= 2, "as many bytes read as taken"
    assert gather.reads[1] in (0, 1 / 16), "a position that stands for 16 entries is read once"
    updates = [traffic[op] for op in ("aten.scatter_add.default", "aten.index_put.default") if op in traffic]
    assert len(updates) == 2 and all(
        update.reads[0] == 0 and update.reads[-1] == 2 and update.writes == (0,) for update in updates
    )
