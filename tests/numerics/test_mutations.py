"""The negative control: a file with one wrong line among its redistributions must fail its own --dry-run or --check.

Every kind of `mutations.py`. Right numbers alone show little: a redistribution awaited too late, or issued in another order than
priced, computes the same on this machine.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from planner.workbench import Workbench
from tests.numerics.exported import Model, any_plan, optimum, python, recipe, run
from tests.numerics.mutations import mutants

KINDS = {"drop", "target", "source", "whole", "late", "half", "call"}


def noticed(text: str, folder: Path, *flags: str, timeout_s: float = 600.0) -> dict[str, dict[str, int]]:
    """Run mutants of a file -> by kind, how many were noticed by what. Fails if one was not."""
    path = folder / "train.py"
    path.write_text(text)
    done = run([sys.executable, "-m", "tests.numerics.mutations", str(path), *flags], timeout_s=timeout_s)
    assert done.stdout.strip(), done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and not found["missed"], found
    counts: dict[str, dict[str, int]] = found["noticed"]
    return counts


def test_a_sample_of_wrong_lines_is_noticed(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    assert set(noticed(llama.script(recipe(bench, "fsdp_tp_sp")), tmp_path, "--every", "19")) == KINDS


def test_a_rank_that_fails_before_it_meets_the_others_ends_the_check(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    """The other ranks wait for it to make their groups: they must not keep the process from saying what happened."""
    text = llama.script(recipe(bench, "fsdp_tp_sp"))
    joined = "            take_place()\n"
    assert text.count(joined) == 1
    path = tmp_path / "train.py"
    path.write_text(
        text.replace(joined, f"            if rank == 3:\n                raise Wrong('rank 3 has no place')\n{joined}")
    )
    done = python(path, "--check", timeout_s=200)
    assert done.returncode not in (0, None) and "rank 3 has no place" in done.stderr, done.stdout + done.stderr


def test_every_line_that_moves_something_is_changed(llama: Model, bench: Workbench) -> None:
    """The control is worth as much as its mutants: every line with a redistribution is dropped, retargeted and moved once."""
    text = llama.script(recipe(bench, "fsdp_tp_sp"))
    lines = [
        line for line in text.splitlines() if re.search(r"^ +\w+ = redistribute(_begin|_end)?\(", line) and "real" not in line
    ]
    lines = [line for line in lines if "layouts" not in line]
    found = list(mutants(text, 1))
    assert sorted(words for kind, words, _ in found if kind == "drop") == sorted(line.strip() for line in lines)
    assert sum(kind == "target" for kind, *_ in found) == sum(kind == "source" for kind, *_ in found) == len(lines)
    assert len({whole for *_, whole in found} - {text}) > 0.95 * len(found), "mutants differ from the file and from each other"


def test_a_redistribution_that_is_left_out_shows_in_the_numbers_alone(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    """A pending sum that is not summed: without its counts, --check still notices."""
    text = llama.script(recipe(bench, "fsdp_tp_sp"))
    wrong, count = re.subn(r"= redistribute\((\w+), P_P, R_R\)", r"= \1", text, count=1)
    told = '    """Where the counts of a step are not those of the plan."""\n'
    assert count == 1 and told in wrong
    path = tmp_path / "train.py"
    path.write_text(wrong.replace(told, f"{told}    return []\n"))
    done = python(path, "--check")
    assert done.returncode == 1 and "counts as planned -> FAIL" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimum", "fsdp_tp_sp"])
def test_every_wrong_line_is_noticed(llama: Model, bench: Workbench, tmp_path: Path, name: str) -> None:
    plan = optimum(bench) if name == "optimum" else recipe(bench, name)
    text = llama.script(plan)
    found = noticed(text, tmp_path, "--others", "2", timeout_s=5000)
    assert sum(sum(counts.values()) for counts in found.values()) == len(list(mutants(text, 2))) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "tp_sp", "random"])
def test_a_larger_sample_of_other_plans(llama: Model, bench: Workbench, tmp_path: Path, name: str) -> None:
    plan = any_plan(bench, 2) if name == "random" else recipe(bench, name)
    noticed(llama.script(plan), tmp_path, "--every", "40" if name == "random" else "6", timeout_s=3000)
