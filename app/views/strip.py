"""The status strip, on every page: verdict, proof, time, memory, traffic; Re-solve, and the job that runs."""

from __future__ import annotations

import streamlit as st

from app import asking, state, work
from app.answering import Exposed
from app.components import markup
from app.components.pulse import pulse
from app.jobs import Running
from app.view_models import status
from app.view_models.demands import num_changed
from app.views.problems import session_errors
from planner import Plan

JOB_NAMES = {
    "start": "Planning", "solve": "Solving", "export": "Exporting", "recipe": "Pricing the recipe", "what_if": "Other hardware",
}  # fmt: skip


def draw(found: state.Session) -> None:
    st.html(markup.PAGE_STYLE)
    st.fragment(_strip)()
    session_errors(found)


def _strip() -> None:
    """Asks for news while a job runs; the whole page is drawn again when it ends."""
    found = state.session()
    document = found.document
    forecast = asking.exposed(found, may_ask=found.drawn) if document is not None else None
    waits = document is not None and (forecast is None or forecast.active or forecast.state == "cancelled")
    pulse("pulse", busy=waits or found.running is not None or found.proof is not None, patient=found.running is None)
    if work.poll(found):
        st.rerun()
    document = found.document
    with st.container(horizontal=True, wrap=False, vertical_alignment="center", gap="small", key="strip"):
        if document is not None:
            data = status.strip(
                document.plan, document.base, document.history.pins, infeasible=found.infeasible, proving=found.proof is not None,
                exposed=_forecast(found, document.plan), base_exposed=_forecast(found, document.base),
            )  # fmt: skip
            st.html(markup.strip(data), width="stretch")
        if found.running is not None:
            _running(found, found.running)
        elif document is not None:
            _actions(found, document, data)


def _forecast(found: state.Session, plan: Plan | None) -> Exposed | None:
    """As far as it is known; what the page asked the worker for is told when it is there."""
    job = found.questions.get(("exposed", plan.plan_id)) if plan is not None else None
    return job.result if job is not None and job.state == "done" else None


def _actions(found: state.Session, document: state.Document, data: status.Strip) -> None:
    stale = num_changed(document.history.pins, document.plan) > 0
    with st.popover("About these numbers"):
        _sources(data)
    if found.proof is not None and st.button("Stop proof", key="stop_proof"):
        work.stop_proof(found)
        st.rerun()
    if found.proof is None and not stale and document.plan.report.status != "optimal":
        if st.button("Prove", key="prove", help="Search on for a proof or a better plan, up to a minute, in the background."):
            work.prove(found)
            st.rerun()
    elif st.button("Re-solve", key="solve", type="primary" if stale else "secondary", disabled=not stale):
        work.solve(found)
        st.rerun()


def _running(found: state.Session, running: Running) -> None:
    job = running.job
    stage = job.stages[-1].name if job.stages else "starting the worker"
    text = "waiting for a free core" if job.waits_for_room else stage
    text = job.news or text
    detail = "" if text == running.kind else f" {markup.escape(text)},"
    st.html(
        f'<div class="px" role="status"><b>{JOB_NAMES[running.kind]}:</b>{detail} {job.seconds:.0f} s</div>',
        width="content",
    )
    ending = job.cut_short
    if st.button("Cancel now" if ending else "Cancel", key="cancel", help="Keeps the best plan so far, if there is one."):
        work.finish(found)
        st.rerun()


def _sources(data: status.Strip) -> None:
    st.html(markup.number_table(data.quantities), width=620)
    st.caption(
        "Predicted, not measured. GiB = 2³⁰, GB = 10⁹, MB = 10⁶ bytes. Step, compute and comm are in series, which is what "
        "plans are chosen by; overlapped numbers are a forecast beside it, drawn and explained on the Communication page."
    )
