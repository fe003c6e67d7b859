"""Asks the server for news while something runs, and says which page the browser has really drawn.

Streamlit can drop the messages of a page run: when a fragment is asked for in the instant in which a run ends, a new runner
takes over and whatever the old one has not delivered yet is discarded. The server cannot see that. So the browser reports the
number of the last page that arrived whole (its end mark is there), and a page that did not arrive is drawn again.

A `run_every` fragment cannot do this: its timer is stopped by the first message of the very run whose rest may be lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import streamlit as st

_component = st.components.v2.component(
    "pulse",
    html='\n<span class="pulse"></span>\n',  # Streamlit takes a string of one line that holds "/" for a file path
    js=(Path(__file__).parent / "pulse.js").read_text(encoding="utf-8"),
)


class Beat(NamedTuple):
    """What the browser said last: the page it shows, and a number that differs from that of every other beat."""

    page: int
    number: float


def pulse(key: str, *, page: int, busy: bool) -> Beat | None:
    """Reruns the fragment around it every 0.2 s (later 0.6 s) while `busy`, and if page number `page` does not arrive."""
    state = _component(key=key, data={"page": page, "busy": busy}, default={"beat": None}, on_beat_change=lambda: None)
    beat = getattr(state, "beat", None)
    return Beat(int(beat["page"]), float(beat["number"])) if beat else None


def end_mark(page: int) -> None:
    """The last element of a page: everything before it has arrived when it has."""
    st.html(f'<span class="page-end" data-page="{page}" hidden></span>')
