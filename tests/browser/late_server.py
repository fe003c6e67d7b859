"""`streamlit run` on a machine so busy that the event loop hears of everything a run does 0.15 s late.

Whatever is clicked, and every beat, then meets runs that have ended and whose elements are still on their way: the moment in
which Streamlit by itself forgets them.
"""

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from streamlit.runtime.app_session import AppSession
from streamlit.web import cli

LATE_S = 0.15
on_their_way: dict[str, deque[Callable[[], None]]] = {}


def call_late(self: AppSession, callback: Callable[[], None]) -> None:
    """Timers of the same moment fire in any order, so each takes the oldest callback instead of its own."""
    waiting, loop = on_their_way.setdefault(self.id, deque()), self._event_loop
    waiting.append(callback)

    def oldest() -> None:
        waiting.popleft()()

    loop.call_soon_threadsafe(loop.call_later, LATE_S, oldest)


AppSession._call_soon_on_event_loop = call_late  # type: ignore[method-assign]
sys.argv[0] = "streamlit"
cli.main()
