"""The plans of the project in the order in which they came about, and notes on them."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import drafts, plans, state
from app.components.markup import plain
from app.view_models import history
from app.view_models.history import Past
from app.view_models.setup_form import describe
from app.views.demand_list import author_field
from planner import Plan, PlannerError


def draw(found: state.Session) -> None:
    document = found.document
    assert document is not None
    pasts, problems = plans.history(found)
    for problem in problems:
        st.caption(plain(describe(problem)))
    if not pasts:
        st.info("Nothing is stored yet: the plan on show is written with the first pin, note or solve.")
    event: Any = st.dataframe(
        history.columns(pasts, document.plan.plan_id), hide_index=True, width="stretch",
        height=36 + 35 * max(1, min(len(pasts), 12)), on_select="rerun", selection_mode="single-row", key=f"history_{len(pasts)}",
        column_config={
            "step ms": st.column_config.NumberColumn(format="%.3f"), "peak GiB": st.column_config.NumberColumn(format="%.2f"),
        },
    )  # fmt: skip
    rows = event["selection"]["rows"]
    picked = pasts[rows[0]] if rows and rows[0] < len(pasts) else Past(plan_id=document.plan.plan_id)
    _actions(found, picked)


def _actions(found: state.Session, picked: Past) -> None:
    document = found.document
    assert document is not None
    is_open = picked.plan_id == document.plan.plan_id
    st.markdown(f"**Plan {picked.plan_id[:7]}**" + (", the open one" if is_open else ""))
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        text = st.text_input("Note", key=f"plan_note {picked.plan_id}", placeholder="what a reader of the history should know")
        if st.button("Save note", key="save_plan_note", disabled=not text.strip()):
            drafts.set_plan_note(found, picked.plan_id, text)
            st.rerun()
        author_field(found)
    if is_open:
        st.caption("Select a row to open that plan or to compare it with the open one.")
        return
    with st.container(horizontal=True):
        plan = plans.load(found, plans.Option(stored=picked.plan_id))
        if not isinstance(plan, Plan):
            st.caption(plain(describe(plan)) if isinstance(plan, PlannerError) else "")
            return
        if st.button("Open", key="open_past", help="As a draft of its own; the open plan becomes its base."):
            plans.open_plan(found, plan, document.graph, document.graph_path)
            found.arrived = True
            st.rerun()
        if st.button("Make it the base plan", key="base_past", help="Strip, graph and changes then say what differs from it."):
            drafts.set_base(found, plan)
            st.rerun()
