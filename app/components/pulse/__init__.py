"""Asks the server for news while something runs.

A `run_every` fragment would do that too, but its timer goes on while a run is under way, and ends with the first message of the
next one. This one waits until the browser has heard the end of the run, so that beats do not pile up behind a slow page.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

_component = st.components.v2.component(
    "pulse",
    html='\n<span class="pulse"></span>\n',  # Streamlit takes a string of one line that holds "/" for a file path
    js=(Path(__file__).parent / "pulse.js").read_text(encoding="utf-8"),
)


def pulse(key: str, *, busy: bool = True, patient: bool = False) -> None:
    """Reruns the fragment around it every 0.2 s (after 4 s, or when `patient`, every 0.6 s) while `busy`."""
    _component(key=key, data={"busy": busy, "patient": patient}, default={"beat": None}, on_beat_change=lambda: None)
