"""The open plan on other hardware, another network, or with changed numbers: as it is, and solved anew. Nothing is traced."""

from __future__ import annotations

import streamlit as st

from app import plans, state, work
from app.components.markup import plain
from app.view_models import hardware_change
from app.view_models.other_plans import what_if_labels
from app.view_models.setup_form import describe
from app.view_models.status import verdict
from planner import Plan, PlannerError, hardware_names, hardware_profile
from planner.hardware import fabric_names
from planner.hardware_changes import FIELDS, HIGHEST, LOWEST, split_name

USUAL = "the one it comes with"


def draw(found: state.Session) -> None:
    document = found.document
    assert document is not None
    hardware = _ask(document.plan)
    try:
        before, after = hardware_profile(document.plan.hardware_name), hardware_profile(hardware)
    except PlannerError as error:
        st.warning(plain(describe(error)))
        return
    same, best = what_if_labels(document.plan.plan_id, after.name)
    unchanged = before.content_hash == after.content_hash
    if unchanged:
        st.caption("This is the hardware of the open plan. Choose another profile or network, or change a number.")
    if st.button("Price and solve", key="what_if", type="primary", disabled=unchanged or found.running is not None):
        work.what_if(found, after.name)
        st.rerun()
    _results(found, same, best)
    changes = hardware_change.changed_constants(before, after)
    if not changes:
        return
    st.subheader("What changes")
    st.caption(plain(f"{len(changes)} constants differ: {before.name} becomes {after.name}."))
    st.dataframe(
        {
            "constant": [c.name for c in changes], before.name: [c.before for c in changes],
            after.name: [c.after for c in changes], "unit": [c.unit for c in changes], "source": [c.source for c in changes],
        },
        hide_index=True, width="stretch", height=36 + 35 * min(len(changes), 10), key="constants",
    )  # fmt: skip


def _ask(plan: Plan) -> str:
    """The choice is kept while other pages are looked at."""
    machines, fabrics = list(hardware_names()), [USUAL, *fabric_names()]
    now, network, factors = split_name(plan.hardware_name)
    machine, fabric, factors = st.session_state.get("what_if_kept", (now, network or USUAL, factors))
    columns = st.columns(2)
    machine = columns[0].selectbox("Hardware", machines, index=_place(machines, machine), key="what_if_machine")
    fabric = columns[1].selectbox("Network between nodes", fabrics, index=_place(fabrics, fabric), key="what_if_fabric")
    name = hardware_change.fabric_choice(machine, "" if fabric == USUAL else fabric)
    factors = _numbers(name, factors)
    st.session_state["what_if_kept"] = (machine, fabric, factors)
    return hardware_change.fabric_choice(name, "", factors)


def _numbers(name: str, factors: dict[str, float]) -> dict[str, float]:
    """The numbers of the profile, to be changed: as factors, which stay when the profile changes."""
    found = {}
    fields = hardware_change.fields(hardware_profile(name))
    for column, field in zip(st.columns(len(fields)), fields, strict=True):
        value = column.number_input(
            field.label, min_value=LOWEST * field.value, max_value=HIGHEST * field.value,
            value=min(HIGHEST, max(LOWEST, factors.get(field.name, 1.0))) * field.value, step=field.value / 10, format="%.6g",
            key=f"what_if_{field.name} {name}", help=f"{FIELDS[field.name]}; the profile says {field.value:g}.".capitalize(),
        )  # fmt: skip
        found[field.name] = hardware_change.factor(field, float(value))
    changed = hardware_change.changed_fields(hardware_change.fabric_choice(name, "", found))
    st.caption(plain(f"Changed: {changed}. Results carry that in their name." if changed else "All numbers as in the profile."))
    return found


def _place(options: list[str], wanted: str) -> int:
    return options.index(wanted) if wanted in options else 0


def _results(found: state.Session, same: str, best: str) -> None:
    document = found.document
    assert document is not None
    kept, solved = found.others.get(same), found.others.get(best)
    if isinstance(kept, PlannerError):
        st.warning(plain(describe(kept)))
    if not isinstance(kept, Plan) or not isinstance(solved, Plan):
        return
    table = {"as it is now": document.plan, "same decisions there": kept, "solved anew there": solved}
    columns = hardware_change.result_columns(table)
    columns["memory"] = [verdict(plan)[0] for plan in table.values()]
    decimals = {name: st.column_config.NumberColumn(format="%.1f") for name in hardware_change.DECIMALS}
    st.dataframe(columns, hide_index=True, width="stretch", key="what_if_results", column_config=decimals)
    gain = kept.objective_us - solved.objective_us
    st.caption(
        f"Solving anew saves {gain / 1000:,.2f} ms of the step there. Both can be chosen as A or B under Plans."
        if gain > 1
        else "The decisions are as good there as those solved anew. Both can be chosen as A or B under Plans."
    )
    if st.button("Open the plan solved anew", key="open_what_if"):
        plans.open_plan(found, solved, document.graph, document.graph_path)
        found.arrived = True
        st.rerun()
