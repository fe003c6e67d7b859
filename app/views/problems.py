"""Errors and empty states: what happened, what to try, and nothing lost."""

from __future__ import annotations

import streamlit as st

from app import opening, state
from app.components.markup import plain
from app.view_models.setup_form import describe
from planner import InfeasibleError, PlannerError


def show_error(error: PlannerError, *, key: str) -> bool:
    """The error with its hint and details. Whether the user dismissed it."""
    with st.container(key=f"error_{key}", gap="small"):
        with st.container(horizontal=True, wrap=False, vertical_alignment="center"):
            st.error(plain(describe(error)), width="stretch")
            dismissed = st.button("Dismiss", key=f"dismiss_{key}")
        unsaid = [c for c in error.conflicts if c not in error.message] if isinstance(error, InfeasibleError) else []
        if unsaid:
            st.markdown("\n".join(["These cannot hold:", *(f"- {plain(conflict)}" for conflict in unsaid)]))
        report = error.details.get("traceback") or error.details.get("output")
        if report:
            with st.expander("Report"):
                st.code(str(report), language=None)
    return dismissed


def session_errors(found: state.Session) -> None:
    """Banners that belong to the session rather than to a page.

    In a container that is always there: what is below keeps its place in the page, by which Streamlit knows it again. Else the
    graph would be made anew with every banner, and a click on its way to it would go to something that is gone.
    """
    with st.container(key="banners"):
        if found.storage_error is not None:
            st.warning(plain(describe(found.storage_error)))
        if found.note:
            st.caption(plain(found.note))
        if found.error is not None and _session_error(found, found.error):
            found.error = None
            found.infeasible = False
            st.rerun()


def _session_error(found: state.Session, error: PlannerError) -> bool:
    """Whether the user dismissed it. A conflict of the demands as they are can be resolved here."""
    if found.infeasible and isinstance(error, InfeasibleError):
        from app.views import conflict

        return conflict.draw(found, error)
    return show_error(error, key="session")


def no_plan() -> None:
    """One sentence, and where to go from here."""
    st.info("No plan is open. Describe a model on the Setup page, or open the demo plan there.")
    with st.container(horizontal=True):
        if st.button("Go to Setup", key="no_plan_setup", type="primary"):
            st.switch_page("views/setup.py")
        if opening.demo_available() and st.button("Open the demo", key="no_plan_demo"):
            opening.open_demo(state.session())
            st.rerun()
