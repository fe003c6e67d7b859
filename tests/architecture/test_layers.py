"""The rules of the architecture that a linter of imports cannot say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRIVATE_TORCH = re.compile(r"\b(?:torch|from torch|import torch)\.(?:[a-z_]+\.)*_[a-z]")


def _imported_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(m for m in ('torch', 'streamlit', 'pulp', 'numba') if m in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import planner",
        "from planner import Plan, JointGraph, Mesh, Pin",
        "import planner.pipeline; planner.pipeline.models(); planner.pipeline.hardware_names()",
        "import planner.cli",
    ],
)
def test_opening_a_plan_loads_no_heavy_library(statement: str) -> None:
    assert _imported_after(statement) == set()


def test_private_torch_names_live_in_one_file() -> None:
    """Ops named `torch.ops.aten._...` are part of graphs and not of torch's Python API."""
    offenders = []
    for path in [*ROOT.glob("planner/**/*.py"), *ROOT.glob("sample_models/*.py"), *ROOT.glob("app/**/*.py")]:
        if path.name == "torch_compat.py" or "templates" in path.parts:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if PRIVATE_TORCH.search(line.replace("torch.ops.aten._", "")):
                offenders.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not offenders, "\n".join(offenders)


def test_imports_follow_the_layers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "importlinter.cli", "lint"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode == 1 and "No module named" in done.stderr:
        done = subprocess.run(["lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_public_names_exist() -> None:
    import planner

    for name in planner.__all__:
        assert getattr(planner, name) is not None
