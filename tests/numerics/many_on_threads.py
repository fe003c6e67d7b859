"""Many exported files of one model against its plain module: loss, every gradient and all counts. In a process of its own:

    python -m tests.numerics.many_on_threads request.json A.py B.py ...

Does what each file's --check --reference does, but computes the module's own step once, and loads torch once: each file runs in a
forked child with threads as ranks. Prints the line of each; exit code 1 if one differs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from planner.graph import ModelRequest
from planner.tracing.reference import reference_step

Truth = tuple[float, dict[str, torch.Tensor]]


def load(path: Path) -> ModuleType:
    module = ModuleType("exported")
    module.__dict__["__file__"] = str(path)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    module.configure(["--check"])
    return module


def truth(request: ModelRequest, path: Path) -> Truth:
    """Of the user's module, with the values that every file of it draws."""
    values = path.with_suffix(".values.pt")
    load(path).write_values(values)
    found: dict[str, Any] = reference_step(request, torch.load(values, weights_only=True))
    return float(found["loss"]), found["grads"]


def passes(path: Path, wanted: Truth) -> bool:
    """In a forked child, which prints what differs."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        file = load(path)
        file.install_threads()
        file.count_calls()
        passed = file.compare(f"{path.name} on {file.MESH_SHAPE}", file.step_on_threads(file.MESH_SHAPE), *wanted)
        sys.stdout.flush()
        os._exit(0 if passed else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main(request: str, *paths: str) -> int:
    torch.set_num_threads(1)
    wanted = truth(ModelRequest.from_json(json.loads(Path(request).read_text())), Path(paths[0]))
    verdicts = [passes(Path(path), wanted) for path in paths]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
