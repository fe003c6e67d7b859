"""How the plans of a project came about: which was solved from which, when, by whom, and what was noted about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from app.view_models.status import GIB


@dataclass(frozen=True, kw_only=True)
class Past:
    """A plan of a project.

    Attributes:
        parent: id of the plan it was solved from, "" for one that was opened.
        at: when it was first there, ISO 8601 in UTC, "" if nobody wrote that down. `by`: who, "" likewise.
        step_us, peak_bytes: as predicted then, None likewise.
        note: what was noted last, with who and when.
    """

    plan_id: str
    parent: str = ""
    at: str = ""
    by: str = ""
    step_us: float | None = None
    peak_bytes: int | None = None
    note: str = ""


def history(drafts: Iterable[Iterable[Mapping[str, Any]]]) -> tuple[Past, ...]:
    """From the logs of all drafts, the newest first. A plan that several drafts opened counts once, as it was first met; the last
    note on a plan counts."""
    lines = (event for draft in drafts for event in draft if isinstance(event, Mapping) and event.get("plan"))
    events = sorted(lines, key=lambda event: str(event.get("at", "")))
    found: dict[str, Past] = {}
    notes: dict[str, str] = {}
    for event in events:
        plan_id = str(event["plan"])
        if event.get("event") == "note":
            notes[plan_id] = _signed(event)
        elif event.get("event") == "plan":
            before = found.get(plan_id)
            found[plan_id] = _past(event) if before is None else replace(before, parent=before.parent or _parent(event))
    return tuple(replace(past, note=notes.get(past.plan_id, "")) for past in reversed(found.values()))


def _past(event: Mapping[str, Any]) -> Past:
    return Past(
        plan_id=str(event["plan"]), parent=_parent(event), at=str(event.get("at", "")), by=str(event.get("by", "")),
        step_us=event.get("step_us"), peak_bytes=event.get("peak_bytes"),
    )  # fmt: skip


def _parent(event: Mapping[str, Any]) -> str:
    return str(event.get("base", ""))


def _signed(event: Mapping[str, Any]) -> str:
    text = str(event.get("text", ""))
    signs = ", ".join(filter(None, (str(event.get("by", "")), str(event.get("at", ""))[:10])))
    return f"{text} ({signs})" if text and signs else text


def columns(pasts: Iterable[Past], open_id: str) -> dict[str, list[Any]]:
    """For a table; `open_id` is marked."""
    rows = tuple(pasts)
    return {
        "": ["open" if past.plan_id == open_id else "" for past in rows],
        "plan": [past.plan_id[:7] for past in rows],
        "solved from": [past.parent[:7] for past in rows],
        "when": [_local(past.at) for past in rows],
        "by": [past.by for past in rows],
        "step ms": [None if past.step_us is None else past.step_us / 1e3 for past in rows],
        "peak GiB": [None if past.peak_bytes is None else past.peak_bytes / GIB for past in rows],
        "note": [past.note for past in rows],
    }  # fmt: skip


def _local(at: str) -> str:
    """In the time of the server; what cannot be read stays as it is."""
    try:
        return f"{datetime.fromisoformat(at).astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return at
