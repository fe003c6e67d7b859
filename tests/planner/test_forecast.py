"""Orders of a step and the forecast as a user meets it: `show --graph`, `plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.actions import OVERLAPPED, SERIAL
from planner.cli import main
from planner.commands.describe import forecast_text
from planner.errors import PlanFormatError
from planner.forecast import Forecasts
from planner.graph import JointGraph
from planner.issuing import order_of
from planner.pipeline import forecasts, workbench_of
from planner.plan import Plan
from planner.schedule import EventKind, Part, Schedule
from planner.workbench import Workbench
from tests.oracles.random_plan import random_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forecast")
    saved = ["-o", str(path / "plan.json"), "--save-graph", str(path / "graph.json.gz")]
    assert main(["plan", "llama3-tiny", "--mesh", "dp=2,tp=2", "--layers", "2", "--recipe", "fsdp", *saved]) == 0
    return path


@pytest.fixture(scope="module")
def bench(folder: Path) -> Workbench:
    return workbench_of(Plan.load(folder / "plan.json"), JointGraph.load(folder / "graph.json.gz"))


def _events(schedule: Schedule) -> list[tuple[EventKind, int]]:
    return [(event.kind, event.number) for event in schedule.events]


def test_both_orders_do_the_same_things(bench: Workbench, folder: Path) -> None:
    for plan in (Plan.load(folder / "plan.json"), *(random_plan(bench.costs, seed) for seed in range(3))):
        overlapped, serial = (order_of(plan, bench.graph, name) for name in (OVERLAPPED, SERIAL))
        for order in (overlapped, serial):
            order.check(plan, bench.graph)
        assert sorted(_events(overlapped)) == sorted(_events(serial))
        assert not serial.asynchronous and max(map(len, serial.on_their_way())) <= 1


def test_parameters_ahead_and_gradients_behind(bench: Workbench, folder: Path) -> None:
    """Under FSDP: what is on its way while others run gathers a parameter for the next block or stores a gradient."""
    plan = Plan.load(folder / "plan.json")
    order = order_of(plan, bench.graph, OVERLAPPED)
    parts = {order.events[order.issued[number]].part for number in order.asynchronous}
    assert parts == {Part.UNSHARD, Part.REDUCE}
    for number in order.asynchronous:
        issued, awaited = order.events[order.issued[number]], order.events[order.awaited[number]]
        assert awaited.block == issued.block  # whose it is, not when it happens
        assert awaited.part is (Part.COMPUTE if issued.part is Part.UNSHARD else Part.COLLECT)


def test_show_and_plan_print_the_forecast(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = ["show", str(folder / "plan.json"), "--graph", str(folder / "graph.json.gz")]
    assert main([*shown, "--trace", str(tmp_path / "trace.json"), "--schedule", SERIAL]) == 0
    text = capsys.readouterr().out
    for part in ("step, serial", "step, overlapped", "MFU", "exposed", "peak with temporaries", "reserved of"):
        assert part in text
    assert main([*shown, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["forecast"]
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    end = max(event["ts"] + event["dur"] for event in traced if event["ph"] == "X")
    assert end == pytest.approx(found[SERIAL]["step_us"])
    memory = found[OVERLAPPED]["memory"]
    assert sum(memory["by_category"].values()) == memory["allocated_bytes"] < memory["reserved_bytes"]
    assert 0 <= memory["moment_us"] <= found[OVERLAPPED]["step_us"]
    assert main(["plan", "--from", str(folder / "plan.json"), "--graph", str(folder / "graph.json.gz")]) == 0
    assert "step, overlapped" in capsys.readouterr().out


def test_a_trace_needs_the_graph(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(folder / "plan.json"), "--trace", "t.json"]) == 2
    assert "hint: " in capsys.readouterr().err


def test_another_models_graph_is_refused(folder: Path, bench: Workbench) -> None:
    graph = replace(bench.graph, nodes=bench.graph.nodes[:-1], parameters=())
    with pytest.raises(PlanFormatError):
        forecasts(Plan.load(folder / "plan.json"), graph)


def test_a_step_that_does_not_fit_says_how_much_is_missing(folder: Path, bench: Workbench) -> None:
    found = forecasts(Plan.load(folder / "plan.json"), bench.graph)
    assert found.overlapped.missing_bytes == 0 and "too much" not in forecast_text(found)
    constants = found.to_json()["overlapped"]["constants"]
    assert all(constant["source"] and constant["kind"] for constant in constants.values())
    assert all(f"{name} " in forecast_text(found) for name in constants)
    small = replace(found.overlapped, usable_bytes=found.overlapped.memory.reserved_bytes - 2**30)
    assert small.missing_bytes == 2**30
    assert "1.00 GiB too much" in forecast_text(Forecasts(found.serial, small))
