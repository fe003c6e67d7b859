"""A Python process that has imported torch and forks a child for each request: seconds of importing are paid once.

    python -P tests/fork_server.py FD

FD is a socket of packets, each with a JSON object (`arguments` as of the interpreter, `cwd`, `env`) and three descriptors: where
standard output and standard error go, and a socket that gets the child's process id and then its exit code. The process ends when
the other end of FD is closed. A child has what a fresh interpreter has after the imports at the top of an exported file: of torch
exactly those, and nothing of this project.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

HEAD = Path(__file__).parents[1] / "planner" / "exporting" / "templates" / "head.py.txt"
HIGHEST_MESSAGE_BYTES = 1 << 20


def imports_of_exported_files() -> str:
    return "\n".join(line for line in HEAD.read_text().splitlines() if line.startswith(("import torch", "from torch")))


def run_here(arguments: list[str]) -> int:
    """As `python file.py ...` or `python -m module ...` -> the exit code."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    as_module = arguments[0] == "-m"
    first = os.getcwd() if as_module else str(Path(arguments[0]).resolve().parent)
    sys.path[:0] = [first, *(part for part in inherited if part)]
    sys.argv = arguments[1:] if as_module else arguments
    try:
        if as_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def child(request: dict[str, Any], output: int, errors: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        # Before there are threads: PyTorch makes its pool anew after a fork, and two that do so at once break it.
        sys.modules["torch"].set_num_threads(1)
        code = run_here(request["arguments"])
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of an interpreter does
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve_one(request: dict[str, Any], output: int, errors: int, answer: socket.socket) -> None:
    """In a process of its own, which waits for the child and never returns."""
    pid = os.fork()
    if pid == 0:
        answer.close()
        child(request, output, errors)
    answer.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    answer.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def main(channel: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    exec(imports_of_exported_files(), {})
    waiting: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, HIGHEST_MESSAGE_BYTES, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            channel.close()
            output, errors, answer = descriptors
            serve_one(json.loads(message), output, errors, socket.socket(fileno=answer))
        waiting.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        waiting = {pid for pid in waiting if os.waitpid(pid, os.WNOHANG) == (0, 0)}


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
