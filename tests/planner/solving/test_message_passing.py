"""Message passing by itself: when it may stop, warm starts, mending."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from functools import cache

import numpy as np
import pytest

from planner.constraint import Pin
from planner.errors import InfeasibleError
from planner.graph import ModelRequest, TensorRef
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.solving.consistency import make_consistent
from planner.solving.message_passing import Effort, MessagePassing
from planner.solving.problem import PairwiseProblem, build_problem
from planner.solving.solve import Solver
from planner.workbench import Workbench
from tests.oracles.small_spaces import random_costs


@cache
def problems(count: int) -> list[PairwiseProblem]:
    found: list[PairwiseProblem] = []
    seed = 1000
    while len(found) < count:
        with contextlib.suppress(InfeasibleError):  # some seeds have no plan at all
            found.append(build_problem(random_costs(seed, num_ops=12, options=6)))
        seed += 1
    return found


@cache
def twelve_layers() -> Solver:
    return Workbench.build(trace(ModelRequest(model="llama3-tiny", batch=8, layers=12)), Mesh.parse("dp=2,tp=2")).solver


def test_no_plan_never_counts_as_good_enough() -> None:
    assert not Effort().suffices(math.inf, 0.0)
    assert not Effort(enough_us=1e9).suffices(math.inf, math.inf)
    assert Effort().suffices(100.0, 100.0 - 1e-5)


@pytest.mark.parametrize("problem", problems(6))
def test_arc_consistency_keeps_exactly_what_every_neighbour_can_serve(problem: PairwiseProblem) -> None:
    lay = problem.layout
    alive = np.ones(problem.num_strategies, np.bool_)
    assert make_consistent(lay, alive) == -1 and alive.all()  # building the problem has pruned it already
    for edge in range(lay.num_edges):
        port_u, port_v = lay.ports(edge)
        possible = np.isfinite(lay.table_of(edge)[np.ix_(port_u, port_v)])
        assert possible.any(1).all() and possible.any(0).all()


@pytest.mark.parametrize("problem", problems(6))
def test_restored_state_gives_the_same_result(problem: PairwiseProblem) -> None:
    passing = MessagePassing(problem)
    fresh = passing.save()
    first = passing.run(Effort())
    ruled_out = problem.unary_us.copy()
    ruled_out[problem.layout.first[:-1] + first.choice] = np.inf
    dead = ~np.logical_or.reduceat(np.isfinite(ruled_out), problem.layout.first[:-1])
    ruled_out = np.where(np.repeat(dead, np.diff(problem.layout.first)), problem.unary_us, ruled_out)
    alive = np.isfinite(ruled_out)
    if make_consistent(problem.layout, alive) == -1:
        passing.set_costs(np.where(alive, problem.unary_us, np.inf))
        passing.run(Effort(max_sweeps=5))
    passing.restore(fresh)
    again = passing.run(Effort())
    assert again.value_us == first.value_us and again.bound_us == first.bound_us
    assert (again.choice == first.choice).all()


@pytest.mark.parametrize("problem", problems(6))
def test_value_is_that_of_the_choice_and_a_start_is_never_made_worse(problem: PairwiseProblem) -> None:
    passing = MessagePassing(problem)
    best = passing.run(Effort())
    assert problem.value_us(best.choice) == pytest.approx(best.value_us, rel=1e-12)
    fresh = MessagePassing(problem)
    kept = fresh.run(Effort(max_sweeps=1, round_sweeps=1), best.choice)
    assert kept.value_us <= best.value_us * (1 + 1e-12)


def test_rounds_end_before_the_deadline() -> None:
    """A round is as many sweeps as there is time for, and one where that is not known or too little."""
    far, near = Effort(max_sweeps=50), Effort(max_sweeps=50, deadline=time.monotonic() + 10.0)
    assert far.affordable(None) == far.affordable(1e9) == 50
    assert near.affordable(None) == 1 and near.affordable(0.0) == 50
    assert 4 <= near.affordable(2.0) <= 5 and near.affordable(1e3) == 1


@pytest.mark.parametrize("where", ["tok_embeddings/embedding/fwd#0", "output/linear/fwd#0", "layers.3.attention.wq/linear/fwd#0"])
def test_messages_settle_around_a_pin_wherever_it_is(where: str) -> None:
    """Also around one outside of the layers; and what is far away at first belongs to no window."""
    solver = twelve_layers()
    graph = solver.costs.space.graph
    ref = TensorRef(graph.node_by_key[where], 0)
    lattice = solver.costs.space.lattice(ref)
    pins = [Pin(where=where, placements=lattice.placements(number)) for number in solver.legal(ref)]
    windows = solver._windows([solver.restrict(pins[0])])
    node = solver.problem.node_of[ref.node]
    assert windows and all(window[node] and not window.all() for window in windows)
    assert all((wider | window == wider).all() and wider.sum() > window.sum() for window, wider in itertools.pairwise(windows))
    assert solver.solve((pins[0],), exact=False).report.status == "optimal"
