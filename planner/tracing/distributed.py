"""Models that are distributed already are refused by name: the planner decides where tensors lie and what is communicated."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from planner import torch_compat
from planner.errors import UnsupportedOpError
from planner.tracing.locate import user_frames

HINT = "Give the model for a single device; the planner adds the communication."

_COLLECTIVE = re.compile(
    r"\b(all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast\w*|reduce|gather|scatter|barrier|send|recv|isend|irecv"
    r"|batch_isend_irecv|get_rank|get_world_size)\("
)


def refuse_distributed(module: nn.Module, tensors: list[Any]) -> None:
    """Raises UnsupportedOpError naming the first wrapper, parameter, buffer or input that belongs to a distributed model."""
    for name, part in module.named_modules():
        wrapper = torch_compat.distributed_wrapper(part)
        if wrapper:
            raise UnsupportedOpError(
                f"the module {name or '(top level)'} is wrapped by {wrapper}", op=wrapper, module=name, source="", hint=HINT
            )
    for name, tensor in _held(module):
        if torch_compat.is_dtensor(tensor):
            raise UnsupportedOpError(
                f"{name} is a DTensor: the model is distributed already",
                op="DTensor",
                module=name.rpartition(".")[0],
                source="",
                hint=HINT,
            )
    if any(torch_compat.is_dtensor(tensor) for tensor in tensors):
        raise UnsupportedOpError("an input of the model is a DTensor", op="DTensor", module="", source="", hint=HINT)


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def communication(module: nn.Module, error: BaseException) -> UnsupportedOpError | None:
    """The refusal of a model whose forward failed at a call of torch.distributed; None if it failed at something else."""
    for file, line in reversed(user_frames(error)):
        call = _COLLECTIVE.search(linecache.getline(file, line))
        if call is not None and re.search("group|distributed|rank", str(error)):
            name = _module_at(module, file, line)
            place = f"{file.rpartition('/')[2]}:{line}"
            return UnsupportedOpError(
                f"{call[1]} communicates (in {name or 'the top module'}, {place})",
                op=call[1],
                module=name,
                source=place,
                hint=HINT,
            )
    return None


def _module_at(module: nn.Module, file: str, line: int) -> str:
    """Path of the first module with a method that holds the line."""
    for name, part in module.named_modules():
        for _, method in inspect.getmembers(type(part), inspect.isfunction):
            lines = [number for _, _, number in method.__code__.co_lines() if number]
            if method.__code__.co_filename == file and lines and min(lines) <= line <= max(lines):
                return name
    return ""
