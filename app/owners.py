"""Which browser a draft belongs to, so that an address that is passed on opens a copy and not the same draft twice.

Nobody logs in here. Streamlit gives every browser a cookie against forged requests; a short digest of the token in it tells
browsers apart. Where there is none, drafts belong to whoever has their address.
"""

from __future__ import annotations

from hashlib import sha256

import streamlit as st

COOKIE = "_streamlit_xsrf"


def browser_mark() -> str:
    """Short digest that names this browser, "" if it cannot be told apart."""
    cookie = st.context.cookies.get(COOKIE)
    return mark_of(cookie) if isinstance(cookie, str) else ""


def mark_of(cookie: str) -> str:
    """Of a cookie `2|mask|masked token|time`: the token stays when the mask changes. Other texts count as they are."""
    parts = cookie.split("|")
    try:
        mask, masked = bytes.fromhex(parts[1]), bytes.fromhex(parts[2])
        token = bytes(byte ^ mask[place % len(mask)] for place, byte in enumerate(masked))
    except (IndexError, ValueError, ZeroDivisionError):
        token = cookie.encode()
    return sha256(token).hexdigest()[:12] if token else ""


def is_of_another(owner: str, mine: str) -> bool:
    """Only what is known to be another's."""
    return bool(owner and mine and owner != mine)
