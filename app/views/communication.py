"""Communication: what is sent over which mesh axis, for which module, and when."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import state
from app.charts import communication as charts
from app.components import markup, tables
from app.components.headings import heading
from app.components.markup import plain
from app.view_models import communication, overlapped, timeline
from app.view_models.communication import Call, Filter
from app.view_models.overlapped import Overlapped
from app.view_models.setup_form import describe
from app.views.problems import no_plan
from planner import PlannerError

ALL = "all"
FILTERS = {"axis": "comm_axis", "kind": "comm_kind", "layer": "comm_layer", "module": "comm_module"}
VIEWS = ("Layers", "Timeline")
AS_SCHEDULED, SERIAL = "as scheduled", "in series"
HOW = "Drag to zoom, double-click for all, click to select an op."
OVERLAPPED_TEXT = (
    f"Predicted, not a trace: overlapped, in the order of the exported file. Exposed communication is hatched. {HOW}"
)
SERIAL_TEXT = (
    "Predicted, not a trace: serial, no overlap. The whole step in the order of the program, one thing after the other; "
    f"communication is hatched, all of it exposed. {HOW}"
)
CHART = {"displayModeBar": False, "scrollZoom": False}


def page() -> None:
    found = state.session()
    if found.document is None:
        no_plan()
        return
    st.fragment(_communication)()


def _communication() -> None:
    found = state.session()
    document = found.document
    assert document is not None
    calls = communication.calls_of(document.shown, document.plan)
    if not calls:
        st.info("This plan communicates nothing: every tensor is read where and as it is made.")
        return
    _take_icicle_click()
    by, unit, phase = _controls()
    chosen = _filters(calls, phase)
    of_phase = Filter(phase=chosen.phase).keep(calls)
    shown = chosen.keep(calls)
    _sums(document, shown, chosen)
    if not shown:
        return
    left, right = st.columns(2, gap="large")
    with left:
        heading("Per mesh axis, by collective")
        st.plotly_chart(charts.bars(communication.bars(shown, by, unit), unit), key="comm_bars", config=CHART)
        st.html(tables.flow_table(communication.flows(shown)))
    with right:
        heading("Mesh axis, collective, layer, module", "click to filter")
        tree = communication.tree(of_phase, unit)
        top = chosen.path if chosen.path in tree else ()
        key = f"comm_icicle_{st.session_state.get('comm_clicks', 0)}"
        st.plotly_chart(charts.icicle(tree, unit, top), key=key, on_select="rerun", selection_mode="points", config=CHART)
    forecast = _forecast(document)
    _views(found, shown, unit, forecast)
    _hotspots(found, shown, forecast)


def _controls() -> tuple[str, str, str]:
    with st.container(horizontal=True, gap="medium", vertical_alignment="bottom"):
        by = _choice("By", communication.GROUPINGS, "comm_by")
        unit = _choice("Unit", communication.UNITS, "comm_unit")
        phase = _choice("Phase", communication.PHASES, "comm_phase")
    return by, unit, phase


def _choice(label: str, options: tuple[str, ...], key: str) -> str:
    return st.segmented_control(label, options, default=options[0], required=True, key=key, width="content") or options[0]


def _filters(calls: tuple[Call, ...], phase: str) -> Filter:
    options = {
        "axis": communication.axes_of(calls),
        "kind": tuple(sorted({call.kind for call in calls})),
        "layer": communication.layers_of(calls),
        "module": tuple(sorted({call.module_name for call in calls})),
    }
    labels = {"axis": "Mesh axis", "kind": "Collective", "layer": "Layer", "module": "Module"}
    wanted: dict[str, str] = {}
    for column, (name, key) in zip(st.columns([1, 1, 1, 2]), FILTERS.items(), strict=True):
        if st.session_state.get(key, ALL) not in (ALL, *options[name]):
            st.session_state[key] = ALL  # of another plan
        value = column.selectbox(labels[name], (ALL, *options[name]), key=key)
        wanted[name] = "" if value == ALL else str(value)
    return Filter(phase="" if phase == ALL else phase, **wanted)


def _take_icicle_click() -> None:
    """A click on a box of the icicle sets the filters, which are drawn above it; one on the top box goes back up.

    Each click is answered by an icicle with a key of its own, so that the next one is seen even if it is on the same box.
    """
    count = st.session_state.get("comm_clicks", 0)
    points = st.session_state.get(f"comm_icicle_{count}", {}).get("selection", {}).get("points", [])
    if not points:
        return
    st.session_state["comm_clicks"] = count + 1
    clicked = str(points[0].get("id", ALL))
    path = [] if clicked == ALL else clicked.split("|")
    now = [st.session_state.get(key, ALL) for key in FILTERS.values()]
    if [*path, *[ALL] * (len(now) - len(path))] == now:
        path = path[:-1]
    for key, value in zip(FILTERS.values(), [*path, *[ALL] * (len(now) - len(path))], strict=True):
        st.session_state[key] = value


def _sums(document: state.Document, shown: tuple[Call, ...], chosen: Filter) -> None:
    quantities = communication.quantities(document.plan, shown)
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.html(tables.number_line(quantities), width="stretch")
        with st.popover("What is counted?"):
            st.html(markup.number_table(quantities), width=620)
            st.markdown("**Whole step, by collective**")
            st.html(markup.number_table(communication.price_sources(document.plan)), width=620)
            st.caption(plain(communication.BUS_SOURCE + "; the time includes copies around the call."))
            st.caption("GB = 10⁹ bytes. Not modelled: overlap of computation and communication, congestion of the network.")
        active = any((chosen.axis, chosen.kind, chosen.layer, chosen.module))
        if st.button("Clear filter", key="comm_clear", disabled=not active, on_click=_clear):
            st.rerun(scope="fragment")
    if not shown:
        st.info("No collective passes this filter.")


def _clear() -> None:
    for key in FILTERS.values():
        st.session_state[key] = ALL


def _forecast(document: state.Document) -> Overlapped | PlannerError:
    """The step with communication beside compute, or why there is none."""
    with st.spinner("Forecast of the step", show_time=True):
        return state.overlapped(document.shown, document.plan)


def _views(found: state.Session, shown: tuple[Call, ...], unit: str, forecast: Overlapped | PlannerError) -> None:
    if _choice("View", VIEWS, "comm_view") == "Timeline":
        _timeline(found, forecast)
        return
    strip = communication.heat(shown, unit)
    st.caption(plain(communication.heat_text(strip, unit)))
    layers = communication.only_layers(strip)
    if layers:
        st.plotly_chart(charts.heat_strip(layers, unit), key="comm_heat", config=CHART)


def _timeline(found: state.Session, forecast: Overlapped | PlannerError) -> None:
    document = found.document
    assert document is not None
    _take_timeline_click(found)
    order = SERIAL if isinstance(forecast, PlannerError) else _choice("Order", (AS_SCHEDULED, SERIAL), "comm_order")
    if isinstance(forecast, PlannerError):
        st.caption(plain(f"No overlapped forecast: {describe(forecast)}"))
    if order == SERIAL or isinstance(forecast, PlannerError):
        events, kind, text = timeline.serial(document.shown, document.plan), timeline.SERIAL_KIND, SERIAL_TEXT
    else:
        events, kind, text = forecast.events, timeline.OVERLAPPED_KIND, f"{OVERLAPPED_TEXT} {forecast.model}"
        st.html(tables.number_line(overlapped.quantities(forecast, document.plan)))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(plain(text), width="stretch")
        st.download_button(
            "Download Chrome trace",
            lambda: timeline.chrome_trace(events, document.plan, kind),
            f"{document.plan.plan_id}.{'serial' if order == SERIAL else 'overlapped'}.trace.json",
            "application/json",
            key="comm_trace",
            on_click="ignore",
            help="For Perfetto or chrome://tracing. Arguments hold op key, bytes and placements.",
        )
    figure = charts.timeline(timeline.spans(events), timeline.lanes(events), document.plan.mesh.axis_names)
    st.plotly_chart(figure, key="comm_timeline", on_select="rerun", selection_mode="points", config={"displayModeBar": False})


def _take_timeline_click(found: state.Session) -> None:
    points = st.session_state.get("comm_timeline", {}).get("selection", {}).get("points", [])
    clicked = points[0].get("customdata", ["", "", ""])[2] if points else ""
    if clicked and clicked != st.session_state.get("comm_timeline_seen", ""):
        found.selected = str(clicked)
    st.session_state["comm_timeline_seen"] = clicked


def _hotspots(found: state.Session, shown: tuple[Call, ...], forecast: Overlapped | PlannerError) -> None:
    exposed = {} if isinstance(forecast, PlannerError) else forecast.of_calls
    spots = communication.hotspots(shown, exposed)
    heading("Hotspots")
    slot = st.container(horizontal=True, vertical_alignment="center")
    event: Any = st.dataframe(
        {
            "module": [spot.module for spot in spots],
            "×": [spot.count for spot in spots],
            "collective": [spot.kind for spot in spots],
            "axis": [spot.axis for spot in spots],
            "from": [spot.source for spot in spots],
            "to": [spot.target for spot in spots],
            "phase": [spot.phase for spot in spots],
            "GB": [spot.num_bytes / 1e9 for spot in spots],
            "ms": [spot.us / 1e3 for spot in spots],
            **({"exposed ms": [spot.exposed_us / 1e3 for spot in spots]} if exposed else {}),
            "bus GB/s": [spot.bus_bytes_per_s / 1e9 for spot in spots],
        },
        column_config={
            "module": st.column_config.TextColumn(width="large"),
            "GB": st.column_config.NumberColumn(format="%.3f", help="Full buffers of one rank, all calls of the row"),
            "ms": st.column_config.NumberColumn(format="%.3f", help="Predicted, each call by itself"),
            "exposed ms": st.column_config.NumberColumn(format="%.3f", help=overlapped.EXPOSED_SOURCE),
            "bus GB/s": st.column_config.NumberColumn(format="%.0f", help=communication.BUS_SOURCE),
        },
        key="comm_spots", on_select="rerun", selection_mode="single-row", hide_index=True, width="stretch",
        height=min(420, 38 + 35 * len(spots)),
    )  # fmt: skip
    rows = [row for row in event["selection"]["rows"] if row < len(spots)]
    if rows != st.session_state.get("comm_spots_seen", []):
        st.session_state["comm_spots_seen"] = rows
        if rows:
            found.selected = spots[rows[0]].box
    with slot:
        _selected(found)


def _selected(found: state.Session) -> None:
    """The op that is selected, and the way to it."""
    if found.selected is None:
        st.caption("Select a row to see its op in the Explorer.")
        return
    st.caption(f"Selected: {plain(found.selected)}", width="stretch")
    if st.button("Show in Explorer", key="comm_show"):
        found.arrived = True
        st.rerun()


if __name__ == "__main__":  # Streamlit runs the file of a page
    page()
