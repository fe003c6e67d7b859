"""The flags of constraints on the command line: they reach the plan, its file and a replay; mistakes are refused with a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main
from planner.graph import JointGraph
from tests.planner.recipes_common import traced

MESH = ["--mesh", "dp=2,tp=2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "graph.json.gz"
    graph: JointGraph = traced("llama3-tiny", 16)
    graph.save(path)
    return path


def plan(saved: Path, *flags: str) -> list[str]:
    return ["plan", "llama3-tiny", *MESH, "--batch", "16", "--graph", str(saved), *flags]


def test_constraints_reach_the_plan_and_its_replay(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, again = tmp_path / "plan.json", tmp_path / "again.json"
    flags = [
        "--recipe", "fsdp:dp # baseline", "--forbid", "all_to_all@*", "--tie", "layers.*.attention.wq",
        "--allow", "output.weight=S(0)S(1)|S(1)S(0)", "--forbid", "norm.weight=RR", "--pin", "layers.0.ffn_norm=S(0)R # by hand",
    ]  # fmt: skip
    assert main(plan(saved, *flags, "-o", str(written))) == 0
    capsys.readouterr()
    assert main(["show", str(written), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    kinds = [c["kind"] for c in shown["constraints"] if c["kind"] not in ("boundary", "memory")]
    assert kinds == ["recipe", "allow", "forbid_collective", "forbid", "tie", "pin"]
    assert [c["note"] for c in shown["constraints"] if c.get("note")] == ["baseline", "by hand"]
    assert not any("all_to_all" in label for counts in shown["collectives"].values() for label in counts)
    assert main(["show", str(written)]) == 0
    text = capsys.readouterr().out
    assert "recipe fsdp on dp # baseline" in text and "tie layers.*.attention.wq" in text
    assert main(plan(saved, "--from", str(written), "-o", str(again))) == 0
    assert json.loads(again.read_text())["choices"] == json.loads(written.read_text())["choices"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--recipe", "zero3"], "there is no recipe 'zero3'"),
        (["--recipe", "ep"], "no experts"),
        (["--recipe", "tp:pp"], "no axis 'pp'"),
        (["--forbid", "gossip@dp"], "there is no collective 'gossip'"),
        (["--tie", "nothing.*"], "matches no parameter"),
        (["--allow", "norm.weight=S(5)R"], "none of these is among its placements"),
        (["--recipe", "ddp", "--pin", "norm.weight=S(0)R"], "cannot hold together"),
    ],
)
def test_mistakes_are_refused(flags: list[str], said: str, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(plan(saved, *flags)) == 2
    message = capsys.readouterr().err
    assert said in message and "hint:" in message and "Traceback" not in message
