"""Demands that cannot hold together: the smallest set of them, what giving each one up would bring, and one click to do it."""

from __future__ import annotations

import streamlit as st

from app import asking, drafts, state, work
from app.components import markup
from app.components.markup import plain
from app.components.pulse import pulse
from app.view_models import demands, prices
from app.view_models.setup_form import describe
from app.view_models.status import GIB, budget_bytes
from planner import InfeasibleError, Relaxation
from planner.constraint import Constraint
from planner.pipeline import hardware_profile

BUDGET = "memory budget"
OF_THE_MODEL = "what the data loader delivers or the loss needs; a pin at the same place replaces it"


def draw(found: state.Session, error: InfeasibleError) -> bool:
    """Whether the user dismissed it."""
    with st.container(border=True, key="conflict", gap="small"):
        with st.container(horizontal=True, wrap=False, vertical_alignment="center"):
            st.error(plain(describe(error)), width="stretch")
            dismissed = st.button("Dismiss", key="dismiss_session")
        if error.conflicts:
            st.markdown("**These cannot hold together.** Without any one of them the others may; plan and pins are kept.")
            st.fragment(_members)(error)
    return dismissed


def _members(error: InfeasibleError) -> None:
    found = state.session()
    document = found.document
    if document is None or found.running is not None:
        return
    job = asking.give_up(found, tuple(error.conflicts))
    job.wait(0.1)
    gains = {r.constraint: r for r in (job.result if job.state == "done" else tuple(job.rows))}
    for number, text in enumerate(error.conflicts):
        demand = demands.by_description(document.history.pins, text)
        with st.container(horizontal=True, vertical_alignment="center", gap="small", key=f"member_{number}"):
            st.html(_member(document, text, demand, gains.get(text), waiting=job.active), width="stretch")
            if demand is not None and st.button("Remove and retry", key=f"give_up_{number}"):
                drafts.set_pins(found, demands.without(document.history.pins, demand))
                _retry(found)
            if text.startswith(BUDGET) and error.shortfall_bytes is not None:
                _raise_budget(found, document, error.shortfall_bytes)
    if job.active:
        pulse("conflict pulse")


def _member(document: state.Document, text: str, demand: Constraint | None, gain: Relaxation | None, *, waiting: bool) -> str:
    """The demand as it is listed elsewhere, and what giving it up brings."""
    without = "trying without it …" if waiting else "not tried"
    if gain is not None:
        without = f"without it: {prices.gain_text(gain, document.plan)}"
    if demand is None:
        own = "" if text.startswith(BUDGET) else OF_THE_MODEL
        return markup.demand_row(text, own, (), without, "")
    return markup.demand_row(demands.headline(demand), demands.where_of(demand), demands.options_of(demand), without, "")


def _raise_budget(found: state.Session, document: state.Document, shortfall: int) -> None:
    limit = document.memory_bytes if document.memory_bytes is not None else budget_bytes(document.plan)
    if limit is None:
        return
    room = hardware_profile(document.plan.hardware_name).default_budget_bytes
    if limit + shortfall > room:
        st.caption(f"A device leaves {room / GIB:.1f} GiB to a plan.", width="content")
    elif st.button(f"Raise to {(limit + shortfall) / GIB:.1f} GiB and retry", key="raise_budget"):
        drafts.set_budget(found, limit + shortfall)
        _retry(found)


def _retry(found: state.Session) -> None:
    work.solve(found)
    st.rerun()
