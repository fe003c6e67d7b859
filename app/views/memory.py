"""Memory: does it fit, what is held, for how long, and on which device."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import state, work
from app.charts import memory as charts
from app.components import markup, tables
from app.components.headings import heading
from app.components.markup import plain
from app.view_models import memory, status
from app.view_models.device_grid import grid
from app.view_models.memory import CheckpointOption, Held
from app.view_models.placements import placement_of, placements_text
from app.views.communication import CHART
from app.views.problems import no_plan
from planner import JointGraph, Plan, PlanRequest

MOST_ROWS = 400


def page() -> None:
    found = state.session()
    if found.document is None:
        no_plan()
        return
    st.fragment(_memory)()


def _memory() -> None:
    found = state.session()
    document = found.document
    assert document is not None
    _take_curve_click(found)
    rows = memory.held(document.shown, document.plan)
    _verdict(document)
    _advice(found)
    left, right = st.columns([3, 2], gap="large")
    with left:
        heading("Held over the step", "as the budget counts it; click to select the op")
        curve = memory.live(document.shown, rows)
        figure = charts.live(curve, status.budget_bytes(document.plan))
        st.plotly_chart(figure, key="mem_live", on_select="rerun", selection_mode="points", config=CHART)
    with right:
        with st.container(horizontal=True, vertical_alignment="center"):
            heading("Saved activations")
            by = st.segmented_control(
                "By", ("module", "layer"), default="module", required=True, key="mem_by", label_visibility="collapsed"
            )
        by = str(by or "module")
        st.plotly_chart(charts.saved(memory.saved_by(rows, by), by), key=f"mem_saved_{by}", config=CHART)
    _tensors(found, rows)


def _take_curve_click(found: state.Session) -> None:
    """A point of the curve is the op at which what is held changes."""
    points = st.session_state.get("mem_live", {}).get("selection", {}).get("points", [])
    clicked = next((str(point["customdata"]) for point in points if point.get("customdata")), "")
    if clicked and clicked != st.session_state.get("mem_live_seen", ""):
        found.selected = clicked
    st.session_state["mem_live_seen"] = clicked


def _verdict(document: state.Document) -> None:
    plan = document.plan
    text, tone = status.verdict(plan)
    budget = status.budget_bytes(plan)
    peak = f"{plan.memory.peak_bytes / 2**30:,.2f} GiB"
    against = f"{peak} of a budget of {budget / 2**30:,.2f} GiB per device" if budget is not None else f"{peak} per device"
    with st.container(horizontal=True, vertical_alignment="center"):
        said = f'<b class="{tone}">{markup.escape(text[:1].upper() + text[1:])}</b>: {markup.escape(against)}'
        st.html(f'{markup.STYLE}<div class="px" style="font-size:15px">{said}</div>', width="stretch")
        with st.popover("What is counted?"):
            st.html(markup.number_table(memory.quantities(plan)), width=680)
            st.caption(plain(f"Counted: {memory.COUNTED}. Not counted: {memory.NOT_COUNTED}."))
            problem = memory.device_problem(plan)
            if problem:
                st.caption(plain(f"Nothing is said about the device: {problem}."))
    limits = {} if budget is None else {"budget": budget}
    usable = memory.usable_bytes(plan)
    if usable is not None and usable != budget:
        limits["usable memory of the device"] = usable
    st.plotly_chart(charts.categories(memory.categories(plan), limits), key="mem_parts", config=CHART)


@st.cache_resource(max_entries=16, show_spinner=False)
def _options(plan_id: str, optimizer: str, _graph: JointGraph, _plan: Plan) -> tuple[CheckpointOption, ...]:
    """Shared by all sessions: frozen values of what a plan decides."""
    return memory.checkpoint_options(_graph, _plan)


def _advice(found: state.Session) -> None:
    """What checkpointing would bring; opened by itself when the plan does not fit."""
    document = found.document
    assert document is not None
    budget = status.budget_bytes(document.plan)
    over = budget is not None and document.plan.memory.peak_bytes > budget
    if not st.toggle("What would lower the peak?", value=over, key=f"mem_advice_{over}"):
        return
    plan = document.plan
    options = _options(plan.plan_id, plan.memory_policy.optimizer, document.graph, plan)
    if len(options) < 2:
        st.info("This model has no repeated layers to checkpoint. A lower budget on the Setup page makes the solver shard more.")
        return
    st.caption(
        "Activation checkpointing with every tensor as it lies now. Time: local kernels that run again, predicted; their "
        "communication comes on top. Planning again chooses placements anew, under the pins and other demands as they are now."
    )
    for option in options:
        with st.container(horizontal=True, vertical_alignment="center"):
            fits = {True: "fits", False: "does not fit", None: "no budget"}[option.fits]
            st.markdown(
                f"**{option.count} of {option.layers} layers**: peak {option.peak_bytes / 2**30:,.2f} GiB ({fits}), "
                f"activations {option.activation_bytes / 2**30:,.2f} GiB, +{option.extra_us / 1000:,.1f} ms",
                width="stretch",
            )
            current = option.count == len(document.plan.checkpointed)
            if current:
                st.caption("as planned", width="content")
            elif st.button("Plan this", key=f"mem_plan_{option.count}", disabled=found.running is not None):
                work.start(found, _request(document, option.policy))
                st.rerun()


def _request(document: state.Document, checkpoint: str) -> PlanRequest:
    plan = document.plan
    return PlanRequest(
        model=plan.request, mesh=plan.mesh, hardware=plan.hardware_name, memory_bytes=document.memory_bytes,
        optimizer=plan.memory_policy.optimizer, gpus_per_node=plan.gpus_per_node, checkpoint=checkpoint,
        constraints=document.history.pins,
    )  # fmt: skip


def _tensors(found: state.Session, rows: tuple[Held, ...]) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        heading("Alive at the peak", "largest first")
        together = st.toggle("Alike layers together", value=True, key="mem_group")
    groups = memory.grouped(rows) if together else tuple(memory.alone(row) for row in rows)
    shown = groups[:MOST_ROWS]
    event: Any = st.dataframe(
        {
            "tensor": [group.name for group in shown],
            "×": [group.count for group in shown],
            "held as": [group.first.category for group in shown],
            "placement": [group.first.placements for group in shown],
            "shape": [group.first.shape for group in shown],
            "local": [group.first.local for group in shown],
            "MiB each": [group.first.num_bytes / 2**20 for group in shown],
            "MiB in all": [group.num_bytes / 2**20 for group in shown],
            "born": [group.first.born_key for group in shown],
            "dies": [group.first.dies_key for group in shown],
        },
        column_config={
            "MiB each": st.column_config.NumberColumn(format="%.1f", help="2²⁰ bytes on one device, counted from the plan"),
            "MiB in all": st.column_config.NumberColumn(format="%.1f", help="Sum over the alike layers, on one device"),
            "born": st.column_config.TextColumn(help="Op that makes it; of several layers, in the first"),
            "dies": st.column_config.TextColumn(help="Last op that reads it; of several layers, in the first"),
        },
        key=f"mem_tensors_{together}", on_select="rerun", selection_mode="single-row", hide_index=True, width="stretch",
        height=330,
    )  # fmt: skip
    if len(groups) > MOST_ROWS:
        st.caption(f"The largest {MOST_ROWS} of {len(groups):,}.")
    picked = [row for row in event["selection"]["rows"] if row < len(shown)]
    if picked != st.session_state.get("mem_seen", []):
        st.session_state["mem_seen"] = picked
        if picked:
            found.selected = shown[picked[0]].first.key
    _grid(found, shown[picked[0]].first if picked else None, rows[0] if rows else None)


def _grid(found: state.Session, picked: Held | None, largest: Held | None) -> None:
    """Of the row that was picked, else of the op selected on another page, else of the largest tensor."""
    document = found.document
    assert document is not None
    chosen = picked if picked is not None and picked.key == found.selected else None
    key, output = (chosen.key, chosen.output) if chosen else (found.selected, 0)
    if key is None and largest is not None:
        key, output = largest.key, largest.output
    if key is None:
        return
    tensor = memory.tensor_of(document.shown, key, output)
    placements = placement_of(document.plan, key, output)
    if tensor is None or placements is None:
        return
    drawn = grid(tensor.shape, placements, document.plan.mesh)
    heading("Who holds what")
    with st.container(horizontal=True, vertical_alignment="center"):
        st.html(
            f'{markup.STYLE}<div class="px">{markup.chips(placements_text(placements))} <code>{markup.escape(key)}</code> '
            f'<span class="soft">{markup.escape(str(tensor))}; {markup.escape(drawn.summary)}</span></div>',
            width="stretch",
        )
        if found.selected is not None and st.button("Show in Explorer", key="mem_show"):
            found.arrived = True
            st.rerun()
    st.html(tables.device_grid(drawn))


if __name__ == "__main__":  # Streamlit runs the file of a page
    page()
