"""Pinning: what can be pinned at the selection, to which placements, where."""

from __future__ import annotations

import streamlit as st

from app import drafts, state, work
from app.components.markup import plain
from app.components.pulse import pulse
from app.jobs import Job
from app.view_models import demands
from app.view_models import pins as pins_model
from app.view_models.pins import PinTarget
from app.view_models.placements import placement_of, placements_text
from app.view_models.setup_form import describe
from app.views import answers
from app.views.problems import show_error
from planner import PlannerError

STAGES = {"compile": "compiling the solver, once per installation"}
"""Stages of opening a plan that need more words."""

KINDS = ("Pin", "Allow", "Forbid", "Tie")
KIND_HELP = "Pin: exactly this placement. Allow: one of several. Forbid: none of several. Tie: whichever, but all matches alike."


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
    label = st.segmented_control(
        "Tensor", labels, default=labels[0], required=True, key=f"target {found.selected}", label_visibility="collapsed"
    )
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
        pulse(f"pulse {target.key}")
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
    stage = (job.stages[-1].name if job.stages else work.opening_stage(found)) or "opening the plan in a worker"
    return f"Asking which placements are legal ({plain(STAGES.get(stage, stage))}, {job.seconds:.0f} s)."


def _choose(found: state.Session, target: PinTarget, options: tuple[str, ...]) -> None:
    document = found.document
    assert document is not None
    if not options:
        st.caption("No placement can be chosen here: this tensor follows from others.")
        return
    now = placements_text(placement_of(document.plan, target.key))
    kind = st.segmented_control("Demand", KINDS, default=KINDS[0], required=True, key=f"kind {target.where}", help=KIND_HELP)
    chosen = _options(document, target, options, now, str(kind)) if kind != "Tie" else ()
    places = _places(found, document, target)
    matches, problem = _matches(document, places)
    said = f"{len(places)} selected ops" if len(places) > 1 else places[0]
    problem = problem or _tie_problem(str(kind), places, matches)
    st.caption(plain(problem) if problem else f"Matches {matches} tensor{'s' if matches != 1 else ''}: {plain(said)}")
    with st.container(horizontal=True, wrap=False, vertical_alignment="bottom", gap="small"):
        reason = st.text_input("Reason", key=f"reason {target.where}", placeholder="optional, kept with the plan")
        if st.button(f"{kind} {matches}", key="pin", disabled=bool(problem) or not (chosen or kind == "Tie")):
            pins, note = document.history.pins, drafts.signed(found, reason)
            for where in places:
                pins = demands.added(pins, demands.placed(str(kind), where, chosen, note, document.plan.mesh))
            drafts.set_pins(found, pins)
            st.rerun()
        here = [pin for pin in document.history.pins if demands.where_of(pin) in places]
        if here and st.button("Unpin", key="unpin"):
            drafts.set_pins(found, demands.without(document.history.pins, *here))
            st.rerun()
    alone = len(places) > 1 or problem or places[0] == target.where
    with st.container(key="answers"):
        st.fragment(answers.draw)(target.key, target.key if alone else places[0], options, now, chosen[0] if chosen else now)


def _options(document: state.Document, target: PinTarget, options: tuple[str, ...], now: str, kind: str) -> tuple[str, ...]:
    """The placements that are picked: one to pin, several to allow or forbid."""

    def shown(text: str) -> str:
        return f"{text} (now)" if text == now else text

    label = f"To, per axis {', '.join(document.plan.mesh.axis_names)}"
    if kind == "Pin":
        placement = st.pills(
            label, options, default=now if now in options else options[0], required=True, key=f"place {target.where} {now}",
            format_func=shown,
        )  # fmt: skip
        return (str(placement),)
    several = "One of" if kind == "Allow" else "None of"
    picked = st.pills(
        label.replace("To", several, 1), options, selection_mode="multi", key=f"{kind.lower()} {target.where} {now}",
        default=[now] if kind == "Allow" and now in options else [], format_func=shown,
    )  # fmt: skip
    return tuple(option for option in options if option in picked)


def _places(found: state.Session, document: state.Document, target: PinTarget) -> tuple[str, ...]:
    """Where the demand applies: one WHERE, or one for each op selected."""
    scopes = ["this one", *(["all layers"] if target.everywhere != target.where else []), "glob"]
    group = pins_model.same_of_group(document.shown, target, found.selected, found.group)
    if len(group) > 1:
        scopes.insert(0, f"{len(group)} selected")
    key = f"scope {target.where}" + (f" {len(group)}" if len(group) > 1 else "")
    scope = st.segmented_control("Where", scopes, default=scopes[0], required=True, key=key, label_visibility="collapsed")
    if scope == "glob":
        field = st.text_input("Glob", target.everywhere, key=f"glob {target.where}", help="* is one dotted part, ** any number.")
        return (field,)
    if scope == "all layers":
        return (target.everywhere,)
    return (target.where,) if scope == "this one" else group


def _tie_problem(kind: str, places: tuple[str, ...], matches: int) -> str:
    """Why these places cannot be tied, "" if they can."""
    if kind != "Tie":
        return ""
    if len(places) > 1:
        return "A tie is said by one glob: choose glob as Where, and write one that matches the ops."
    return "" if matches > 1 else "A tie needs several tensors: choose all layers or a glob as Where."


def _matches(document: state.Document, places: tuple[str, ...]) -> tuple[int, str]:
    """(number of tensors, "") or (0, why not)."""
    try:
        return sum(pins_model.count_matches(document.shown, where) for where in places), ""
    except PlannerError as error:
        return 0, describe(error)
