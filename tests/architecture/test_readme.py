"""The README is one screen with exactly two set-up commands, and CI runs the second as it stands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return [line for line in blocks[0].splitlines() if line and not line.startswith("#")]


def test_two_commands_install_and_run_and_install_and_test() -> None:
    run, test = _commands()
    assert "streamlit run app/main.py" in run and "pip install" in run
    assert test.endswith("pytest") and "pip install" in test


def test_ci_calls_the_test_command() -> None:
    assert _commands()[1] in (ROOT / ".ci/run").read_text().splitlines()


def test_every_file_the_readme_names_exists() -> None:
    for name in re.findall(r"\]\(([\w./-]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
