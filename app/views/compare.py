"""Compare: two plans side by side; how the plans came about; all mesh shapes; other hardware."""

from __future__ import annotations

from datetime import datetime

import streamlit as st

from app import drafts, plans, state, work
from app.charts.waterfall import signed, waterfall
from app.components.deltas import deltas
from app.components.headings import heading
from app.components.markup import plain
from app.view_models import compare
from app.view_models.other_plans import usual_baseline
from app.view_models.setup_form import describe
from app.views import hardware_what_if, mesh_sweep, plan_history
from app.views.problems import no_plan
from planner import Plan, PlannerError

VIEWS = ("Plans", "History", "Mesh sweep", "Hardware what-if")
MOST_ROWS = 400


def page() -> None:
    found = state.session()
    if found.document is None:
        no_plan()
        return
    view = st.segmented_control(
        "Compare", VIEWS, default=VIEWS[0], required=True, key="compare_view", label_visibility="collapsed"
    )
    if view == "Mesh sweep":
        mesh_sweep.draw(found)
    elif view == "History":
        plan_history.draw(found)
    elif view == "Hardware what-if":
        hardware_what_if.draw(found)
    else:
        _plans(found)


def _plans(found: state.Session) -> None:
    options = plans.options(found)
    a_label, b_label = _choose(found, options)
    a, b = _plan(found, options[a_label], a_label, "A"), _plan(found, options[b_label], b_label, "B")
    if a is None or b is None:
        return
    refused = compare.refusal(a, b)
    if refused:
        st.warning(plain(refused))
        _sides(a, b)
        return
    st.html(deltas(compare.quantities(a, b)))
    st.caption("Differences are B - A, predicted by the cost model; ▲ is more, ▼ less. Point at a box for its source.")
    for caution in compare.cautions(a, b):
        st.caption(plain(caution))
    _mark(found, a, b)
    left, right = st.columns([1.1, 1], gap="large")
    with left:
        _waterfall(a, b)
    with right:
        _sides(a, b)
    _changes(found, a, b)
    _parameters(a, b)


# ---- which plans --------------------------------------------------------------------------------------------------------


def _choose(found: state.Session, options: dict[str, plans.Option]) -> tuple[str, str]:
    """Labels of A and B; they are kept while other pages are looked at."""
    document = found.document
    assert document is not None
    kept = st.session_state.get("compared", ("", ""))
    first = plans.base_label(found) or usual_baseline(document.plan.mesh.num_axes)
    a_at = _index("compare_a", list(options), kept[0], first)
    b_at = _index("compare_b", list(options), kept[1], plans.open_label(found))

    def text(label: str) -> str:
        written = options[label].written if label in options else None
        return label if written is None else f"{label}, {datetime.fromtimestamp(written):%Y-%m-%d %H:%M}"

    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        a = st.selectbox("A", list(options), index=a_at, key="compare_a", format_func=text, width="stretch")
        b = st.selectbox("B", list(options), index=b_at, key="compare_b", format_func=text, width="stretch")
        st.button("Swap", key="swap", on_click=_swap)
    st.session_state["compared"] = (a, b)
    return a, b


def _index(key: str, options: list[str], before: str, usual: str) -> int:
    """Place of the plan that is chosen, or of the one to begin with. It goes along with every run, so that a browser that missed
    one does not show another name."""
    wanted = before if before in options else usual
    if st.session_state.get(key, wanted) not in options:
        st.session_state[key] = wanted
    return options.index(st.session_state.get(key, wanted))


def _swap() -> None:
    held = st.session_state
    held["compare_a"], held["compare_b"] = held["compare_b"], held["compare_a"]


def _plan(found: state.Session, option: plans.Option, label: str, side: str) -> Plan | None:
    """The plan, or what stands in its place: an error, or a button that prices a recipe."""
    plan = plans.load(found, option)
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, PlannerError):
        st.warning(f"{side}, {plain(label)}: {plain(describe(plan))}")
    else:
        st.info(
            f"{side} is a recipe: what experts write by hand, in its best version, priced by the same cost model with the same "
            "memory limit. Your pins are not part of it."
        )
        if st.button(f"Price {label.partition(':')[0]}", key=f"price_{side}", type="primary", disabled=found.running is not None):
            work.price_recipe(found, option.recipe)
            st.rerun()
    return None


# ---- what differs -------------------------------------------------------------------------------------------------------


def _mark(found: state.Session, a: Plan, b: Plan) -> None:
    """The graph shows the open plan against its base: A can become that base."""
    document = found.document
    assert document is not None
    is_open = b.plan_id == document.plan.plan_id != a.plan_id and b.hardware_name == document.plan.hardware_name
    if (
        is_open
        and a.mesh == b.mesh
        and st.button(
            "Mark the differences in the graph",
            key="mark",
            help="A becomes the base plan of the open one, and the Explorer opens.",
        )
    ):
        drafts.set_base(found, a)
        found.arrived = True
        st.rerun()


def _waterfall(a: Plan, b: Plan) -> None:
    heading("Step time by module")
    rows = compare.by_module(a, b)
    if not rows:
        st.caption("No module takes another time.")
        return
    st.plotly_chart(waterfall(rows), key="waterfall", width="stretch", config={"displayModeBar": False})
    st.caption(
        "All layers together. Computation counts where it happens, a redistribution where its result is read first; the bars add "
        "up to the difference of the step times."
    )


def _sides(a: Plan, b: Plan) -> None:
    heading("Inputs and constraints")
    rows = compare.sides(a, b)
    count = sum(row.differs for row in rows)
    st.caption(f"{count} of {len(rows)} differ" if count else "All alike")
    st.dataframe(
        {
            "": ["differs" if row.differs else "" for row in rows], "what": [row.what for row in rows],
            "A": [row.a for row in rows], "B": [row.b for row in rows],
        },
        hide_index=True, width="stretch", height=36 + 35 * min(len(rows), 11), key="sides",
    )  # fmt: skip


def _changes(found: state.Session, a: Plan, b: Plan) -> None:
    groups = compare.changed(a, b)
    heading("Placements that differ")
    if not groups:
        st.caption("Every tensor lies alike in both plans.")
        return
    total = sum(len(group.keys) for group in groups)
    more = f" The first {MOST_ROWS} of {len(groups)} groups are listed." if len(groups) > MOST_ROWS else ""
    st.caption(
        f"{total:,} tensors in {len(groups):,} groups, largest difference in time first. Select a row to show it or to pin it."
        + more
    )
    shown = groups[:MOST_ROWS]
    event = st.dataframe(
        {
            "×": [group.times for group in shown], "tensor": [group.name for group in shown],
            "A": [group.before for group in shown], "B": [group.after for group in shown],
            "B - A": [signed(group.us) for group in shown],
        },
        column_config={"×": st.column_config.TextColumn(width=60), "tensor": st.column_config.TextColumn(width=420)},
        hide_index=True, width="stretch", height=36 + 35 * min(len(shown), 9), key=f"changes {a.plan_id} {b.plan_id}",
        on_select="rerun", selection_mode="single-row",
    )  # fmt: skip
    picked = event["selection"]["rows"]
    if picked and picked[0] < len(shown):
        _actions(found, shown[picked[0]], a, b)


def _actions(found: state.Session, group: compare.ChangeGroup, a: Plan, b: Plan) -> None:
    document = found.document
    assert document is not None
    graph = document.shown
    key = next((key for key in group.keys if key in graph.node_by_key), None)
    with st.container(horizontal=True, vertical_alignment="center", key="change_actions"):
        st.markdown(f"**{plain(group.name)}** {group.times}", width="content")
        if key is None:
            st.caption("Not in the open plan, which checkpoints other layers.")
            return
        if st.button("Show in Explorer", key="show_change"):
            state.select(found, key)
            found.arrived = True
            st.rerun()
        for side, plan, placement in (("A", a, group.before), ("B", b, group.after)):
            legal = plan.mesh == document.plan.mesh and placement != "absent" and "P" not in placement
            if legal and st.button(f"Pin {side}'s {placement}", key=f"pin_{side}"):
                drafts.set_pins(found, compare.pins_for(group, side, graph, plan, document.history.pins))
                st.toast("Pinned. Re-solve to see what it costs.")
                st.rerun()
    if "P" in group.before + group.after:
        st.caption("A placement with a pending sum (P) is pinned in the Explorer, which knows where it is legal.")


def _parameters(a: Plan, b: Plan) -> None:
    heading("Stored parameters")
    columns = compare.parameters(a, b)
    differing = sum(text != "" for text in columns[""])
    st.caption(f"{differing} of {len(columns['A'])} groups of equal layers lie otherwise in B. Axes: {plain(_axes(a, b))}.")
    st.dataframe(
        columns, hide_index=True, width="stretch", height=36 + 35 * min(len(columns["A"]), 12), key="parameters",
        column_config={"×": st.column_config.TextColumn(width=60), "parameter": st.column_config.TextColumn(width=420)},
    )  # fmt: skip


def _axes(a: Plan, b: Plan) -> str:
    return str(b.mesh) if a.mesh == b.mesh else f"A {a.mesh}, B {b.mesh}"


if __name__ == "__main__":  # Streamlit runs the file of a page
    page()
