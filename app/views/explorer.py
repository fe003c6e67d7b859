"""Explorer: the plan as a graph, the inspector beside it, the op table below it."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import state, work
from app.components.plan_graph import plan_graph
from app.view_models import changes, op_table
from app.view_models.graph_messages import marked
from app.view_models.pins import pinned_keys
from app.views import panels
from app.views.problems import no_plan

PANEL_WIDTH = 372


def page() -> None:
    found = state.session()
    if found.document is None:
        no_plan()
        return
    if st.session_state.get("page") != "Explorer":  # the graph starts anew after a page switch
        found.from_graph = None
        if found.selected:
            state.select(found, found.selected)
    _take_table_click(found)
    work.warm_worker(found)
    st.fragment(_explorer)()
    _table(found)


def _explorer() -> None:
    """Graph and panel share one fragment: a click reruns them and nothing else."""
    found = state.session()
    document = found.document
    assert document is not None
    drawn = state.drawn(document.shown)
    with st.container(horizontal=True, gap="small", key="explorer"):
        with st.container(width="stretch"):
            selected, group = plan_graph(drawn.topology, overlay(found), focus=found.focus, key=f"graph_{document.draft}")
        if selected != found.from_graph:
            found.from_graph = found.selected = selected
            state.write_address(found)
        found.group = tuple(key for key in group if key in drawn.keys) if selected == found.selected else ()
        with st.container(width=PANEL_WIDTH, key="panel"):
            panels.draw(found)


def overlay(found: state.Session) -> dict[str, Any]:
    """The overlay message, made anew only when plan, base or pins change."""
    document = found.document
    assert document is not None
    what = (document.plan.plan_id, document.base.plan_id if document.base else "", document.history.pins)
    if found.overlay is None or found.overlay[0] != what:
        pins, _ = pinned_keys(document.shown, document.history.pins)
        base = changes.changed_keys(document.shown, document.base, document.plan) if document.base else {}
        found.overlay = (what, marked(state.plan_message(document), pins=pins, base=base))
    return dict(found.overlay[1])


def _take_table_click(found: state.Session) -> None:
    """The table is drawn below the graph, so its selection is read from the state of the last run."""
    rows = st.session_state.get("op_table", {}).get("selection", {}).get("rows", [])
    if rows != st.session_state.get("op_table_seen", []):
        st.session_state["op_table_seen"] = rows
        if rows and found.document is not None:
            state.select(found, state.drawn(found.document.shown).keys[rows[0]])


def _table(found: state.Session) -> None:
    """Sent to the browser only when asked for."""
    document = found.document
    assert document is not None
    if st.toggle("Op table", key="show_table", help="The same data as the graph; a row selects its op."):
        columns = op_table.columns(state.drawn(document.shown), overlay(found), document.plan)
        st.dataframe(
            columns, key="op_table", on_select="rerun", selection_mode="single-row", height=420, hide_index=True, width="stretch",
        )  # fmt: skip


if __name__ == "__main__":  # Streamlit runs the file of a page
    page()
