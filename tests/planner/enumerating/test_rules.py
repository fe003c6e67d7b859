"""Every strategy of every distinct op in use, against the op on whole tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from planner.enumerating.enumerate import enumerate_strategies
from planner.enumerating.registry import FACTORY_OPS, OpSignature
from planner.graph import JointGraph, ModelRequest, TensorMeta, TensorRef
from planner.mesh import Mesh
from planner.placement import codes_text
from planner.strategy import Strategies, StrategySpace
from planner.tracing.trace import trace
from tests.oracles.simulated_shards import F64, bind, devices, join, run_local, split

MESHES = ("tp=2", "dp=2,tp=2", "a=2,b=2,c=2")
MOST_PER_OP = 100
"""Strategies tried per op; more are drawn at random with a fixed seed."""


SMALL = """
import torch
from sample_models.llama3 import Config, Llama3

def small():
    config = Config(dim=16, layers=1, heads=8, kv_heads=4, ffn=24, vocab=32, batch=4, seq=8)
    tokens = torch.zeros(config.batch, config.seq, dtype=torch.int64)
    return Llama3(config), (tokens, torch.zeros_like(tokens))
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> JointGraph:
    """A Llama whose dims all divide by 4, as small as can be: every op is run some thousand times."""
    path = tmp_path_factory.mktemp("model") / "small.py"
    path.write_text(SMALL)
    return trace(ModelRequest(model=f"{path}:small", precision="as-traced"))


def _operands(space: StrategySpace, node: int, generator: torch.Generator) -> list[torch.Tensor]:
    graph = space.graph
    metas = [graph.meta(ref) for ref in graph.nodes[node].operands]
    return [_random(meta, graph, generator) for meta in metas]


def _random(meta: TensorMeta, graph: JointGraph, generator: torch.Generator) -> torch.Tensor:
    if meta.dtype == "bool":
        return torch.rand(meta.shape, generator=generator) < 0.5
    if not meta.is_floating:
        return torch.randint(0, dict(graph.symbols)["V"], meta.shape, generator=generator)
    return torch.rand(meta.shape, generator=generator, dtype=F64) + 0.5


def _distinct_ops(space: StrategySpace) -> Iterator[tuple[int, Strategies]]:
    seen: set[OpSignature] = set()
    for index, node in enumerate(space.graph.nodes):
        if node.is_op and (signature := OpSignature.of(node, space.graph)) not in seen:
            seen.add(signature)
            yield index, space.strategies[index]


def _consistent(space: StrategySpace, node: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Attention's backward reads an output and log-sum that belong to its q, k, v."""
    if space.graph.nodes[node].op == "aten._scaled_dot_product_flash_attention_for_cpu_backward.default":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors[1:4], 0.0, True)
        return [*tensors[:4], out, lse]
    return tensors


def _wrong(space: StrategySpace, node: int, strategies: Strategies, chosen: np.ndarray) -> list[str]:
    """The strategies in `chosen` whose joined result differs from the whole op."""
    generator = torch.Generator().manual_seed(node)
    graph_node, mesh = space.graph.nodes[node], space.mesh
    tensors = _consistent(space, node, _operands(space, node, generator))
    replicated = [(0,) * mesh.num_axes] * len(tensors)
    kwargs = {name: bind(value, tensors) for name, value in graph_node.kwargs}
    whole = _results(
        run_local(
            graph_node.op,
            bind(graph_node.args, tensors),
            kwargs,
            replicated[0] if replicated else (0,) * mesh.num_axes,
            replicated,
            devices(mesh)[0],
        )
    )
    wrong = []
    for number in chosen:
        placed = [
            tuple(space.lattice(ref).codes[strategies.operand(slot)[number]])
            if slot in strategies.operand_slots
            else (0,) * mesh.num_axes
            for slot, ref in enumerate(graph_node.operands)
        ]
        outs = [
            None if meta is None else tuple(space.lattice(TensorRef(node, o)).codes[strategies.output(o)[number]])
            for o, meta in enumerate(graph_node.outputs)
        ]
        pieces = [split(x, codes, mesh, generator) for x, codes in zip(tensors, placed, strict=True)]
        results = {}
        for device in devices(mesh):
            local = [p[device.coordinates] for p in pieces]
            local_kwargs = {name: bind(value, local) for name, value in graph_node.kwargs}
            made = run_local(graph_node.op, bind(graph_node.args, local), local_kwargs, outs[0] or (), placed, device)
            results[device.coordinates] = _results(made)
        for output, codes in enumerate(outs):
            if codes is None:
                continue
            got = join({at: r[output] for at, r in results.items()}, codes, mesh)
            want = whole[output]
            if got is None or got.shape != want.shape or not torch.allclose(got.to(F64), want.to(F64), atol=1e-8):
                text = f"{', '.join(map(codes_text, placed))} -> {codes_text(codes)}"
                wrong.append(f"{graph_node.op} {[tuple(t.shape) for t in tensors]}: {text} (output {output})")
    return wrong


def _results(made: object) -> list[torch.Tensor]:
    return list(made) if isinstance(made, (tuple, list)) else [made]  # type: ignore[list-item]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_strategy_equals_the_op_on_whole_tensors(graph: JointGraph, mesh: str) -> None:
    space = enumerate_strategies(graph, Mesh.parse(mesh))
    rng, wrong, tried = np.random.default_rng(0), [], 0
    for node, strategies in _distinct_ops(space):
        numbers = np.arange(len(strategies))
        chosen = numbers if len(numbers) <= MOST_PER_OP else rng.choice(numbers, MOST_PER_OP, replace=False)
        wrong += _wrong(space, node, strategies, chosen)
        tried += len(chosen)
    assert tried > 300
    assert not wrong, "\n".join(wrong)


def test_no_op_of_the_model_lacks_a_rule(graph: JointGraph) -> None:
    assert enumerate_strategies(graph, Mesh.parse("dp=2,tp=2")).replicated_for_lack_of_a_rule == ()


def test_the_check_notices_a_wrong_strategy(graph: JointGraph) -> None:
    """A control: swap the output column of a product's strategies; the oracle must object."""
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    node = next(i for i, n in enumerate(graph.nodes) if n.op == "planner.einsum.default")
    strategies = space.strategies[node]
    columns = strategies.columns.copy()
    columns[:, 0] = np.roll(columns[:, 0], 1)
    swapped = Strategies(columns, strategies.num_outputs, strategies.operand_slots, strategies.kernel, strategies.rule)
    assert len(_wrong(space, node, swapped, np.arange(len(swapped)))) >= len(swapped) // 2


def test_factory_ops_have_no_operand_edges(graph: JointGraph) -> None:
    space = enumerate_strategies(graph, Mesh.parse("tp=2"))
    found = [space.strategies[i].operand_slots for i, n in enumerate(graph.nodes) if n.op in FACTORY_OPS]
    assert found and set(found) == {()}


def test_equal_ops_share_one_object_whatever_the_depth() -> None:
    counts = []
    for layers in (1, 3):
        deep = trace(ModelRequest(model="llama3-tiny", layers=layers, size="tiny", precision="as-traced"))
        space = enumerate_strategies(deep, Mesh.parse("dp=2,tp=2"))
        counts.append((len({id(s) for s in space.strategies}), len(space.lattices)))
    assert counts[1][0] <= counts[0][0] + 12 and counts[1][1] <= counts[0][1] + 2, counts


def test_an_axis_of_size_one_changes_nothing(graph: JointGraph) -> None:
    plain, padded = (enumerate_strategies(graph, Mesh.parse(mesh)) for mesh in ("tp=4", "dp=1,tp=4"))
    assert plain.num_strategies == padded.num_strategies


def test_uneven_shards_are_banned_with_the_nearest_sizes(graph: JointGraph) -> None:
    space = enumerate_strategies(graph, Mesh.parse("tp=3"))
    reasons = {banned.reason for s in space.strategies for banned in s.banned}
    assert any("does not divide by tp=3; nearest sizes that work" in reason for reason in reasons)
