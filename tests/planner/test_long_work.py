"""Long solves: where they stand is told, they can be cancelled, Ctrl-C keeps the best plan so far."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from planner import pipeline
from planner.cli import main
from planner.commands.common import Watching, standing
from planner.constraint import MemoryBudget, Pin
from planner.errors import SolverError
from planner.graph import ModelRequest
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.placement import parse
from planner.plan import Plan
from planner.solving.ilp import Watch, solve_ilp
from planner.solving.solve import Progress
from planner.workbench import Workbench

TIGHT = 24 * 2**20


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return Workbench.build(trace(ModelRequest(model="llama3-tiny", layers=2, batch=8)), Mesh.parse("dp=2,tp=4"))


def consistent(told: list[Progress], plan: Plan) -> None:
    """Values are of plans that exist, bounds are no plan's value, nothing told contradicts the result."""
    assert told
    for now in told:
        assert now.bound_us <= plan.objective_us * (1 + 1e-6)
        assert now.value_us >= plan.report.bound_us * (1 - 1e-6)
        assert now.seconds >= 0 and now.method in ("message passing", "integer program")


@pytest.mark.parametrize("extra", [(), (MemoryBudget(num_bytes=TIGHT),)], ids=["free", "tight"])
def test_progress_is_told_in_every_round(bench: Workbench, extra: tuple[MemoryBudget, ...]) -> None:
    told: list[Progress] = []
    plan = bench.with_fresh_solver().solve((*bench.default_constraints(), *extra), exact=False, told=told.append)
    consistent(told, plan)
    assert told[-1].value_us == plan.objective_us
    if extra:
        assert len(told) > 5 and all(later.seconds >= earlier.seconds for earlier, later in itertools.pairwise(told))


def test_progress_of_a_pin_speaks_of_the_problem_with_the_pin(bench: Workbench) -> None:
    told: list[Progress] = []
    pin = Pin(where="layers.*.attention.wq", placements=parse("RR"))
    plan = bench.with_fresh_solver().solve((*bench.default_constraints(), pin), exact=False, told=told.append)
    consistent(told, plan)


def test_a_cancelled_solve_gives_the_best_plan_so_far_with_its_gap(bench: Workbench) -> None:
    constraints = (*bench.default_constraints(), MemoryBudget(num_bytes=TIGHT))
    fresh, told = bench.with_fresh_solver(), []
    plan = fresh.solve(constraints, told=told.append, cancelled=lambda: any(math.isfinite(now.value_us) for now in told))
    assert plan.memory.peak_bytes <= TIGHT
    assert plan.report.status == "feasible" and plan.report.gap > 0
    again = fresh.solve(constraints, exact=False)
    assert again.objective_us <= plan.objective_us * (1 + 1e-9)
    with pytest.raises(SolverError, match="no plan was found"):
        bench.with_fresh_solver().solve(constraints, cancelled=lambda: True)


def test_a_cancelled_search_over_layers_to_repeat_ends_with_what_it_has(bench: Workbench) -> None:
    constraints = (*bench.default_constraints(), MemoryBudget(num_bytes=TIGHT))
    fresh, told = bench.with_fresh_solver(), []
    plan = fresh.solve(
        constraints, checkpoint="auto", told=told.append, cancelled=lambda: any(math.isfinite(now.value_us) for now in told)
    )
    assert plan.memory.peak_bytes <= TIGHT and plan.report.bound_us <= plan.objective_us


def test_listeners_are_those_of_one_solve_only(bench: Workbench) -> None:
    told: list[Progress] = []
    fresh = bench.with_fresh_solver()
    fresh.solve(bench.default_constraints(), told=told.append)
    count = len(told)
    fresh.solve((*bench.default_constraints(), Pin(where="layers.0.attention.wq", placements=parse("RR"))))
    assert len(told) == count


def test_the_integer_program_reports_and_can_be_stopped() -> None:
    small = Workbench.build(trace(ModelRequest(model="llama3-tiny", layers=1, batch=8)), Mesh.parse("dp=8"))
    problem = small.solver.problem
    least = small.solve(small.default_constraints()).memory.peak_bytes // 2
    told: list[tuple[float, float]] = []
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return True

    found = solve_ilp(
        problem.layout, problem.unary_us, num_bytes=problem.num_bytes, budget_bytes=least, time_limit_s=30,
        watch=Watch(cancelled, lambda value, bound: told.append((value, bound))),
    )  # fmt: skip
    assert asked and found.status in ("time_limit", "feasible")
    shifted = Watch(None, lambda value, bound: told.append((value, bound))).shifted(5.0)
    assert shifted.tell is not None
    shifted.tell(1.0, np.inf)
    assert told[-1] == (6.0, np.inf)


# ---- command line -----------------------------------------------------------------------------------------------------
def test_standing_in_words() -> None:
    assert "no plan yet" in standing(Progress(value_us=math.inf, bound_us=1.0, seconds=3.0, method="message passing"))
    assert "at most 1 % above" in standing(Progress(value_us=100.0, bound_us=99.0, seconds=3.0, method="message passing"))
    assert "no bound yet" in standing(Progress(value_us=100.0, bound_us=-math.inf, seconds=3.0, method="message passing"))
    assert "proved" in standing(Progress(value_us=100.0, bound_us=100.0, seconds=3.0, method="message passing"))


def test_short_solves_say_nothing_and_long_ones_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    watching = Watching()
    for seconds in (0.5, 1.9, 2.1, 2.5, 3.0, 3.2):
        watching.told(Progress(value_us=100.0, bound_us=99.0, seconds=seconds, method="message passing"))
    assert len(capsys.readouterr().err.splitlines()) == 2


def _planned_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> int:
    """`plan` with a tight budget; Ctrl-C arrives at a stage, or (`incumbent`) when the solver has a plan."""
    assert threading.current_thread() is threading.main_thread()
    real = pipeline.make_plan

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def make_plan(request, *, progress, told, **how):  # type: ignore[no-untyped-def]
        sent: list[int] = []

        def stage(name: str) -> None:
            progress(name)
            if name == when:
                interrupt()

        def listen(now: Progress) -> None:
            told(now)
            if when == "incumbent" and math.isfinite(now.value_us) and not sent:
                sent.append(1)
                interrupt()

        return real(request, progress=stage, told=listen, **how)

    monkeypatch.setattr(pipeline, "make_plan", make_plan)
    return main(
        ["plan", "llama3-tiny", "--layers", "1", "--batch", "8", "--mesh", "dp=2,tp=4", "--memory", "16MiB",
         "--checkpoint", "none", "-o", str(tmp_path / "plan.json")]
    )  # fmt: skip


def test_ctrl_c_writes_the_best_plan_so_far(tmp_path, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    assert _planned_with_ctrl_c(tmp_path, monkeypatch, "incumbent") == 0
    plan = Plan.load(tmp_path / "plan.json")
    shown = capsys.readouterr()
    assert "stopped: this is the best plan so far" in shown.err
    assert plan.report.status == "feasible" and "within" in shown.out
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("when", ["trace", "enumerate", "solve"])
def test_ctrl_c_before_there_is_a_plan_writes_nothing(tmp_path, monkeypatch, capsys, when):
    assert _planned_with_ctrl_c(tmp_path, monkeypatch, when) == 130
    assert not list(tmp_path.iterdir())
    assert "stopped" in capsys.readouterr().err
