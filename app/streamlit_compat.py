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

**Whatever was changed is drawn.** The browser gathers what happens within one turn of its loop into one message, which names the
fragment of the first change alone (`scheduleFlush` of its widget manager). So a click that shares a message with the beat of
another fragment arrives, but nothing that depends on it is drawn, on a busy machine often and for good. So here the parts of the
page to which the other changed widgets belong are asked for as well.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

from streamlit.proto.WidgetStates_pb2 import WidgetStates
from streamlit.runtime.app_session import AppSession, AppSessionState
from streamlit.runtime.scriptrunner import get_script_run_ctx
from streamlit.runtime.scriptrunner.script_runner import ScriptRunnerEvent
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData, ScriptRequests, ScriptRequestType
from streamlit.runtime.scriptrunner_utils.script_run_context import ScriptRunContext
from streamlit.runtime.state.session_state import SessionState

CREATE, HANDLE = "_create_scriptrunner", "_handle_scriptrunner_event_on_event_loop"
REQUEST, BEGIN = "request_rerun", "on_script_will_rerun"
_HELD = "requests_held"
"""Name of the attribute of a session that lists what waits for the end of its runner."""


def install() -> None:
    """Once per server, however often it is called."""
    hear_runs_out()
    keep_to_the_page()
    draw_what_changed()


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
        is_part = bool(new_data.fragment_id) or new_data.widget_states is None
        if self._state is ScriptRequestType.RERUN and is_part and not waits.fragment_id_queue:
            new_data = replace(
                new_data, query_string=waits.query_string, page_script_hash=waits.page_script_hash, page_name=waits.page_name
            )
        return fold(self, new_data)

    setattr(AppSession, REQUEST, ask_on_the_page_shown)
    setattr(ScriptRequests, REQUEST, fold_on_the_page_wanted)


def draw_what_changed() -> None:
    """Lets a run of some fragments ask for the others of which a widget has changed."""
    begin = getattr(SessionState, BEGIN, None)
    if begin is None:
        logging.getLogger(__name__).warning("This Streamlit is built in another way: clicks can meet a beat and be lost.")
        return
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def begin_and_ask(self: SessionState, fresh: WidgetStates | None, **rest: Any) -> None:
        begin(self, fresh, **rest)
        context = get_script_run_ctx(suppress_warning=True)
        if fresh is not None and context is not None and context.fragment_ids_this_run:
            _ask_for_others(self, fresh, context)

    setattr(SessionState, BEGIN, begin_and_ask)


def _ask_for_others(state: SessionState, fresh: WidgetStates, context: ScriptRunContext) -> None:
    """Another run, of each fragment (None: of the page) that is not drawn by this one and of which a widget has changed. It finds
    the new values in the state; only of a press is nothing left after this run, so it is told again, without its callback (of the
    states to replay, a request keeps the presses)."""
    known = state._new_widget_state.widget_metadata
    drawn = set(context.fragment_ids_this_run or ())
    missed = [one for one in fresh.widgets if one.id in known and known[one.id].fragment_id not in drawn]
    missed = [one for one in missed if state._widget_changed(one.id)]
    for fragment in dict.fromkeys(known[one.id].fragment_id for one in missed):
        if context.script_requests is not None:
            context.script_requests.request_rerun(RerunData(
                query_string=context.query_string, page_script_hash=context.page_script_hash, fragment_id=fragment,
                replay_trigger_states=WidgetStates(widgets=missed), cached_message_hashes=context.cached_message_hashes,
                context_info=context.context_info,
            ))  # fmt: skip


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
