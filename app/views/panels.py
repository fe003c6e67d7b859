"""The panel beside the graph: inspect and pin, what changed, export."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import asking, state, work
from app.components import markup
from app.components.markup import plain
from app.view_models import changes, inspector
from app.views import demand_list, pin_panel
from planner import report_lines

PANES = ("Inspect", "Changes", "Export")


def draw(found: state.Session) -> None:
    asking.follow(found)
    pane = st.segmented_control("Panel", PANES, default=found.pane, required=True, key="pane", label_visibility="collapsed")
    found.pane = pane if pane in PANES else PANES[0]
    if pane == "Changes":
        _changes(found)
    elif pane == "Export":
        _export(found)
    else:
        _inspect(found)
        demand_list.draw(found)


def _inspect(found: state.Session) -> None:
    document = found.document
    assert document is not None
    seen = inspector.inspect(document.shown, document.plan, found.selected) if found.selected else None
    if seen is None:
        st.info("Click a module to open it, an op to inspect and pin it. The Keys button in the graph lists the keyboard.")
        return
    with st.container(border=True, key="inspector"):
        several = f" · {len(found.group)} ops selected" if len(found.group) > 1 else ""
        st.markdown(f"**{plain(seen.title)}** · {plain(seen.phase)}{several}")
        st.code(seen.key, language=None, wrap_lines=True)
        facts = [seen.source, seen.op, f"{seen.compute_us:,.0f} µs compute" if seen.compute_us else ""]
        st.caption(plain(" · ".join(fact for fact in facts if fact)))
        if seen.operands:
            st.html(markup.tensor_table(seen.operands, "Reads"))
        st.html(markup.tensor_table(seen.outputs, "Makes" if seen.operands else "Holds"))
        pin_panel.pin_form(found)


def _changes(found: state.Session) -> None:
    document = found.document
    assert document is not None
    if document.base is None:
        st.info("This plan has no base plan yet. Pin something and solve again: what changed is listed here.")
        return
    groups = changes.grouped(document.base, document.plan)
    count = sum(group.count for group in groups)
    st.markdown(f"**{count:,} tensors changed** against base plan {document.base.plan_id[:7]}")
    with st.container(height=560, border=True, key="changes"):
        for number, group in enumerate(groups):
            with st.container(horizontal=True, vertical_alignment="center", gap="small"):
                st.html(markup.change_row(group.name, group.before, group.after, group.count), width="stretch")
                if st.button("Show", key=f"show_{number}", type="tertiary"):
                    state.select(found, group.first)
                    st.rerun()


def _export(found: state.Session) -> None:
    document = found.document
    assert document is not None
    ready = found.exported is not None and found.exported[0] == document.plan.plan_id
    with st.container(border=True, key="export"):
        st.markdown("**Training script for PyTorch**")
        st.caption("One file, torch only, with the plan beside it. It is checked against the model before it is handed out.")
        if document.plan.report.status != "optimal":
            st.caption(f"Not proven optimal: within {100 * document.plan.report.gap:.2g} %.")
        if pin_panel.is_stale(document):
            st.caption("The pins changed since this plan was solved; the export is of the plan, without those changes.")
        if not ready:
            if st.button("Write and check", type="primary", key="export_start", disabled=found.running is not None):
                work.export(found)
                st.rerun()
            return
        assert found.exported is not None
        _exported(found.exported[1], document.plan.plan_id)


def _exported(result: Any, plan_id: str) -> None:
    """Downloads, then what was checked, then the first lines."""
    with st.container(horizontal=True):
        st.download_button(
            "Download train.py",
            result.script,
            "train.py",
            "text/x-python",
            key="download_script",
            on_click="ignore",
            type="primary",
        )
        st.download_button(
            "Download plan", result.plan_json, "train.plan.json", "application/json", key="download_plan", on_click="ignore"
        )
    st.markdown("**Checks**")
    st.html(markup.lines(report_lines(result.report)))
    with st.expander(f"First lines (plan {plan_id[:7]})"):
        st.code("\n".join(result.script.splitlines()[:40]), language="python")
