"""Every strategy of every distinct op in use, against the op on whole tensors."""

from __future__ import annotations

import numpy as np
import pytest

from planner.enumerating.enumerate import enumerate_strategies
from planner.enumerating.registry import FACTORY_OPS
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.strategy import Strategies
from planner.tracing.trace import trace
from tests.oracles.strategies import wrong_of_node, wrong_strategies

MESHES = ("tp=2", "dp=2,tp=2", "a=2,b=2,c=2")

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


@pytest.mark.parametrize("mesh", MESHES)
def test_every_strategy_equals_the_op_on_whole_tensors(graph: JointGraph, mesh: str) -> None:
    wrong, tried = wrong_strategies(enumerate_strategies(graph, Mesh.parse(mesh)))
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
    assert len(wrong_of_node(space, node, swapped, np.arange(len(swapped)))) >= len(swapped) // 2


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
