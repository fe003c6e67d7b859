"""The history of a project, from the logs of its drafts."""

from __future__ import annotations

from app.view_models.history import Past, columns, history


def plan(plan_id: str, at: str, base: str = "", **more: object) -> dict[str, object]:
    return {"event": "plan", "plan": plan_id, "base": base, "at": at, **more}


def test_drafts_are_told_in_one_order_and_a_plan_once():
    first = (plan("a", "2026-01-01T10:00:00+00:00", by="Ann"), plan("b", "2026-01-01T12:00:00+00:00", "a", by="Ann"))
    second = (plan("a", "2026-01-01T11:00:00+00:00", by="Bob"), {"event": "undo", "at": "2026-01-01T11:30:00+00:00"})
    assert [(past.plan_id, past.parent, past.by) for past in history([first, second])] == [("b", "a", "Ann"), ("a", "", "Ann")]


def test_the_last_note_counts_whoever_wrote_it():
    notes = [
        {"event": "note", "plan": "a", "text": "old", "at": "2026-01-02T00:00:00+00:00", "by": "Ann"},
        {"event": "note", "plan": "a", "text": "new", "at": "2026-01-03T00:00:00+00:00"},
    ]
    for logs in ([[plan("a", "2026-01-01T00:00:00+00:00"), *notes]], [[notes[1]], [plan("a", "2026-01-01"), notes[0]]]):
        assert history(logs)[0].note == "new (2026-01-03)"


def test_logs_of_older_versions_and_foreign_lines_are_read():
    logs = [[{"event": "plan", "plan": "a", "base": ""}, 3, {"plan": ""}, {"event": "pins", "pins": []}]]
    assert history(logs) == (Past(plan_id="a"),)
    table = columns(history(logs), "a")
    assert table[""] == ["open"] and table["when"] == [""] and table["step ms"] == [None]
