"""Headings of pages and sections: small enough to leave the page to its figures, and real ones: a screen reader moves by them."""

from __future__ import annotations

from html import escape

import streamlit as st

_STYLE = """
<style>
.px-h { font-size: 15px; font-weight: 600; line-height: 1.4; margin: 0.35rem 0 0; padding: 0; }
.px-h .note { font-weight: 400; opacity: 0.75; }
.px-title { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); margin: 0; }
</style>
"""


def heading(text: str, note: str = "") -> None:
    """Of a section, with a few words on how to read it."""
    words = f' <span class="note">· {escape(note)}</span>' if note else ""
    st.html(f'{_STYLE}<h2 class="px-h">{escape(text)}{words}</h2>', width="stretch")


def page_title(text: str) -> None:
    """Heard, not seen: the navigation shows which page this is."""
    st.html(f'{_STYLE}<h1 class="px-title">{escape(text)}</h1>')
