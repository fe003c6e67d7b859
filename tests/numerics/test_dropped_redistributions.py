"""The negative control: a file without one of its redistributions, or one half of it, must fail its own --check or --dry-run.

A fresh process for every mutation: after one failure the threads of a process are no longer to be trusted. Clean runs before and
after show that the harness itself passes.
"""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from planner.workbench import Workbench
from tests.numerics.exported import Model, any_plan, optimum, python

LINE = re.compile(r"= redistribute(?:_begin|_end)?\((\w+)(?:, \w+)+\)$", flags=re.M)


def passes(text: str, folder: Path, name: str) -> tuple[bool, bool]:
    """Whether --dry-run and --check pass. A run that hangs does not."""
    path = folder / f"{name}.py"
    path.write_text(text)
    verdicts = []
    for flag in ("--dry-run", "--check"):
        try:
            done = python(path, flag, timeout_s=150)
            verdicts.append(done.returncode == 0 and "FAIL" not in done.stdout and "PASS" in done.stdout)
        except subprocess.TimeoutExpired:
            verdicts.append(False)
    return verdicts[0], verdicts[1]


def missed(text: str, folder: Path, every: int, *, both: bool = False) -> tuple[int, list[str]]:
    """Drop each `every`-th redistribution -> how many, and the lines that neither run noticed (`both`: or one of them)."""
    sites = list(LINE.finditer(text))[::every]
    assert passes(text, folder, "clean_before") == (True, True)
    with ThreadPoolExecutor(2) as pool:
        mutants = [text[: m.start()] + f"= {m[1]}" + text[m.end() :] for m in sites]
        results = list(pool.map(lambda pair: passes(pair[1], folder, f"mutant_{pair[0]}"), enumerate(mutants)))
    assert passes(text, folder, "clean_after") == (True, True)
    bad = [m[0] for m, (dry, check) in zip(sites, results, strict=True) if (dry or check if both else dry and check)]
    return len(sites), bad


def test_a_sample_of_dropped_redistributions_is_noticed(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    text = llama.script(any_plan(bench, 1))
    number, bad = missed(text, tmp_path, every=len(LINE.findall(text)) // 6)
    assert number >= 6 and not bad


@pytest.mark.slow
def test_every_dropped_redistribution_of_the_optimum_is_noticed(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    number, bad = missed(llama.script(optimum(bench)), tmp_path, every=1, both=True)
    assert number > 10 and not bad, "each by --dry-run and by --check alone"


@pytest.mark.slow
def test_many_dropped_redistributions_of_a_random_plan_are_noticed(llama: Model, bench: Workbench, tmp_path: Path) -> None:
    number, bad = missed(llama.script(any_plan(bench, 2)), tmp_path, every=12)
    assert number > 40 and not bad
