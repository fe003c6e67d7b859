"""Opening a plan: what the address names, a recent project, the demo. Errors keep what could be opened."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from app import work
from app.owners import browser_mark, is_of_another
from app.state import Document, Session, pool, read_graph, read_plan, select, show, workspace
from app.view_models import demands
from app.view_models import pins as pins_model
from app.view_models.pins import PinHistory
from app.view_models.status import budget_bytes
from app.workspace import new_id
from planner import InputError, JointGraph, Plan, PlannerError, check_same_model

DEMO = Path(__file__).parent / "demo"
DEMO_GRAPH, DEMO_PLAN = DEMO / "llama3-8b.graph.json.gz", DEMO / "llama3-8b.plan.json.gz"
COPY = "This is a copy of a draft from another browser: whoever began that one does not see what you change here."


def open_first(found: Session) -> None:
    """For a new browser session: what the address names, else the last project, else the demo."""
    where = st.query_params
    found.selected = where.get("op")
    found.focus = (found.selected, 1 if found.selected else 0)
    try:
        workspace().check_writable()
    except InputError as error:
        found.storage_error = error
    try:
        if "project" in where and ("draft" in where or "plan" in where):
            _open_stored(found, where["project"], where.get("draft"), where.get("plan"))
        else:
            _open_last(found)
    except (PlannerError, OSError) as error:
        _open_demo_instead(found, error)
    if found.document is None and demo_available():
        _open_demo(found)


def open_recent(found: Session, project: str, draft: str) -> None:
    _leave(found)
    _open_stored(found, project, draft, None, copy=True)


def open_demo(found: Session) -> None:
    """The shipped plan. Nothing is written before the first change."""
    _leave(found)
    _open_demo(found)


def demo_available() -> bool:
    return DEMO_GRAPH.exists() and DEMO_PLAN.exists()


@st.cache_resource(max_entries=2, show_spinner=False)
def _demo(graph_path: Path, plan_path: Path) -> tuple[JointGraph, Plan]:
    return JointGraph.load(graph_path), Plan.load(plan_path)


def _open_demo(found: Session) -> None:
    graph, plan = _demo(DEMO_GRAPH, DEMO_PLAN)
    check_same_model(plan, graph)
    document = Document(
        project=f"demo-{graph.fingerprint[:8]}", draft=new_id(), graph=graph, graph_path=DEMO_GRAPH, plan=plan,
        history=PinHistory(pins=demands.of_plan(plan)), memory_bytes=budget_bytes(plan),
    )  # fmt: skip
    show(found, document)


def _open_demo_instead(found: Session, error: PlannerError | OSError) -> None:
    """What was asked for cannot be opened: say so, beside the demo."""
    if demo_available():
        _open_demo(found)
    found.error = error if isinstance(error, PlannerError) else InputError(f"the workspace cannot be read: {error}")


def _open_last(found: Session) -> None:
    recent = workspace().recent()
    if recent:
        _open_stored(found, recent[0].project, recent[0].draft, None, copy=True)


def _open_stored(found: Session, project: str, draft: str | None, plan_id: str | None, *, copy: bool = False) -> None:
    """A draft (or a copy of it: asked for, or because the draft was begun in another browser), or a plan alone."""
    folder = workspace()
    if draft is not None:
        log = pins_model.replay(folder.events(project, draft))
    else:
        data = folder.load_project(project)
        log = pins_model.Draft(plan=plan_id or "", graph=str(data.get("graph", "")))
    foreign = draft is not None and is_of_another(log.owner, browser_mark())
    copy = copy or foreign
    graph = folder.load_graph(project, log.graph, read=read_graph)
    plan = read_plan(project, log.plan)
    check_same_model(plan, graph)
    base = read_plan(project, log.base) if log.base else None
    history = log.history if draft is not None else PinHistory(pins=demands.of_plan(plan))
    document = Document(
        project=project, draft=new_id() if copy or draft is None else draft, graph=graph,
        graph_path=folder.graph_path(project, log.graph), plan=plan, base=base, history=history,
        memory_bytes=log.memory_bytes if draft is not None else budget_bytes(plan),
    )  # fmt: skip
    show(found, document, stored=draft is not None and not copy)
    found.author = found.author or ("" if copy else log.author)
    found.note = COPY if foreign else ""


def _leave(found: Session) -> None:
    """Ends what runs for the document that is being left."""
    work.cancel(found)
    work.stop_proof(found)
    if found.document is not None:
        pool().forget(found.document.draft)
    select(found, None)
