"""`--fabric` names the network between nodes: of a new plan and of one that is planned again elsewhere."""

import argparse
from pathlib import Path
from typing import Any

import pytest

import app.demo
from planner.cli import main
from planner.commands import plan as command
from planner.plan import Plan


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    return parser.parse_args(["plan", *given])


@pytest.mark.parametrize(
    ("given", "hardware"),
    [
        ([], "h100_sxm"),
        (["--hardware", "h200"], "h200"),
        (["--fabric", "roce_8x400g"], "h100_sxm+roce_8x400g"),
        (["--hardware", "h200+ib_8x400g", "--fabric", "efa_32x100g"], "h200+efa_32x100g"),
    ],
)
def test_hardware_with_its_network(given: list[str], hardware: str) -> None:
    assert command.plan_request(arguments("llama3-tiny", "--mesh", "dp=2", *given)).hardware == hardware


def test_a_plan_made_again_on_another_network() -> None:
    shipped = Plan.load(Path(app.demo.__file__).parent / "llama3-8b.plan.json.gz")
    assert command.plan_request(arguments("--fabric", "roce_8x400g"), shipped).hardware == "h100_sxm+roce_8x400g"


def test_unknown_network_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("planner.pipeline.make_plan", lambda *args, **kwargs: pytest.fail("refused before any work"))
    assert main(["plan", "llama3-tiny", "--mesh", "dp=2,tp=2", "--fabric", "pigeons"]) == 2
    assert "unknown fabric 'pigeons'" in capsys.readouterr().err
