"""Pinning: what can be pinned at the selection, to which placements, where; and the list of pins."""

from __future__ import annotations

import streamlit as st

from app import drafts, state, work
from app.components import markup
from app.components.markup import plain
from app.components.pulse import pulse
from app.jobs import Job
from app.view_models import demands
from app.view_models import pins as pins_model
from app.view_models.pins import PinTarget
from app.view_models.placements import placement_of, placements_text
from app.view_models.setup_form import describe
from app.views.problems import show_error
from planner import Pin, PlannerError

SCOPES = ("this one", "all layers", "glob")


def is_stale(document: state.Document) -> bool:
    return demands.num_changed(document.history.pins, document.plan) > 0


def pin_form(found: state.Session) -> None:
    """Target, then legal placements as soon as the worker has answered, then scope, reason and the button."""
    document = found.document
    assert document is not None and found.selected is not None
    targets = pins_model.targets(document.shown, found.selected)
    if not targets:
        return
    labels = [target.label for target in targets]
    label = st.segmented_control("Pin", labels, default=labels[0], required=True, key=f"target {found.selected}")
    chosen: PinTarget = targets[labels.index(label)] if label in labels else targets[0]
    work.legal(found, chosen.key).wait(0.15)  # a warm worker answers sooner
    with st.container(key="placements"):
        st.fragment(_placements)(chosen)


def _placements(target: PinTarget) -> None:
    found = state.session()
    if found.document is None:
        return
    job = work.legal(found, target.key)
    if job.active:
        pulse(f"pulse {target.key}", page=found.page, busy=True)
        st.caption(_waiting_text(found, job))
    elif job.error is not None:
        if show_error(job.error, key="legal"):
            work.forget_failed(found, target.key)
            st.rerun()
    else:
        _choose(found, target, pins_model.offered(job.result))


def _waiting_text(found: state.Session, job: Job) -> str:
    if found.running is not None:
        return "The legal placements follow when the running job has ended."
    if job.waits_for_room:
        return "Legal placements: waiting for a free core."
    stage = job.stages[-1].name if job.stages else "opening the plan in a worker"
    return f"Asking which placements are legal ({plain(stage)}, {job.seconds:.0f} s)."


def _choose(found: state.Session, target: PinTarget, options: tuple[str, ...]) -> None:
    document = found.document
    assert document is not None
    if not options:
        st.caption("No placement can be chosen here: this tensor follows from others.")
        return
    now = placements_text(placement_of(document.plan, target.key))
    axes = document.plan.mesh.axis_names
    placement = st.pills(
        f"To, per axis {', '.join(axes)}", options, default=now if now in options else options[0], required=True,
        key=f"place {target.where} {now}", format_func=lambda text: f"{text} (now)" if text == now else text,
    )  # fmt: skip
    assert placement is not None
    everywhere = target.everywhere != target.where
    scopes = SCOPES if everywhere else ("this one", "glob")
    scope = st.segmented_control("Where", scopes, default=scopes[0], required=True, key=f"scope {target.where}")
    where = target.everywhere if scope == "all layers" else target.where
    if scope == "glob":
        where = st.text_input("Glob", target.everywhere, key=f"glob {target.where}", help="* is one dotted part, ** any number.")
    reason = st.text_input("Reason", key=f"reason {target.where}", placeholder="optional, kept with the plan")
    matches, problem = _matches(document, where)
    st.caption(plain(problem) if problem else f"Matches {matches} tensor{'s' if matches != 1 else ''}: {plain(where)}")
    with st.container(horizontal=True):
        if st.button(f"Pin {matches}", key="pin", disabled=matches == 0):
            drafts.set_pins(found, demands.added(document.history.pins, _pin(document, where, placement, reason)))
            st.rerun()
        here = [pin for pin in document.history.pins if demands.where_of(pin) == where]
        if here and st.button("Unpin", key="unpin"):
            drafts.set_pins(found, demands.without(document.history.pins, *here))
            st.rerun()


def _pin(document: state.Document, where: str, placement: str, reason: str) -> Pin:
    parsed = Pin.parse(f"{where}={placement}", document.plan.mesh)
    return Pin(where=parsed.where, placements=parsed.placements, note=reason.strip())


def _matches(document: state.Document, where: str) -> tuple[int, str]:
    """(number of tensors, "") or (0, why not)."""
    try:
        return pins_model.count_matches(document.shown, where), ""
    except PlannerError as error:
        return 0, describe(error)


def pin_list(found: state.Session) -> None:
    document = found.document
    assert document is not None
    history = document.history
    _, orphans = pins_model.pinned_keys(document.shown, history.pins)
    with st.container(border=True, key="pins"):
        stale = " · plan is stale" if is_stale(document) else ""
        st.markdown(f"**Pins ({len(history.pins)})**{stale}")
        for number, pin in enumerate(history.pins):
            where = demands.where_of(pin)
            matches = orphans.get(pin) or (_count_text(document, where) if where else "")
            with st.container(horizontal=True, vertical_alignment="center", gap="small"):
                st.html(
                    markup.demand_row(demands.headline(pin), where, demands.options_of(pin), demands.note_of(pin), matches),
                    width="stretch",
                )
                if st.button("Remove", key=f"remove_{number}", type="tertiary"):
                    drafts.set_pins(found, demands.without(history.pins, pin))
                    st.rerun()
        with st.container(horizontal=True):
            if st.button("Undo", key="undo", disabled=not history.past):
                drafts.undo(found)
                st.rerun()
            if st.button("Redo", key="redo", disabled=not history.future):
                drafts.redo(found)
                st.rerun()
            if st.button("Clear", key="clear", disabled=not history.pins):
                drafts.set_pins(found, ())
                st.rerun()


def _count_text(document: state.Document, where: str) -> str:
    count = pins_model.count_matches(document.shown, where)
    return f"×{count}" if count > 1 else ""
