"""What the user typed as a model of their own: which kind of source it is, and whether this server may run it.

A Python file and an exported program are code, and a config makes code run; so they are taken only from folders that whoever
started the server allows, and only by a worker process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

Folders = Sequence[Path] | None
"""Folders that models may come from; None: any path of this machine."""

FORMS = "file.py:factory, program.pt2 or hf:config.json"
_CONFIG = re.compile(r",(?=[A-Za-z_]\w*=)")


def kind_of(model: str) -> str:
    """In words for the page; "" if the text is none of the kinds."""
    if model.startswith("hf:"):
        return "A causal language model of transformers, built from its config"
    if model.endswith(".pt2"):
        return "A program of torch.export.save; its sizes are fixed"
    if re.search(r"\.py(:|$)", model):
        return "A Python file and its function that returns (module, args)"
    return ""


def path_of(model: str) -> Path | None:
    """The file that would be read; None for a class of transformers (`hf:llama`) or what is no source."""
    if model.startswith("hf:"):
        what = _CONFIG.split(model.removeprefix("hf:"))[0]
        return Path(what).expanduser() if what.endswith(".json") or "/" in what else None
    if model.endswith(".pt2"):
        return Path(model).expanduser()
    path = model.rpartition(":")[0] if ":" in model else model
    return Path(path).expanduser() if path.endswith(".py") else None


def problem_of(model: str, folders: Folders) -> str | None:
    """What is wrong with a model of the user's own, said before a worker starts; None if nothing is seen from here."""
    if re.search(r"\.py$", model) or re.search(r"\.py:$", model):
        return f"{model!r} names no factory. Write file.py:factory, where factory() returns the model."
    path = path_of(model)
    if path is None:
        return None
    if folders is not None and not any(path.resolve().is_relative_to(folder.resolve()) for folder in folders):
        places = ", ".join(map(str, folders)) or "no folder"
        return f"This server runs models from {places} only. Start it with --model-code FOLDER to allow more."
    if not path.is_file() and not (model.startswith("hf:") and (path / "config.json").is_file()):
        return f"There is no file {path}. Write a path on this machine: {FORMS}."
    return None


def allowed_folders(arguments: Sequence[str], address: str | None) -> Folders:
    """`--model-code FOLDER` after `streamlit run app/main.py --`, any number of times. Without it, any path if the server
    listens to this machine alone, and none if others can reach it."""
    named = [Path(arguments[at + 1]).expanduser() for at, word in enumerate(arguments[:-1]) if word == "--model-code"]
    if named:
        return tuple(named)
    return None if address in ("127.0.0.1", "localhost", "::1") else ()
