"""Export: what leaves the explorer, looked at before it is downloaded; and plan files that come in."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import streamlit as st

from app import plans, state, work
from app.components import markup
from app.components.markup import plain
from app.view_models import files, op_table
from app.view_models.report import report
from app.view_models.setup_form import describe
from app.views.explorer import overlay
from app.views.pin_panel import is_stale
from app.views.problems import no_plan
from planner import PlannerError, hardware_profile, not_expressible, report_lines
from planner.exporting.recipe_file import LABEL
from planner.exporting.slurm import slurm_script

SCRIPT, RECIPE, SLURM = "Training script", "Recipe", "Slurm file"
REPORT, PLAN, TABLE = "HTML report", "Plan JSON", "Op table CSV"
ABOUT = {
    SCRIPT: "One file, torch only, with the plan beside it. It is checked against the model before it is handed out.",
    RECIPE: f"Your module with parallelize_module and fully_shard: short, familiar, {LABEL}.",
    SLURM: "Starts train.py on as many nodes as the mesh needs. Not run on a cluster by this program.",
    REPORT: "For a ticket: one file to read without network and without script, with sources, reasons and the plan inside.",
    PLAN: "All decisions with inputs, constraints and proof. The commands and this page open it again.",
    TABLE: "One row per op, parameter and gradient: placement, times, memory.",
}
SCRIPT_NAME, RECIPE_NAME = "train.py", "recipe.py"
SHOWN_REASONS = 8


def page() -> None:
    found = state.session()
    left, right = st.columns([2.3, 1], gap="large")
    with left:
        if found.document is None:
            no_plan()
        else:
            _formats(found)
    with right:
        _upload(found)


def _formats(found: state.Session) -> None:
    document = found.document
    assert document is not None
    chosen = st.segmented_control("Format", tuple(ABOUT), default=SCRIPT, required=True, key="export_format")
    st.caption(ABOUT.get(chosen or SCRIPT, ""))
    _notices(document)
    if chosen == RECIPE:
        _recipe(found)
        return
    if chosen == SCRIPT or chosen is None:
        _file(found, "script", SCRIPT_NAME, found.exported)
        return
    stem = files.file_stem(document.plan)
    name, mime, language = {
        SLURM: (f"{stem}.sbatch", "text/x-sh", "bash"), REPORT: (f"{stem}.html", "text/html", "html"),
        PLAN: (f"{stem}.plan.json", "application/json", "json"), TABLE: (f"{stem}.csv", "text/csv", None),
    }[chosen]  # fmt: skip
    try:
        text = _made(found, chosen)
    except PlannerError as error:
        st.warning(plain(describe(error)))
        return
    _download(name, mime, lambda: text)
    if chosen == REPORT:
        _report_preview(text)
    else:
        _preview(text, language)


def _report_preview(text: str) -> None:
    """As a reader sees it. A data address has no origin: nothing in it can reach the app, and the file forbids scripts itself."""
    st.caption(f"{len(text.encode()) / 1000:,.0f} kB. As it will look:")
    address = f"data:text/html;charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"
    st.iframe(address, height=560, alt="Preview of the report")


def _notices(document: state.Document) -> None:
    if document.plan.report.status != "optimal":
        st.warning(f"Not proven optimal: within {100 * document.plan.report.gap:.2g} %.".replace("%", r"\%"))
    if is_stale(document):
        st.warning("The pins changed since this plan was solved; what is exported is the plan, without those changes.")


def _made(found: state.Session, chosen: str) -> str:
    document = found.document
    assert document is not None
    if chosen == SLURM:
        return slurm_script(document.plan, SCRIPT_NAME)
    if chosen == PLAN:
        return document.plan.dumps()
    if chosen == REPORT:
        return report(document.plan, document.base, hardware_profile(document.plan.hardware_name))
    return files.csv_text(op_table.columns(state.drawn(document.shown), overlay(found), document.plan))


def _download(name: str, mime: str, data: Callable[[], str], key: str = "download") -> None:
    st.download_button(f"Download {name}", data, name, mime, key=key, on_click="ignore", type="primary")


def _preview(text: str, language: str | None) -> None:
    size = len(text.encode())
    unit = f"{size / 1000:,.0f} kB" if size >= 1000 else f"{size} bytes"
    lines = text.count("\n")
    st.caption(f"{lines:,} lines, {unit}. The first {min(40, lines)}:")
    st.code(files.first_lines(text), language=language, height=430)


def _recipe(found: state.Session) -> None:
    """Offered where the plan can be said that way, otherwise every reason why not."""
    document = found.document
    assert document is not None
    reasons = not_expressible(document.plan, document.graph)
    if not reasons:
        _file(found, "recipe", RECIPE_NAME, found.recipe)
        return
    more = len(reasons) - SHOWN_REASONS
    st.warning("This plan cannot be said as a recipe of modules. The training script runs it exactly.")
    st.html(markup.lines((*reasons[:SHOWN_REASONS], *([f"and {more:,} more"] if more > 0 else []))))


def _file(found: state.Session, format: str, file_name: str, made: tuple[str, Any] | None) -> None:
    document = found.document
    assert document is not None
    if made is None or made[0] != document.plan.plan_id:
        if st.button("Write and check", key="export_start", type="primary", disabled=found.running is not None):
            work.export(found, format)
            st.rerun()
        st.caption("Writes the file, runs it on simulated ranks at full size and compares a small run with your module.")
        return
    result = made[1]
    with st.container(horizontal=True):
        _download(file_name, "text/x-python", lambda: result.script, key="download_script")
        name = file_name.replace(".py", ".plan.json")
        st.download_button(f"Download {name}", lambda: result.plan_json, name, "application/json", on_click="ignore")
    st.markdown("**Checks**")
    st.html(markup.lines(report_lines(result.report)))
    _preview(result.script, "python")


# ---- files that come in -------------------------------------------------------------------------------------------------


def _upload(found: state.Session) -> None:
    with st.container(border=True, key="upload"):
        st.markdown("**Open a plan file**")
        st.caption("A plan.json, also compressed, of a model that was traced here. It becomes a draft of its own.")
        file = st.file_uploader("Plan file", type=["json", "gz"], key="plan_file", label_visibility="collapsed")
        if file is None:
            return
        try:
            plan = files.read_plan(file.getvalue())
        except PlannerError as error:
            st.error(plain(describe(error)))
            return
        st.markdown(plain(f"{plan.request.model} on {plan.mesh}, {plan.hardware_name}, plan {plan.plan_id[:7]}"))
        if st.button("Open this plan", key="open_file", disabled=found.running is not None):
            try:
                plans.open_file(found, plan)
            except PlannerError as error:
                st.error(plain(describe(error)))
                return
            found.arrived = True
            st.rerun()


if __name__ == "__main__":  # Streamlit runs the file of a page
    page()
