"""A request that meets the end of a run: that run is heard out. With Streamlit's own runtime and runners, without a browser."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.runtime import Runtime, RuntimeConfig
from streamlit.runtime.app_session import AppSession
from streamlit.runtime.memory_media_file_storage import MemoryMediaFileStorage
from streamlit.runtime.memory_uploaded_file_manager import MemoryUploadedFileManager
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData, ScriptRequests
from streamlit.runtime.state.session_state import SessionState

from app import streamlit_compat

SCRIPT = """
import streamlit as st

@st.fragment
def part():
    st.session_state.parts = st.session_state.get("parts", 0) + 1
    st.text(f"part {st.session_state.parts}")

st.session_state.pages = st.session_state.get("pages", 0) + 1
part()
for number in range(3):
    st.text(f"page {st.session_state.pages} element {number}")
"""


class Browser:
    """What a browser hears: texts, and ends of runs."""

    client_context = None

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.part = ""
        self.ids: dict[str, str] = {}

    def write_forward_msg(self, message: Any) -> None:
        if message.WhichOneof("type") == "script_finished":
            self.heard.append("end")
        elif message.delta.new_element.HasField("text"):
            self.heard.append(message.delta.new_element.text.body)
            self.part = message.delta.fragment_id or self.part
        for kind in ("checkbox", "button"):
            if message.delta.new_element.HasField(kind):
                widget = getattr(message.delta.new_element, kind)
                self.ids[widget.label] = widget.id

    async def hears(self, ends: int) -> None:
        async with asyncio.timeout(10):
            while self.heard.count("end") < ends:
                await asyncio.sleep(0.005)

    async def hears_no_more(self) -> None:
        """Several requests are answered by one run or by several: until the last of them has ended."""
        known = -1
        async with asyncio.timeout(10):
            while len(self.heard) > known or self.heard[-1] != "end":
                known = len(self.heard)
                await asyncio.sleep(0.3)


def rerun(fragment: str = "") -> BackMsg:
    message = BackMsg()
    message.rerun_script.fragment_id = fragment
    return message


@contextlib.asynccontextmanager
async def served(script: Path) -> AsyncIterator[tuple[Runtime, str, AppSession, Browser]]:
    """A runtime, a session of it and its browser, which has heard the first page."""
    runtime = Runtime(RuntimeConfig(
        script_path=str(script), media_file_storage=MemoryMediaFileStorage("/media"),
        uploaded_file_manager=MemoryUploadedFileManager("/upload"),
    ))  # fmt: skip
    browser = Browser()
    await runtime.start()
    try:
        number = runtime.connect_session(browser, {})
        runtime.handle_backmsg(number, rerun())
        await browser.hears(1)
        info = runtime._session_mgr.get_session_info(number)
        assert info is not None
        yield runtime, number, info.session, browser
    finally:
        runtime.stop()
        await runtime.stopped
        Runtime._instance = None


async def heard(script: Path, requests: int) -> list[str]:
    """A second page ends while the event loop is busy; then part of it is asked for, before anything of the page is delivered."""
    async with served(script) as (runtime, number, session, browser):
        await asyncio.sleep(0.05)  # its runner is gone
        browser.heard.clear()
        runtime.handle_backmsg(number, rerun())
        assert session._scriptrunner is not None
        session._scriptrunner._script_thread.join(10)
        for _ in range(requests):
            runtime.handle_backmsg(number, rerun(browser.part))
        with contextlib.suppress(TimeoutError):
            await browser.hears(2)
            await browser.hears_no_more()
        return browser.heard


PAGE = ["part 2", *(f"page 2 element {number}" for number in range(3)), "end"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.mark.parametrize("requests", [1, 3])
def test_a_page_is_heard_out_before_a_part_of_it_is_drawn_again(script: Path, requests: int):
    """Whether the part is sent with the page too depends on how fast messages leave."""
    streamlit_compat.hear_runs_out()
    said = asyncio.run(heard(script, requests))
    assert [text for text in said if text.startswith("page")] == PAGE[1:-1]
    assert said[-2] in ("part 3", "part 4", "part 5") and said[-1] == "end" and said.index("end") < len(said) - 1


def test_streamlit_by_itself_forgets_the_page(script: Path, monkeypatch: pytest.MonkeyPatch):
    """If this fails, Streamlit has learnt to hear runs out, and `hear_runs_out` can go."""
    streamlit_compat.hear_runs_out()
    for method in (streamlit_compat.CREATE, streamlit_compat.HANDLE):
        monkeypatch.setattr(AppSession, method, getattr(AppSession, method).__wrapped__)
    assert not set(asyncio.run(heard(script, 1))) & set(PAGE[1:-1])


PAGES = """
import streamlit as st

@st.fragment
def part():
    if st.session_state.pop("asks_for_all", False):
        st.rerun()

def show(name):
    st.text(f"page {name}")
    part()
    st.session_state.asks_for_all = True

names = ("one", "two")
st.navigation([st.Page(lambda name=name: show(name), title=name, url_path=name) for name in names]).run()
"""


async def heard_after_leaving(script: Path, waits: bool) -> list[str]:
    """Page two is asked for, and then a part of page one, as its browser does that has not heard of page two yet. `waits`: before
    page two has been begun."""
    async with served(script) as (runtime, number, session, browser):
        hashes = {page["page_name"]: name for name, page in session._pages_manager.get_pages().items()}
        (fragment,) = session._fragment_storage._fragments
        left, wanted = rerun(fragment), rerun()
        left.rerun_script.page_script_hash, wanted.rerun_script.page_script_hash = hashes["one"], hashes["two"]
        browser.heard.clear()
        runtime.handle_backmsg(number, wanted)
        if not waits:
            await browser.hears(1)
        runtime.handle_backmsg(number, left)
        await browser.hears_no_more()
        return browser.heard


@pytest.mark.parametrize("waits", [True, False])
def test_a_part_of_the_page_left_does_not_lead_back(tmp_path: Path, waits: bool):
    (tmp_path / "pages.py").write_text(PAGES)
    streamlit_compat.install()
    said = [text for text in asyncio.run(heard_after_leaving(tmp_path / "pages.py", waits)) if text != "end"]
    assert said and set(said) == {"page two"}


def test_a_part_folded_into_a_request_for_a_page_keeps_that_page():
    streamlit_compat.install()
    waiting = ScriptRequests()
    waiting.request_rerun(RerunData(page_script_hash="wanted", query_string="op=1"))
    waiting.request_rerun(RerunData(page_script_hash="left", query_string="", fragment_id="strip"))
    asked = waiting.on_scriptrunner_ready().rerun_data
    assert (asked.page_script_hash, asked.query_string, asked.fragment_id_queue) == ("wanted", "op=1", [])


PARTS = """
import streamlit as st

def pressed():
    st.session_state.calls = st.session_state.get("calls", 0) + 1

@st.fragment
def beats():
    st.checkbox("beat")

@st.fragment
def part():
    held, press = st.checkbox("held"), st.button("press", on_click=pressed)
    st.text(f"part {held} {press} {st.session_state.get('calls', 0)}")

beats()
part()
st.text(f"page {st.checkbox('of the page')}")
"""
"""The first fragment beats; the browser may gather a beat with whatever else is changed."""


async def heard_with_a_beat(script: Path, changed: str) -> list[str]:
    """What is drawn when one message brings a beat of the first fragment and another change."""
    async with served(script) as (runtime, number, session, browser):
        await asyncio.sleep(0.05)
        known = session.session_state._new_widget_state.widget_metadata
        message = rerun(known[browser.ids["beat"]].fragment_id)
        for label in ("beat", changed):
            one = message.rerun_script.widget_states.widgets.add(id=browser.ids[label])
            setattr(one, "trigger_value" if label == "press" else "bool_value", True)
        browser.heard.clear()
        runtime.handle_backmsg(number, message)
        await browser.hears_no_more()
        return [text for text in browser.heard if text != "end"]


@pytest.mark.parametrize(
    ("changed", "drawn"),
    [("held", ["part True False 0"]), ("press", ["part False True 1"]), ("of the page", ["part False False 0", "page True"])],
)
def test_what_changed_is_drawn_though_the_message_names_another_part(tmp_path: Path, changed: str, drawn: list[str]):
    """The callback of a press is called once."""
    (tmp_path / "parts.py").write_text(PARTS)
    streamlit_compat.install()
    assert asyncio.run(heard_with_a_beat(tmp_path / "parts.py", changed)) == drawn


def test_streamlit_by_itself_draws_the_named_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If this fails, Streamlit has learnt it, and `draw_what_changed` can go."""
    (tmp_path / "parts.py").write_text(PARTS)
    streamlit_compat.install()
    monkeypatch.setattr(SessionState, streamlit_compat.BEGIN, getattr(SessionState, streamlit_compat.BEGIN).__wrapped__)
    assert asyncio.run(heard_with_a_beat(tmp_path / "parts.py", "held")) == []
