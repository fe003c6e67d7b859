"""Changes of pins and plans, written to the workspace before the page is drawn again: a refresh or a restart finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

from app.owners import browser_mark
from app.state import Session, workspace
from app.view_models import demands
from app.view_models import pins as pins_model
from app.view_models.pins import PinHistory, Pins
from planner import InputError, Plan


def set_pins(found: Session, pins: Pins) -> None:
    _change(found, lambda history: history.change(pins), pins_model.pins_event(pins))


def signed(found: Session, reason: str) -> str:
    """The note of what is demanded now."""
    return demands.stamped(reason, found.author, date.today())


def undo(found: Session) -> None:
    _change(found, PinHistory.undo, {"event": "undo"})


def redo(found: Session) -> None:
    _change(found, PinHistory.redo, {"event": "redo"})


def _change(found: Session, change: Callable[[PinHistory], PinHistory], event: dict[str, Any]) -> None:
    assert found.document is not None
    history = change(found.document.history)
    if history == found.document.history:
        return
    store(found)  # the state before, if this is the first change
    found.document = replace(found.document, history=history)
    found.infeasible, found.note = False, ""
    _log(found, event)


def set_budget(found: Session, memory_bytes: int) -> None:
    """Another memory budget for the next solve."""
    document = found.document
    assert document is not None
    store(found)
    found.document = replace(document, memory_bytes=memory_bytes)
    _log(found, pins_model.plan_event(document.plan, document.base, document.graph, memory_bytes))


def set_plan(found: Session, plan: Plan, base: Plan | None) -> None:
    """Another plan of the same model, compared with `base`."""
    document = found.document
    assert document is not None
    store(found)
    found.document = replace(document, plan=plan, base=base)
    same = plan.plan_id == document.plan.plan_id
    if found.stored:
        _writing(found, lambda: workspace().save_plan(document.project, plan, better_proof=same))
        _log(found, pins_model.plan_event(plan, base, document.graph, document.memory_bytes))


def set_base(found: Session, base: Plan) -> None:
    """Another plan to compare the open one with: strip and graph say what differs from it."""
    document = found.document
    assert document is not None
    store(found)
    if found.stored:
        _writing(found, lambda: workspace().save_plan(document.project, base))
    set_plan(found, document.plan, base)


def set_plan_note(found: Session, plan_id: str, text: str) -> None:
    """What someone wants to be known of a plan of the project; the last note counts."""
    store(found)
    _log(found, pins_model.note_event(plan_id, text))


def store(found: Session) -> None:
    """Puts the project, graph, plans and draft into the workspace if they are not there yet."""
    document = found.document
    if found.stored or document is None:
        return

    def write() -> None:
        folder = workspace()
        folder.save_project(document.project, {"schema": 1, "name": document.name, "graph": document.graph.fingerprint})
        folder.save_graph(document.project, document.graph)
        for plan in (document.base, document.plan):
            if plan is not None:
                folder.save_plan(document.project, plan)
        opened = pins_model.plan_event(document.plan, document.base, document.graph, document.memory_bytes, browser_mark())
        folder.append_event(document.project, document.draft, opened | pins_model.signature(found.author))
        for pins in (*document.history.past, document.history.pins):
            folder.append_event(document.project, document.draft, pins_model.pins_event(pins))
        found.stored = True

    _writing(found, write)


def _log(found: Session, event: dict[str, Any]) -> None:
    document = found.document
    assert document is not None
    if found.stored:
        signed = event | pins_model.signature(found.author)
        _writing(found, lambda: workspace().append_event(document.project, document.draft, signed))


def _writing(found: Session, write: Callable[[], None]) -> None:
    """A failed write is shown in a banner; the session goes on in memory."""
    try:
        write()
        found.storage_error = None
    except OSError as error:
        found.storage_error = InputError(
            f"changes cannot be stored in {workspace().root}: {error.strerror}",
            hint="They live in this browser tab only. Export what you want to keep, or free some space.",
        )
