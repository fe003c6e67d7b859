"""Every rule on calls that models seldom make: negative dims, kept dims, groups, broadcasts, each row against whole tensors."""

from __future__ import annotations

from typing import Any

import pytest

from planner.enumerating.enumerate import enumerate_strategies
from planner.mesh import Mesh
from planner.placement import codes_text
from tests.oracles.strategies import wrong_strategies
from tests.planner.enumerating.one_op import graph_of, tensor

X = tensor(4, 8, 16)
IDS = tensor(4, 8, 4, dtype="int64")
CALLS: list[tuple[Any, ...]] = [
    *(("aten.cumsum.default", X, dim) for dim in (0, 2, -1, -2)),
    *((f"aten.{name}.default", X, -2) for name in ("cumprod", "logcumsumexp", "cummax", "cummin", "sort")),
    ("aten.topk.default", X, 4, -2),
    ("aten.sort.stable", X, {"stable": True, "dim": -2}), ("aten.flip.default", X, (-1, 0)),
    ("aten.roll.default", X, (3,), (-2,)),
    ("aten.roll.default", X, (5,)), ("aten.unfold.default", X, -2, 4, 2), ("aten.constant_pad_nd.default", X, (0, 0, 1, 1)),
    ("aten.constant_pad_nd.default", X, (2, 2, 0, 0), 1.5), ("aten.diagonal.default", X, 0, -1, -3),
    *(("aten.sum.dim_IntList", X, dims, keep) for dims in ((-1,), (0, -2)) for keep in (False, True)),
    *(("aten.mean.dim", X, dims, keep) for dims in ((-1,), (0, -2)) for keep in (False, True)), ("aten.mean.default", X),
    *((f"aten.{name}.default", X, (-2,), keep) for name in ("amax", "amin") for keep in (False, True)),
    *((f"aten.{name}.dim", X, -2, keep) for name in ("max", "min") for keep in (False, True)),
    *((f"aten.{name}.default", X, -2, keep) for name in ("argmax", "argmin") for keep in (False, True)),
    ("aten._softmax.default", X, -2, False), ("aten._log_softmax.default", X, -1, False), ("aten.prod.dim_int", X, -2),
    *(("aten.select.int", X, dim, at) for dim, at in ((-1, -1), (1, 3), (-3, -2))),
    *(("aten.slice.Tensor", X, dim, first, last) for dim, first, last in ((-1, 4, 12), (1, -3, 2**62), (0, 0, 3))),
    ("aten.slice.Tensor", X, -2, 1, 7, 2), ("aten.slice_scatter.default", X, tensor(4, 8, 4), -1, 4, 8),
    ("aten.select_scatter.default", X, tensor(4, 16), -2, 3),
    *(("aten.unsqueeze.default", X, dim) for dim in (0, -1, -2)), ("aten.squeeze.dim", tensor(4, 1, 8), -2),
    ("aten.transpose.int", X, -1, 0), ("aten.permute.default", X, (-1, 0, -2)),
    ("aten.expand.default", tensor(4, 1, 8), (2, -1, 6, -1)),
    ("aten.repeat.default", X, (2, 1, 1, 3)), ("aten.view.default", X, (4, 128)), ("aten.view.default", X, (2, 2, 8, 4, 4)),
    ("aten.view.default", X, (32, 4, -1)),
    ("aten.cat.default", (X, tensor(4, 4, 16)), -2), ("aten.stack.default", (X, X, X), -2), ("aten.stack.default", (X, X), -1),
    ("aten.where.self", tensor(8, 1, dtype="bool"), X, tensor(16)),
    ("aten.gather.default", X, -1, IDS), ("aten.gather.default", X, -2, tensor(4, 8, 16, dtype="int64")),
    ("aten.scatter.value", X, -1, IDS, 2.0), ("aten.scatter.src", X, -1, IDS, tensor(4, 8, 4)),
    ("aten.scatter_add.default", X, -2, tensor(4, 8, 16, dtype="int64"), X),
    ("aten.index.Tensor", X, (None, tensor(6, dtype="int64"))),
    ("aten.index.Tensor", X, (tensor(6, dtype="int64"), None, tensor(6, dtype="int64"))),
    ("aten._unsafe_index.Tensor", X, (None, tensor(2, 1, dtype="int64"), tensor(6, dtype="int64"))),
    ("aten.index_put.default", X, (None, tensor(4, dtype="int64")), tensor(4, 4, 16), True),
    ("aten._unsafe_index_put.default", X, (tensor(6, dtype="int64"),), tensor(16), True),
    ("aten.embedding.default", tensor(16, 8), tensor(4, 8, dtype="int64")),
    ("aten.embedding_dense_backward.default", tensor(4, 8, 16), tensor(4, 8, dtype="int64"), 12, -1, False),
    *((f"aten.{name}.default", X, tensor(8, 1)) for name in ("logaddexp", "logaddexp2", "heaviside", "floor_divide")),
    ("aten.fmod.Tensor", X, tensor(16)), ("aten.add.Tensor", X, tensor(8, 1)), ("aten.mul.Tensor", tensor(16), X),
    ("aten.sub.Tensor", X, X), ("aten.div.Tensor", X, tensor(16)), ("aten.clone.default", X),
    ("aten.add.Scalar", X, 2.0), ("aten.mul.Scalar", X, 2.0), ("aten.pow.Tensor_Scalar", X, 2), ("aten.rsub.Scalar", X, 1.0),
    ("aten.maximum.default", X, tensor(8, 1)), ("aten.clamp.default", X, -0.5, 0.5), ("aten.neg.default", X),
    ("aten._adaptive_avg_pool2d.default", X, (4, 8)), ("aten._adaptive_avg_pool2d_backward.default", tensor(4, 4, 8), X),
    ("aten.avg_pool2d.default", X, (2, 2)), ("aten.max_pool2d_with_indices.default", X, (2, 2)),
    *(("aten.convolution.default", tensor(4, 8, 16), tensor(out, 8 // groups, 3), bias, (1,), (1,), (1,), False, (0,), groups)
      for out, groups in ((4, 1), (8, 8), (16, 8), (8, 2)) for bias in (None, tensor(out))),
    ("aten.convolution.default", X, tensor(8, 4, 4), None, (2,), (1,), (1,), True, (0,), 1),
    *(("aten.convolution_backward.default", tensor(4, out, 16), tensor(4, 8, 16), tensor(out, 8 // groups, 3), (out,),
       (1,), (1,), (1,), False, (0,), groups, (True, True, True)) for out, groups in ((4, 1), (8, 8), (16, 8), (8, 2))),
    ("aten.mm.default", tensor(4, 8), tensor(8, 16)), ("aten.bmm.default", tensor(4, 8, 16), tensor(4, 16, 8)),
    *(("planner.einsum.default", equation, a, b) for equation, a, b in (
        ("bsk,nk->bsn", X, tensor(8, 16)), ("bsn,bsk->nk", tensor(4, 8, 8), X), ("k,nk->n", tensor(16), tensor(8, 16)),
        ("ecd,efd->ecf", tensor(4, 6, 8), tensor(4, 12, 8)), ("a,b->ab", tensor(4), tensor(8)))),
    ("aten.zeros.default", (4, 8)), ("aten.full.default", (4, 8), 2.0), ("aten.ones.default", (4, 8)), ("aten.arange.default", 8),
    ("aten.arange.start", 4, 12), ("aten.arange.start_step", 0, 16, 2),
    ("aten.full_like.default", X, 2.0), ("aten.ones_like.default", X),
    ("aten.zeros_like.default", X), ("aten.new_zeros.default", X, (4, 8)), ("aten.scalar_tensor.default", 2.0),
]  # fmt: skip
"""(op, arguments ..., keyword arguments if there are any)"""


@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("a=2,b=2", marks=pytest.mark.slow)])
def test_every_row_of_every_call_equals_whole_tensors(mesh: str) -> None:
    wrong, tried = [], 0
    for op, *args in CALLS:
        keywords = args.pop() if isinstance(args[-1], dict) else {}
        found, count = wrong_strategies(enumerate_strategies(graph_of(op, *args, **keywords), Mesh.parse(mesh)))
        wrong += [f"{args}: {text}" for text in found]
        tried += count
    assert tried > 400
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("op, args, banned", [
    ("aten.cumsum.default", (X, -1), "S(2)"), ("aten.flip.default", (X, (-1,)), "S(2)"), ("aten.sort.default", (X, -2), "S(1)"),
    ("aten._softmax.default", (X, -1, False), "S(2)"), ("aten.slice.Tensor", (X, -2, 0, 4), "S(1)"),
])  # fmt: skip
def test_a_negative_dim_is_the_dim_it_means(op: str, args: tuple[Any, ...], banned: str) -> None:
    graph = graph_of(op, *args)
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    strategies = space.strategies[-1]
    split = {codes_text(space.lattice(graph.nodes[-1].operands[0]).codes[number]) for number in strategies.operand(0)}
    assert banned not in split and len(split) >= 3, split


@pytest.mark.parametrize("op, args", [
    *((name, (X, *rest)) for name, rest in (
        ("aten.relu.default", ()), ("aten.tanh.default", ()), ("aten.exp.default", ()), ("aten.abs.default", ()),
        ("aten.clamp.default", (0.0,)), ("aten.amax.default", ((1,),)), ("aten.add.Scalar", (1.0,)), ("aten.gt.Scalar", (0.0,)),
        ("aten._softmax.default", (1, False)), ("aten.argmax.default", (1,)), ("aten.sort.default", (1,)))),
])  # fmt: skip
def test_what_is_not_linear_takes_no_pending_sum(op: str, args: tuple[Any, ...]) -> None:
    graph = graph_of(op, *args)
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    placed = {codes_text(space.lattice(graph.nodes[-1].operands[0]).codes[number]) for number in space.strategies[-1].operand(0)}
    assert "P" not in placed


@pytest.mark.parametrize("op, args", [
    ("aten.neg.default", ()), ("aten.mul.Scalar", (2.0,)), ("aten.div.Scalar", (2.0,)), ("aten.sum.dim_IntList", ((1,),)),
    ("aten.view.default", ((4, 128),)), ("aten.transpose.int", (0, 1)), ("aten.slice.Tensor", (1, 0, 4)),
    ("aten.mean.dim", ((1,),)), ("aten.cumsum.default", (-1,)), ("aten.clone.default", ()),
    ("aten.expand.default", ((2, 4, 8, 16),)),
])  # fmt: skip
def test_what_is_linear_passes_a_pending_sum_on(op: str, args: tuple[Any, ...]) -> None:
    graph = graph_of(op, X, *args)
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    strategies = space.strategies[-1]
    rows = {
        (space.lattices[space.lattice_of[graph.nodes[-1].operands[0]]].text(a), space.lattice(graph.loss).text(b))
        for a, b in zip(strategies.operand(0).tolist(), strategies.output(0).tolist(), strict=True)
    }
    assert ("P", "P") in rows
