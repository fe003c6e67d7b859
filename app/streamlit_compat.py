"""The private parts of Streamlit that the app depends on, here and nowhere else.

**No message is lost between two runs.** A run sends its elements, its end and, when nothing more is asked for, the shutdown of
its runner, all through the event loop. A request that comes in while some of that still waits there is refused by the runner,
which has stopped; Streamlit (1.67, `AppSession.request_rerun`) then makes a new runner at once, and from that moment ignores
whatever the old one has sent. The browser goes on showing what was there before, for good if the rest was a whole page. Beats
that ask for news and clicks meet that moment again and again on a busy machine. So here a refused request waits for the
shutdown, which is the last thing a runner sends; several are passed on in the order in which they came.

**A part of a page is drawn on the page that is shown.** A request for a fragment names the page on which the browser sent it. One
that is sent just before the browser hears of another page names the one that was left: folded into a request for the new page it
would lead back (Streamlit takes the page of the later one), and run after it it would drop what the new page's widgets hold. So a
fragment is asked for on the page of the session, and never changes the page of a request that waits.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

from streamlit.runtime.app_session import AppSession, AppSessionState
from streamlit.runtime.scriptrunner.script_runner import ScriptRunnerEvent
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData, ScriptRequests, ScriptRequestType

CREATE, HANDLE = "_create_scriptrunner", "_handle_scriptrunner_event_on_event_loop"
REQUEST = "request_rerun"
_HELD = "requests_held"
"""Name of the attribute of a session that lists what waits for the end of its runner."""


def install() -> None:
    """Once per server, however often it is called."""
    hear_runs_out()
    keep_to_the_page()


def keep_to_the_page() -> None:
    """Lets requests for fragments never change the page."""
    ask, fold = getattr(AppSession, REQUEST), getattr(ScriptRequests, REQUEST)
    if hasattr(ask, "__wrapped__"):
        return

    @functools.wraps(ask)
    def ask_on_the_page_shown(self: AppSession, client_state: Any) -> None:
        page = self._pages_manager.current_page_script_hash
        if client_state is not None and client_state.fragment_id and page:
            client_state.page_script_hash = page
        ask(self, client_state)

    @functools.wraps(fold)
    def fold_on_the_page_wanted(self: ScriptRequests, new_data: RerunData) -> bool:
        waits = self._rerun_data
        if self._state is ScriptRequestType.RERUN and new_data.fragment_id and not waits.fragment_id_queue:
            new_data = replace(
                new_data, query_string=waits.query_string, page_script_hash=waits.page_script_hash, page_name=waits.page_name
            )
        return fold(self, new_data)

    setattr(AppSession, REQUEST, ask_on_the_page_shown)
    setattr(ScriptRequests, REQUEST, fold_on_the_page_wanted)


def hear_runs_out() -> None:
    """Lets every run of every session be heard out."""
    create, handle = getattr(AppSession, CREATE, None), getattr(AppSession, HANDLE, None)
    if create is None or handle is None:
        logging.getLogger(__name__).warning("This Streamlit is built in another way: pages can miss the end of a run.")
        return
    if hasattr(create, _HELD):
        return

    @functools.wraps(create)
    def create_or_hold(self: AppSession, data: Any) -> None:
        if self._scriptrunner is None:
            create(self, data)
        else:  # it refused, so it is about to shut down
            vars(self).setdefault(_HELD, []).append(data)

    @functools.wraps(handle)
    def handle_and_pass_on(self: AppSession, sender: Any, event: ScriptRunnerEvent, *rest: Any) -> None:
        handle(self, sender, event, *rest)
        if event is not ScriptRunnerEvent.SHUTDOWN or self._scriptrunner is not None:
            return
        held = vars(self).pop(_HELD, [])
        if self._state is AppSessionState.SHUTDOWN_REQUESTED:
            return
        for data in held:
            if self._scriptrunner is None or not self._scriptrunner.request_rerun(data):
                self._create_scriptrunner(data)

    setattr(create_or_hold, _HELD, True)
    for name, method in ((CREATE, create_or_hold), (HANDLE, handle_and_pass_on)):
        setattr(AppSession, name, method)
