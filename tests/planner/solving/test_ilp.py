"""The integer program as a guest in a process: it prints nothing."""

import subprocess
import sys

PROGRAM = """
import numpy as np
from planner.solving.ilp import solve_ilp
from planner.solving.layout import EdgeSpec, flatten
port = np.arange(2, dtype=np.int32)
layout = flatten([2, 2], [EdgeSpec(0, 1, port, port, 0)], [np.array([[0.0, 1.0], [1.0, 0.0]])])
print("before")
found = solve_ilp(layout, np.array([1.0, 2.0, 2.0, 1.0]))
print("after", found.status, found.value_us)
"""


def test_the_solver_prints_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["before", "after optimal 3.0"] and ran.stderr == ""
