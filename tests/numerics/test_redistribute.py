"""The helper behind every `redistribute(...)` line of exported files = cutting up full tensors, for every single move."""

import re
import sys

import pytest

from tests.numerics.exported import run


@pytest.mark.parametrize(
    ("mesh", "shape", "number"),
    [
        ("a=4", "8,4", 19),
        ("a=2,b=2", "8,4", 151),
        ("a=2,b=3", "12,6", 151),
        ("a=2,b=2", "4,8,4", 321),
        ("a=2,b=2,c=2", "8,8", 907),
        ("a=2,b=1,c=2", "4,4", 151),
        ("a=2,b=2", "4", 57),
    ],
)
def test_every_move_of_a_lattice(mesh: str, shape: str, number: int) -> None:
    done = run([sys.executable, "-m", "tests.numerics.moves_on_threads", mesh, shape])
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"(\d+) moves", done.stdout)
    assert count is not None and int(count[1]) == number, done.stdout
