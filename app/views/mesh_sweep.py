"""Every mesh shape of the devices at hand: a table that fills, step time against memory, and a click that opens a plan."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import plans, state, work
from app.charts.pareto import pareto_chart
from app.components.markup import plain
from app.components.pulse import pulse
from app.view_models import sweep_table
from app.view_models.setup_form import describe
from app.view_models.status import budget_bytes
from planner import PlannerError
from planner.sweep import Entry, SweepRequest


def draw(found: state.Session) -> None:
    document = found.document
    assert document is not None
    request = sweep_table.request_of(document.plan, document.memory_bytes)
    axes = _ask(request)
    running = found.sweep is not None and found.sweep.job.active
    try:
        count = sweep_table.num_meshes(request.devices, axes)
    except PlannerError as error:
        st.info(plain(describe(error)))
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        label = "Begin anew" if found.sweep is not None else f"Sweep {count} meshes"
        if st.button(label, key="sweep", type="primary" if found.sweep is None else "secondary", disabled=running):
            work.start_sweep(found, sweep_table.with_axes(request, axes))
            st.rerun()
        if running and st.button("Stop", key="stop_sweep"):
            work.stop_sweep(found)
            st.rerun()
    st.fragment(_rows)(running)


def _ask(request: SweepRequest) -> tuple[int, int]:
    st.caption(plain(
        f"{request.devices} devices of {request.hardware}, batch {request.model.batch or 'default'}, one trace. Constraints of "
        "the open plan are not part of it: they name its axes."
    ))  # fmt: skip
    most = st.segmented_control("Mesh axes at most", (1, 2, 3), default=2, required=True, key="sweep_axes")
    return (1, int(most or 2))


def _rows(was_running: bool) -> None:
    """Asks for news while the sweep runs; what has ended stays. The whole page is drawn again at its end."""
    found = state.session()
    running, document = found.sweep, found.document
    if running is None or document is None:
        st.info("The sweep solves every mesh shape and shows which are best: none has both a shorter step and less memory.")
        return
    job = running.job
    if was_running and not job.active:
        st.rerun()
    rows = list(job.rows)
    if job.active:
        pulse("pulse_sweep")
        stage = job.news or (job.stages[-1].name if job.stages else "starting the worker")
        st.caption(
            f"{len(rows)} done. Now: {plain('waiting for a free core' if job.waits_for_room else stage)}, {job.seconds:.0f} s"
        )
    elif job.error is not None:
        st.error(plain(describe(job.error)))
    elif job.state == "cancelled":
        st.caption(f"Stopped after {len(rows)} meshes.")
    else:
        st.caption(
            f"{len(rows)} meshes in {job.seconds:.0f} s. Fastest first; not beaten: no other is better in time and memory."
        )
    if not rows:
        return
    entries = sweep_table.ordered_entries(rows)
    picked = _table(entries)
    clicked = _chart(entries, budget_bytes(document.plan))
    _open(found, clicked or picked, rows, busy=job.active)


def _table(entries: tuple[Entry, ...]) -> str:
    """The mesh of the row that is selected."""
    event: Any = st.dataframe(
        sweep_table.columns(entries), hide_index=True, width="stretch", height=36 + 35 * min(len(entries), 10),
        on_select="rerun", selection_mode="single-row", key=f"sweep_table_{len(entries)}",
        column_config={name: st.column_config.NumberColumn(format="%.1f") for name in sweep_table.DECIMALS},
    )  # fmt: skip
    rows = event["selection"]["rows"]
    return entries[rows[0]].mesh if rows and rows[0] < len(entries) else ""


def _chart(entries: tuple[Entry, ...], budget: int | None) -> str:
    """The mesh of the point that was clicked."""
    if not any(entry.solved for entry in entries):
        return ""
    event: Any = st.plotly_chart(
        pareto_chart(entries, budget), key=f"pareto_{len(entries)}", on_select="rerun", selection_mode="points", width="stretch",
        config={"displayModeBar": False},
    )  # fmt: skip
    points = event["selection"]["points"]
    value = points[0].get("customdata") if points else ""
    return str(value[0] if isinstance(value, (list, tuple)) and value else value or "")


def _open(found: state.Session, mesh: str, rows: list[Any], *, busy: bool) -> None:
    plan = next((plan for entry, plan in rows if entry.mesh == mesh), None)
    document = found.document
    assert document is not None
    if not mesh:
        st.caption("Select a row or a point to open its plan. Solved plans can also be chosen as A or B.")
    elif plan is None:
        st.caption(f"{plain(mesh)} has no plan to open.")
    else:
        note = " Opening it leaves the sweep running." if busy else ""
        if st.button(f"Open the plan of {plain(mesh)}", key="open_mesh", type="primary", help=f"As a draft of its own.{note}"):
            plans.open_plan(found, plan, document.graph, document.graph_path)
            found.arrived = True
            st.rerun()
