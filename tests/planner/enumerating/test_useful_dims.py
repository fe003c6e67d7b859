"""Leaving out dims that can save nothing keeps the optimum and makes the tables smaller."""

from __future__ import annotations

import pytest

from planner.enumerating import enumerate as enumerating
from planner.graph import JointGraph, ModelRequest, TensorRef
from planner.mesh import Mesh
from planner.tracing.trace import trace
from planner.workbench import Workbench


@pytest.fixture(scope="module")
def graph() -> JointGraph:
    """One layer at published sizes, so that prices are those of a real model."""
    return trace(ModelRequest(model="llama3-8b", layers=1, batch=8))


@pytest.mark.parametrize("mesh", ["tp=8", "dp=8,tp=8"])
def test_the_optimum_is_that_of_all_dims(graph: JointGraph, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned = Workbench.build(graph, Mesh.parse(mesh))
    monkeypatch.setattr(enumerating, "useful_dims", lambda graph, rows, slots: _all_dims(graph))
    full = Workbench.build(graph, Mesh.parse(mesh))
    assert full.space.num_strategies > pruned.space.num_strategies
    plans = [bench.solve(bench.default_constraints(10**15), time_limit_s=600.0) for bench in (pruned, full)]
    assert [plan.report.status for plan in plans] == ["optimal", "optimal"]
    assert plans[0].objective_us == pytest.approx(plans[1].objective_us, rel=1e-6)


def _all_dims(graph: JointGraph) -> dict[TensorRef, tuple[int, ...]]:
    return {
        TensorRef(index, output): tuple(dim for dim, size in enumerate(meta.shape) if size > 1)
        for index, node in enumerate(graph.nodes)
        for output, meta in enumerate(node.outputs)
        if meta is not None
    }
