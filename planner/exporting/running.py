"""Running a file before it is handed out: in a folder and in processes of its own, until a deadline. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import ExportError
from planner.graph import JointGraph
from planner.units import GIB, format_gib

TIME_LIMIT_S = 900.0
FULL_SIZE_LIMIT_BYTES = 4 * GIB
"""A model that is known at its full size only is checked with real numbers if one step writes less than this."""

NOT_RUN = "GPU kernels, NCCL, the CUDA branch of attention"
NOT_COMPARED = f"not compared: a step at full size writes more than {format_gib(FULL_SIZE_LIMIT_BYTES)}"


def can_compare(graph: JointGraph, tiny: JointGraph | None) -> bool:
    """Small enough to run with real numbers, on one rank and on threads."""
    if tiny is not None:
        return True
    return sum(meta.num_bytes for node in graph.nodes for meta in node.outputs if meta is not None) < FULL_SIZE_LIMIT_BYTES


@dataclass(frozen=True)
class FileRunner:
    """Writes a text to `file` and runs it, or commands beside it.

    Attributes:
        deadline: on the monotonic clock, of all runs together.
        users_folder: where a user's file lies, whose functions the file imports; "" for a sample model.
    """

    file: Path
    text: str
    deadline: float
    users_folder: str = ""

    def __post_init__(self) -> None:
        self.file.write_text(self.text)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The file with these arguments."""
        return self.command([sys.executable, str(self.file), *arguments])

    def command(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Raises ExportError when the time is up."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(part for part in (root, self.users_folder, os.environ.get("PYTHONPATH", "")) if part)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        left = max(1.0, self.deadline - time.monotonic())
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=left, check=False, env=environment)
        except subprocess.TimeoutExpired as error:
            raise ExportError(
                f"verifying the exported file took longer than its time limit ({' '.join(command[1:3])})",
                hint="Export with fewer layers, or with --no-verify and run the file's --check yourself.",
            ) from error


def output_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
