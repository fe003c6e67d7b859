"""The whole integer program of real models, nothing fixed beforehand, against the everyday solver."""

from __future__ import annotations

import numpy as np
import pytest

from planner.graph import ModelRequest
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.solving.conflicts import living
from planner.solving.ilp import solve_ilp
from planner.solving.restrictions import restrict
from planner.workbench import Workbench, boundaries


def compare(model: str, layers: int, mesh: str, batch: int, *, time_limit_s: float) -> None:
    bench = Workbench.build(trace(ModelRequest(model=model, layers=layers, batch=batch)), Mesh.parse(mesh))
    fixed, problem = boundaries(bench.graph, bench.mesh), bench.solver.problem
    found = bench.solver.solve(fixed, exact=False).report
    alive = living(problem, [restrict(c, bench.costs, problem) for c in fixed])
    assert alive is not None
    cost = np.where(alive, problem.unary_us, np.inf)
    whole = solve_ilp(problem.layout, cost, time_limit_s=time_limit_s, gap_us=1e-7 * found.objective_us)
    assert whole.status == "optimal"
    assert found.status == "optimal" and found.objective_us == pytest.approx(whole.value_us, rel=2e-6)
    assert found.bound_us <= whole.value_us * (1 + 1e-9)


@pytest.mark.parametrize("mesh", ["tp=4", "dp=8"])
def test_one_tiny_layer(mesh: str) -> None:
    compare("llama3-tiny", 1, mesh, 8, time_limit_s=300.0)


@pytest.mark.slow
def test_one_tiny_layer_on_two_axes() -> None:
    compare("llama3-tiny", 1, "dp=2,tp=2", 8, time_limit_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
def test_layers_of_llama3_8b(layers: int) -> None:
    compare("llama3-8b", layers, "dp=8,tp=8", 64, time_limit_s=1500.0)
