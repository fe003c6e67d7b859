"""Programs saved by `torch.export.save` as sources: `path/model.pt2`.

Loading one may run code, so it happens only where models of the user's run (see `planner.loading`). The program is a forward pass
at fixed sizes; backward is derived when it is traced. Its inputs are the example inputs that were saved with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.errors import InputError, UnknownModelError

SUFFIX = ".pt2"


def factory(model: str) -> Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """A factory without sizes: those of an exported program are fixed.

    Raises:
        UnknownModelError: there is no such file.
    """
    path = Path(model).expanduser()
    if not path.is_file():
        raise UnknownModelError(
            f"there is no file {path}", hint=f"A program of torch.export.save; the path is relative to {Path.cwd()}."
        )
    return lambda: load(path)


def load(path: Path) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The program as a module, with its example inputs.

    Raises:
        InputError: not a program, made by a torch that this one cannot read, saved without example inputs, or for inference.
    """
    try:
        with torch.device("cpu"):  # the program says itself where its tensors are
            program = torch.export.load(path)
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as an exported program: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            hint=f"Save it with torch.export.save under torch {torch.__version__.split('+')[0]}.",
        ) from error
    if program.example_inputs is None:
        raise InputError(f"{path} was saved without example inputs", hint="Save what torch.export.export returned, as it is.")
    args, kwargs = program.example_inputs
    module = program.module(check_guards=False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(
            f"{path} has no parameter that requires gradients", hint="Export the model in training, not for inference."
        )
    return module, tuple(args), dict(kwargs)
