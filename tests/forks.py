"""Python commands in processes of their own that need not import torch again: see fork_server.py.

Not for what a test says of processes themselves (signals, starting, what a fresh interpreter imports): that runs in real ones.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER = Path(__file__).with_name("fork_server.py")


def can_fork(command: Sequence[str]) -> bool:
    """`python file.py ...` or `python -m module ...` of this interpreter."""
    return command[0] == sys.executable and (command[1] == "-m" or command[1].endswith(".py"))


class ForkServer:
    """Started by its first command; ends with this process."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()

    def _start(self) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-P", str(SERVER), str(theirs.fileno())]
        self.process = subprocess.Popen(
            command,
            env={**environment, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,  # of all children too: open as long as this process lives
        )
        theirs.close()

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float | None = None,
        **as_usual: object,
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run(..., capture_output=True, text=True)`; what cannot be forked is started by that."""
        if not can_fork(command):
            return subprocess.run(command, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False)
        with self._starting:
            if self.process is None:
                self._start()
        asked = {"arguments": list(command[1:]), "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            code = self._wait(asked, output.fileno(), errors.fileno(), timeout)
            output.seek(0)
            errors.seek(0)
            if code is None:
                raise subprocess.TimeoutExpired(list(command), timeout or 0.0)
            return subprocess.CompletedProcess(list(command), code, output.read(), errors.read())

    def _wait(self, asked: dict[str, object], output: int, errors: int, timeout: float | None) -> int | None:
        """The exit code; None if the time is up, the process is killed then."""
        answer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with answer:
            with theirs:
                socket.send_fds(self.channel, [json.dumps(asked).encode()], [output, errors, theirs.fileno()])
            told = answer.recv(64)
            assert told, "the fork server ended"
            pid = int(told)
            answer.settimeout(timeout)
            try:
                return int(answer.recv(64))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                answer.settimeout(None)
                answer.recv(64)
                return None


FORKS = ForkServer()
"""Of this process."""
