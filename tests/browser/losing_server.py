"""`streamlit run` that loses messages as Streamlit does when a fragment is asked for in the instant in which a run ends: a new
runner takes over, and what the old one has not delivered is discarded. Here that happens to the first page after every job:
0, 4, 40 of its messages arrive, again and again.
"""

import sys
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from streamlit.runtime.app_session import AppSession
from streamlit.runtime.scriptrunner import get_script_run_ctx
from streamlit.runtime.scriptrunner.script_runner import ScriptRunnerEvent
from streamlit.web import cli

from app import work

due: dict[str, int] = {}  # session -> how many messages of its next page arrive
left: dict[Any, int] = {}  # runner -> how many of its messages still arrive
ENDS = (ScriptRunnerEvent.SCRIPT_STOPPED_WITH_SUCCESS, ScriptRunnerEvent.SCRIPT_STOPPED_FOR_RERUN)
counts = cycle((0, 4, 40))
poll, handle = work.poll, AppSession._handle_scriptrunner_event_on_event_loop


def losing_poll(found: Any, shown: int | None = None) -> bool:
    first = found.running is not None
    asks = poll(found, shown)
    context = get_script_run_ctx()
    if asks and first and found.running is None and context is not None:
        due[context.session_id] = next(counts)
    return asks


def losing_handle(self: AppSession, sender: Any, event: Any, *rest: Any) -> None:
    whole_page = event is ScriptRunnerEvent.SCRIPT_STARTED and not rest[4]
    if whole_page and self.id in due:
        left[sender] = due.pop(self.id)
    lost = left.get(sender) == 0
    if event in ENDS:
        left.pop(sender, None)
    elif sender in left and not lost and event is ScriptRunnerEvent.ENQUEUE_FORWARD_MSG:
        left[sender] -= 1
    if not lost:
        handle(self, sender, event, *rest)


work.poll = losing_poll
AppSession._handle_scriptrunner_event_on_event_loop = losing_handle  # type: ignore[method-assign]
sys.argv[0] = "streamlit"
cli.main()
