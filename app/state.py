"""What one browser session has open, and every change of it. Pages read `session()` and call the functions below.

Sessions share the worker pool and frozen graphs, nothing else. A change of pins or plan goes to the workspace before the page
is drawn again, so a refresh or a restart finds it; the address bar holds project, draft and op.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import streamlit as st

from app.jobs import PLANNER_ENGINE, Job, OpenSpec, Worker, WorkerPool
from app.view_models import pins as pins_model
from app.view_models.graph_messages import DrawnGraph
from app.view_models.pins import PinHistory, Pins
from app.view_models.setup_form import SetupForm, form_of
from app.view_models.status import budget_bytes
from app.workspace import Workspace, default_folder, new_id
from planner import (
    InfeasibleError,
    InputError,
    JointGraph,
    Plan,
    PlannerError,
    PlanRequest,
    check_same_model,
    models,
)

DEMO = Path(__file__).parent / "demo"
DEMO_GRAPH, DEMO_PLAN = DEMO / "llama3-8b.graph.json.gz", DEMO / "llama3-8b.plan.json.gz"
SOLVE_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Document:
    """An open plan with the user's pins.

    Attributes:
        project, draft: ids in the workspace. The draft is written with its first change.
        base: the plan it is compared with: the one it was solved from.
        memory_bytes: the budget asked for, None for what the hardware leaves.
        graph_path: where a worker finds the graph.
    """

    project: str
    draft: str
    graph: JointGraph
    graph_path: Path | None
    plan: Plan
    base: Plan | None = None
    history: PinHistory = field(default_factory=PinHistory)
    memory_bytes: int | None = None

    @property
    def name(self) -> str:
        return f"{self.plan.request.model} on {self.plan.mesh}"


@dataclass(frozen=True, kw_only=True)
class Running:
    """The one long job of a session. `kind` is `start`, `solve` or `export`; `request` what a start was asked for."""

    kind: str
    job: Job
    worker: Worker
    draft: str
    request: PlanRequest | None = None


@dataclass(kw_only=True)
class Session:
    """Everything a session keeps between runs.

    Attributes:
        focus: (key, count) that the graph is asked to show; the count grows with every request.
        legal: key -> the job that asked for its legal placements.
        exported: the last export and the id of its plan.
        arrived: a new plan waits to be shown on the Explorer page.
        version, drawn: how often a job's end changed the session, and which of these the whole page was last drawn for. A
            rerun asked for by a fragment can be lost to another one, so it is asked for until both agree.
    """

    document: Document | None = None
    running: Running | None = None
    error: PlannerError | None = None
    storage_error: PlannerError | None = None
    infeasible: bool = False
    selected: str | None = None
    group: tuple[str, ...] = ()
    from_graph: str | None = None
    focus: tuple[str | None, int] = (None, 0)
    legal: dict[str, Job] = field(default_factory=dict)
    exported: tuple[str, Any] | None = None
    form: SetupForm = field(default_factory=SetupForm)
    overlay: tuple[Any, Any] | None = None
    stored: bool = False
    arrived: bool = False
    version: int = 0
    drawn: int = 0


def session() -> Session:
    """The state of this browser session; opened from the address or the last project on first use."""
    if "session" not in st.session_state:
        st.session_state["session"] = Session()
        _open_first(st.session_state["session"])
    found = st.session_state["session"]
    assert isinstance(found, Session)
    return found


# ---- shared by all sessions: frozen values and the pool ----------------------------------------------------------------


@st.cache_resource
def _pool(engine_path: str) -> WorkerPool:
    return WorkerPool(engine_path)


def pool() -> WorkerPool:
    return _pool(os.environ.get("PLAN_EXPLORER_ENGINE", PLANNER_ENGINE))


@st.cache_resource(max_entries=16, show_spinner=False)
def _drawn(fingerprint: str, model: str, _graph: JointGraph) -> DrawnGraph:
    return DrawnGraph(_graph)


def drawn(graph: JointGraph) -> DrawnGraph:
    return _drawn(graph.fingerprint, graph.request.model, graph)


@st.cache_resource(max_entries=2, show_spinner=False)
def _demo(graph_path: Path, plan_path: Path) -> tuple[JointGraph, Plan]:
    return JointGraph.load(graph_path), Plan.load(plan_path)


def workspace() -> Workspace:
    """`-- --workspace FOLDER` after `streamlit run app/main.py`, or the environment, or the user's data folder."""
    if "--workspace" in sys.argv[:-1]:
        return Workspace(Path(sys.argv[sys.argv.index("--workspace") + 1]).expanduser())
    folder = os.environ.get("PLAN_EXPLORER_WORKSPACE")
    return Workspace(Path(folder) if folder else default_folder())


# ---- opening -----------------------------------------------------------------------------------------------------------


def _open_first(found: Session) -> None:
    """What the address names, else the last project, else the demo; an error keeps what could be opened."""
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


def _open_demo_instead(found: Session, error: PlannerError | OSError) -> None:
    """What was asked for cannot be opened: say so, beside the demo."""
    if demo_available():
        _open_demo(found)
    found.error = error if isinstance(error, PlannerError) else InputError(f"the workspace cannot be read: {error}")


def _open_last(found: Session) -> None:
    recent = workspace().recent()
    if recent:
        _open_stored(found, recent[0].project, recent[0].draft, None, copy=True)


def open_recent(found: Session, project: str, draft: str) -> None:
    _leave(found)
    _open_stored(found, project, draft, None, copy=True)


def demo_available() -> bool:
    return DEMO_GRAPH.exists() and DEMO_PLAN.exists()


def open_demo(found: Session) -> None:
    """The shipped plan. Nothing is written before the first change."""
    _leave(found)
    _open_demo(found)


def _open_demo(found: Session) -> None:
    graph, plan = _demo(DEMO_GRAPH, DEMO_PLAN)
    check_same_model(plan, graph)
    document = Document(
        project=f"demo-{graph.fingerprint[:8]}", draft=new_id(), graph=graph, graph_path=DEMO_GRAPH, plan=plan,
        history=PinHistory(pins=plan.pins), memory_bytes=budget_bytes(plan),
    )  # fmt: skip
    _show(found, document)


def _open_stored(found: Session, project: str, draft: str | None, plan_id: str | None, *, copy: bool = False) -> None:
    """A draft (or a copy of it, if it belongs to whoever wrote it), or a plan alone."""
    store = workspace()
    if draft is not None:
        log = pins_model.replay(store.events(project, draft))
    else:
        data = store.load_project(project)
        log = pins_model.Draft(plan=plan_id or "", graph=str(data.get("graph", "")))
    graph = store.load_graph(project, log.graph)
    plan = store.load_plan(project, log.plan)
    check_same_model(plan, graph)
    base = store.load_plan(project, log.base) if log.base else None
    history = log.history if draft is not None else PinHistory(pins=plan.pins)
    document = Document(
        project=project, draft=new_id() if copy or draft is None else draft, graph=graph,
        graph_path=store.graph_path(project, log.graph), plan=plan, base=base, history=history,
        memory_bytes=log.memory_bytes if draft is not None else budget_bytes(plan),
    )  # fmt: skip
    _show(found, document, stored=draft is not None and not copy)


def _show(found: Session, document: Document, *, stored: bool = False) -> None:
    """Makes `document` what the session has open."""
    found.document, found.stored = document, stored
    found.error, found.infeasible, found.legal, found.exported, found.overlay = None, False, {}, None, None
    found.from_graph = None
    samples = tuple(model.name for model in models())
    found.form = form_of(document.plan, document.memory_bytes, samples)
    if found.selected and found.selected not in drawn(document.graph).keys:
        found.selected = None


def _leave(found: Session) -> None:
    """Ends what runs for the document that is being left."""
    cancel(found)
    if found.document is not None:
        pool().forget(found.document.draft)
    found.selected, found.group, found.focus = None, (), (None, found.focus[1] + 1)


def write_address(found: Session) -> None:
    """The address bar names what is open; navigation drops it, so every page writes it again."""
    document = found.document
    wanted: dict[str, str] = {}
    if document is not None and found.stored:
        wanted = {"project": document.project, "draft": document.draft}
    if found.selected:
        wanted["op"] = found.selected
    if st.query_params.to_dict() != wanted:
        st.query_params.from_dict(wanted)


# ---- pins --------------------------------------------------------------------------------------------------------------


def set_pins(found: Session, pins: Pins) -> None:
    _change(found, lambda history: history.change(pins), pins_model.pins_event(pins))


def undo(found: Session) -> None:
    _change(found, PinHistory.undo, {"event": "undo"})


def redo(found: Session) -> None:
    _change(found, PinHistory.redo, {"event": "redo"})


def _change(found: Session, change: Callable[[PinHistory], PinHistory], event: dict[str, Any]) -> None:
    assert found.document is not None
    history = change(found.document.history)
    if history == found.document.history:
        return
    _store(found)  # the state before, if this is the first change
    found.document = replace(found.document, history=history)
    found.infeasible = False
    _log(found, event)


def _store(found: Session) -> None:
    """Puts the project, graph, plans and draft into the workspace if they are not there yet."""
    document = found.document
    if found.stored or document is None:
        return

    def write() -> None:
        store = workspace()
        store.save_project(document.project, {"schema": 1, "name": document.name, "graph": document.graph.fingerprint})
        store.save_graph(document.project, document.graph)
        for plan in (document.base, document.plan):
            if plan is not None:
                store.save_plan(document.project, plan)
        opened = pins_model.plan_event(document.plan, document.base, document.graph, document.memory_bytes)
        store.append_event(document.project, document.draft, opened)
        for pins in (*document.history.past, document.history.pins):
            store.append_event(document.project, document.draft, pins_model.pins_event(pins))
        found.stored = True

    _writing(found, write)


def _log(found: Session, event: dict[str, Any]) -> None:
    document = found.document
    assert document is not None
    if found.stored:
        _writing(found, lambda: workspace().append_event(document.project, document.draft, event))


def _writing(found: Session, write: Callable[[], None]) -> None:
    """A failed write is shown in a banner; the session goes on in memory."""
    try:
        write()
        found.storage_error = None
    except OSError as error:
        found.storage_error = InputError(
            f"changes cannot be stored in {workspace().root}: {error.strerror}",
            hint="They live in this browser tab only. Export what you want to keep, or free some space.",
        )


# ---- jobs --------------------------------------------------------------------------------------------------------------


def _spec(document: Document) -> OpenSpec:
    plan = document.plan
    return OpenSpec(
        request=plan.request, mesh=plan.mesh, hardware=plan.hardware_name, optimizer=plan.memory_policy.optimizer,
        graph_path=document.graph_path,
    )  # fmt: skip


def _worker(document: Document) -> Worker:
    return pool().worker(document.draft, _spec(document))


def warm_worker(found: Session) -> None:
    """Starts opening the plan in a worker, so that the first question is answered quickly."""
    if found.document is not None and "" not in found.legal:
        found.legal[""] = _worker(found.document).submit("ready")


def legal(found: Session, key: str) -> Job:
    """The job that finds what the output of a node can be pinned to; asked once per key and kept while it is good."""
    assert found.document is not None
    known = found.legal.get(key)
    if known is not None and (known.active or known.state == "done"):
        return known
    worker = _worker(found.document)
    for other, job in found.legal.items():
        if other and job.state == "queued":
            worker.cancel(job)  # the selection has moved on
    found.legal[key] = worker.submit("legal", key)
    return found.legal[key]


def forget_failed(found: Session, key: str) -> None:
    found.legal.pop(key, None)


def start(found: Session, request: PlanRequest) -> None:
    """Trace (unless that model is open), price and solve as a new draft. What is open stays until the new plan is there."""
    cancel(found)
    document, draft = found.document, new_id()
    keep = document is not None and document.plan.request == request.sized_model
    spec = OpenSpec(
        request=request.sized_model, mesh=request.mesh, hardware=request.hardware, optimizer=request.optimizer,
        graph_path=document.graph_path if keep and document is not None else None,
    )  # fmt: skip
    worker = pool().worker(draft, spec)
    job = worker.submit("start", request.memory_bytes, request.time_limit_s)
    found.running = Running(kind="start", job=job, worker=worker, draft=draft, request=request)
    found.error = None


def solve(found: Session) -> None:
    """Solve again with the pins as they are now."""
    document = found.document
    assert document is not None
    worker = _worker(document)
    job = worker.submit("solve", document.history.pins, document.memory_bytes, SOLVE_LIMIT_S)
    found.running = Running(kind="solve", job=job, worker=worker, draft=document.draft)
    found.error = None


def export(found: Session) -> None:
    document = found.document
    assert document is not None
    worker = _worker(document)
    found.running = Running(kind="export", job=worker.submit("export", document.plan), worker=worker, draft=document.draft)
    found.error = None


def cancel(found: Session) -> None:
    """Ends the running job. The plan, the pins and what was exported stay."""
    running = found.running
    if running is None:
        return
    running.worker.cancel(running.job)
    if running.kind == "start":
        pool().forget(running.draft)
    found.running = None


def poll(found: Session) -> bool:
    """Takes over the result of a job that has ended. Whether the page drawn last is out of date."""
    running = found.running
    if running is not None and not running.job.active:
        found.running = None
        found.version += 1
        _take_over(found, running)
    return found.version != found.drawn


def _take_over(found: Session, running: Running) -> None:
    job = running.job
    if job.state == "cancelled":
        return
    if job.error is not None:
        found.error = job.error
        found.infeasible = running.kind == "solve" and isinstance(job.error, InfeasibleError)
        if running.kind == "start":
            pool().forget(running.draft)
        return
    {"start": _started, "solve": _solved, "export": _exported}[running.kind](found, running)


def _started(found: Session, running: Running) -> None:
    graph, plan = running.job.result
    assert running.request is not None
    old = found.document
    document = Document(
        project=f"{plan.request.model.rpartition('/')[2]}-{graph.fingerprint[:8]}".replace(".", "-").replace(":", "-"),
        draft=running.draft, graph=graph, graph_path=running.worker.spec.graph_path, plan=plan,
        memory_bytes=running.request.memory_bytes,
    )  # fmt: skip
    if old is not None:
        pool().forget(old.draft)
    found.selected, found.group, found.focus = None, (), (None, found.focus[1] + 1)
    _show(found, document)
    _store(found)
    found.arrived = True


def _solved(found: Session, running: Running) -> None:
    """The new plan's parent is the one it was solved from; an equal plan keeps the old comparison."""
    document, plan = found.document, running.job.result
    assert document is not None
    _store(found)
    if plan.plan_id != document.plan.plan_id:
        document = replace(document, plan=plan, base=document.plan)
        found.document = document
        if found.stored:
            _writing(found, lambda: workspace().save_plan(document.project, plan))
            _log(found, pins_model.plan_event(plan, document.base, document.graph, document.memory_bytes))
    found.infeasible, found.error = False, None


def _exported(found: Session, running: Running) -> None:
    assert found.document is not None
    found.exported = (found.document.plan.plan_id, running.job.result)


# ---- selection ---------------------------------------------------------------------------------------------------------


def select(found: Session, key: str | None) -> None:
    """Select a box from outside the graph, which is asked to show it."""
    found.selected, found.group = key, ()
    found.focus = (key, found.focus[1] + 1)


def elapsed_text(job: Job) -> str:
    """`trace 12 s, solve 3 s`"""
    stages = tuple(job.stages)
    ends = [*(stage.started for stage in stages[1:]), job.finished or time.monotonic()]
    return ", ".join(f"{stage.name} {end - stage.started:.0f} s" for stage, end in zip(stages, ends, strict=False))
