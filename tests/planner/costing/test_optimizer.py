"""The optimizer's update costs what it moves, on the shard that is stored."""

from __future__ import annotations

import pytest

from planner.graph import JointGraph, ModelRequest, TensorRef
from planner.mesh import Mesh
from planner.tracing.trace import trace
from planner.workbench import Workbench


@pytest.fixture(scope="module")
def graph() -> JointGraph:
    return trace(ModelRequest(model="llama3-8b", layers=1, batch=8))


@pytest.mark.parametrize(("optimizer", "bytes_per_element"), [("adamw", 28), ("sgd", 12), ("none", 0)])
def test_update_moves_parameter_gradient_and_state_of_the_shard(
    graph: JointGraph, optimizer: str, bytes_per_element: int
) -> None:
    bench = Workbench.build(graph, Mesh.parse("dp=2,tp=4"), optimizer=optimizer)
    rate = bench.hardware.pointwise.efficiency * bench.hardware.hbm_bytes_per_s / 1e6
    for parameter in graph.parameters:
        lattice = bench.space.lattice(TensorRef(parameter.node, 0))
        for number, us in enumerate(bench.costs.compute_us[parameter.node]):
            stored = bench.space.strategies[parameter.node].output(0)[number]
            assert us == pytest.approx(lattice.local_bytes[stored] / 4 * bytes_per_element / rate)
