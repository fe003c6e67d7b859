"""Where in the user's code something happened: `models.py:12`, never a line of torch or of the planner."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

from torch import __file__ as _torch_file

from planner import torch_compat

_FOREIGN = (
    str(Path(_torch_file).parent) + os.sep,
    str(Path(__file__).parent.parent) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
    "<",
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(stack_trace: str) -> str:
    """Innermost user line of a formatted stack, as `file.py:12`; "" if none of it is the user's."""
    return _innermost((match[1], int(match[2])) for match in _FRAME.finditer(stack_trace))


def error_line(error: BaseException) -> str:
    """Innermost user line that led to `error`, as `file.py:12`; "" if unknown."""
    return _innermost(user_frames(error))


def user_frames(error: BaseException) -> list[tuple[str, int]]:
    """(file, line) of the user's frames that led to `error`, outermost first; those of its cause if it has none of its own."""
    current: BaseException | None = error
    while current is not None:
        frames = [(frame.filename, frame.lineno or 0) for frame in torch_compat.error_frames(current)]
        frames = frames or [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(current.__traceback__)]
        quoted = [(match[1], int(match[2])) for match in _FRAME.finditer(str(current))]  # some only quote the stack in their text
        found = _of_user(frames) or _of_user(quoted)
        if found:
            return found
        current = current.__cause__ or current.__context__
    return []


def _of_user(frames: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [frame for frame in frames if not frame[0].startswith(_FOREIGN)]


def _innermost(frames: Iterable[tuple[str, int]]) -> str:
    users = _of_user(frames)
    return f"{os.path.basename(users[-1][0])}:{users[-1][1]}" if users else ""
