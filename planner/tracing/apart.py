"""The child of `planner.loading`: traces one model and writes the graph, or what went wrong.

    python -m planner.tracing.apart REQUEST.json GRAPH.json.gz OUTCOME.json

It ends when its parent does, even if the model's code hangs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from planner.graph import ModelRequest
from planner.loading import error_as_json

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends this process
    request_file, graph_file, outcome_file = map(Path, argv)
    try:
        from planner.tracing.trace import trace

        asked = json.loads(request_file.read_text())
        repeated = None if asked["repeated"] is None else tuple(asked["repeated"])
        trace(ModelRequest.from_json(asked["request"]), repeated).save(graph_file)
    except Exception as error:
        outcome_file.write_text(json.dumps(error_as_json(error, traceback.format_exc())))
        return 1
    return 0


def _end_with_parent() -> None:
    """Standard input closes when the parent ends; on Linux the kernel also ends code that never yields to Python."""
    threading.Thread(target=_wait_for_end, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_end() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
