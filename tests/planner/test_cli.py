"""The command line as a user meets it: the round trip, and every kind of bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main

MESH = "dp=2,tp=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planned tiny model: plan.json, stats.json, graph.json.gz."""
    path = tmp_path_factory.mktemp("cli")
    code = main(
        ["plan", "llama3-tiny", "--mesh", MESH, "--layers", "1", "-o", str(path / "plan.json"),
         "--stats", str(path / "stats.json"), "--save-graph", str(path / "graph.json.gz")]
    )  # fmt: skip
    assert code == 0
    return path


def _refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command that must be refused: exit code 2, a message with a hint, no traceback."""
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "error: " in error and "hint: " in error and "Traceback" not in error
    return error


def _plan(folder: Path, *more: str, mesh: str = MESH) -> list[str]:
    return ["plan", "llama3-tiny", "--mesh", mesh, "--layers", "1", "--graph", str(folder / "graph.json.gz"), *more]


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"llama3-8b", "llama3-70b", "llama3-tiny"} <= set(names)


def test_stats_and_show_have_their_fields(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = json.loads((folder / "stats.json").read_text())
    fields = {"trace_s", "enumerate_s", "estimate_s", "solve_s", "num_nodes", "num_strategies", "peak_rss_bytes"}
    assert fields <= set(stats) and all(stats[name] > 0 for name in fields)
    assert main(["show", str(folder / "plan.json"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {
        "status", "objective_us", "bound_us", "compute_us", "comm_us", "peak_bytes", "memory", "comm_bytes", "num_ops", "pins",
        "replicated_for_lack_of_a_rule",
    } <= set(shown)  # fmt: skip
    assert shown["status"] == "optimal" and shown["replicated_for_lack_of_a_rule"] == []
    assert shown["compute_us"] + shown["comm_us"] == pytest.approx(shown["objective_us"], rel=1e-6)
    assert sum(shown["memory"].values()) == shown["peak_bytes"]
    assert main(["show", str(folder / "plan.json")]) == 0
    assert "proved optimal" in capsys.readouterr().out


def test_planning_again_gives_the_same_decisions(folder: Path, tmp_path: Path) -> None:
    assert main(_plan(folder, "-o", str(tmp_path / "again.json"))) == 0
    a, b = (json.loads(p.read_text()) for p in (folder / "plan.json", tmp_path / "again.json"))
    assert a["choices"] == b["choices"] and a["redistributions"] == b["redistributions"]


def test_replay_needs_no_solver_and_gives_the_same_bytes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.solving.solve import Solver

    def no_solver(*args: object, **kwargs: object) -> None:
        raise AssertionError("replay must not solve")

    monkeypatch.setattr(Solver, "solve", no_solver)
    assert main(_plan(folder, "--from", str(folder / "plan.json"), "-o", str(tmp_path / "again.json"))) == 0
    assert (tmp_path / "again.json").read_bytes() == (folder / "plan.json").read_bytes()


def test_a_pin_is_kept_costs_something_or_nothing_and_shows_in_diff(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(plan: Path) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["show", str(plan), "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    wq, pinned, free = "layers.0.attention.wq/linear/fwd#0", tmp_path / "pinned.json", shown(folder / "plan.json")
    other = "RR" if free["placements"][wq][0] != "RR" else "S(0)R"
    assert main(_plan(folder, "--pin", f"layers.*.attention.wq={other}", "-o", str(pinned))) == 0
    found = shown(pinned)
    assert [(p["where"], p["placements"]) for p in found["pins"]] == [("layers.*.attention.wq", other)]
    assert found["placements"][wq][0] == other
    assert found["objective_us"] >= free["objective_us"] * (1 - 1e-9)
    assert main(["diff", str(folder / "plan.json"), str(pinned)]) == 0
    assert wq.replace(".0.", ".*.") in capsys.readouterr().out


# ---- bad input --------------------------------------------------------------------------------------------------------
def test_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    error = _refused(["plan", "llama3-9b", "--mesh", MESH], capsys)
    assert "llama3-9b" in error and "llama3-8b" in error


@pytest.mark.parametrize("mesh", ["dp8", "dp=0,tp=2", "dp=2,dp=2", "", "a=2,b=2,c=2,d=2,e=2", "dp=two"])
def test_malformed_mesh(mesh: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "dp=8,tp=8" in _refused(_plan(folder, mesh=mesh), capsys)


def test_batch_that_the_boundary_cannot_split(capsys: pytest.CaptureFixture[str]) -> None:
    error = _refused(["plan", "llama3-tiny", "--mesh", "dp=8,tp=2", "--batch", "30"], capsys)
    assert "30" in error and "dp=8" in error and "24, 32" in error


@pytest.mark.parametrize(
    "pin", ["wq", "=RR", "layers.*.attention.wq=S(0", "layers.*.attention.wq=RRR", "layers.*.attention.wq=xp:R"]
)
def test_malformed_pin(pin: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _refused(_plan(folder, "--pin", pin), capsys)


def test_pin_that_matches_nothing_names_the_nearest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "attention.wq" in _refused(_plan(folder, "--pin", "layers.*.attention.wqq=RR"), capsys)


def test_pin_without_a_legal_strategy_lists_the_legal_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = _refused(_plan(folder, "--pin", "layers.0.attention.wq=S(7)R"), capsys)
    assert "layers.0.attention.wq" in error and "RR" in error and "S(0)R" in error


def test_pins_that_clash_are_both_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pins = ["output.weight=S(0)R", "layers.0.attention.wq.weight=RR", "output.weight=RS(0)"]
    error = _refused(_plan(folder, *(word for pin in pins for word in ("--pin", pin))), capsys)
    assert "output.weight = S(0)R" in error and "output.weight = RS(0)" in error and "attention.wq" not in error


def test_budget_that_is_too_small_says_by_how_much(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = _refused(_plan(folder, "--memory", "1kB"), capsys)
    assert re.search(r"\d+ B short", error)


def test_budget_that_is_no_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "80GiB" in _refused(_plan(folder, "--memory", "much"), capsys)


def test_unknown_hardware_lists_the_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "h100_sxm" in _refused(_plan(folder, "--hardware", "h900"), capsys)


def test_plan_of_another_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "llama3-tiny", "--mesh", MESH, "--layers", "2", "--from", str(folder / "plan.json")]
    assert "another model" in _refused(argv, capsys)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data | {"schema": 999}, "999"),
        (lambda data: {k: v for k, v in data.items() if k != "choices"}, "choices"),
        (lambda data: [1, 2], "not a plan file"),
    ],
)
def test_plan_file_of_another_version_or_damaged(
    change: object, expected: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(change(json.loads((folder / "plan.json").read_text()))))  # type: ignore[operator]
    assert expected in _refused(["show", str(bad)], capsys)


def test_missing_plan_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.json" in _refused(["show", "nowhere.json"], capsys)


def test_a_refusal_leaves_an_old_plan_file_as_it_was(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "plan.json"
    kept.write_bytes((folder / "plan.json").read_bytes())
    _refused(_plan(folder, "--pin", "layers.0.attention.wq=S(7)R", "-o", str(kept)), capsys)
    assert kept.read_bytes() == (folder / "plan.json").read_bytes()


BROKEN = """
import torch
from torch import nn

class Bad(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).reshape(7, 8).sum()

class Good(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).square().mean()

def bad():
    return Bad(), (torch.zeros(8, 4),)

def good():
    return Good(), (torch.zeros(8, 4),)
"""


@pytest.mark.usefixtures("models_in_forks")
def test_a_model_that_fails_to_trace_then_one_that_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.py"
    path.write_text(BROKEN)
    error = _refused(["plan", f"{path}:bad", "--mesh", MESH], capsys)
    assert "models.py:11" in error
    assert main(["plan", f"{path}:good", "--mesh", MESH]) == 0
