"""What one browser session has open. Pages read `session()`; changes go through `drafts` (pins), `work` (jobs) and `opening`.

Sessions share the worker pool and frozen graphs, nothing else.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import streamlit as st

from app.engine import PLANNER_ENGINE
from app.jobs import Job, Running, WorkerPool
from app.view_models import graph_messages
from app.view_models.graph_messages import DrawnGraph
from app.view_models.model_source import Folders, allowed_folders
from app.view_models.overlapped import Overlapped
from app.view_models.overlapped import overlapped as overlapped_events
from app.view_models.pins import PinHistory
from app.view_models.setup_form import SetupForm, form_of
from app.workspace import Workspace, default_folder
from planner import JointGraph, Plan, PlannerError, hardware_profile, models, planned_graph
from planner.forecast import forecast


@dataclass(frozen=True, kw_only=True)
class Document:
    """An open plan with the user's pins.

    Attributes:
        project, draft: ids in the workspace. The draft is written with its first change.
        graph: of the model, as traced.
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

    @cached_property
    def shown(self) -> JointGraph:
        """The graph of the plan: the model's, with the layers repeated that the plan checkpoints."""
        return _shown(self.graph.fingerprint, self.graph.request.model, self.plan.checkpointed, self.graph, self.plan)


@dataclass(kw_only=True)
class Session:
    """Everything a session keeps between runs.

    Attributes:
        running: the job the user waits for; `proof` one in the background that looks for a proof or a better plan.
        note: what a proof came to.
        focus: (key, count) that the graph is asked to show; the count grows with every request.
        pane: what the panel beside the graph shows.
        author: who signs changes, "" if nobody said.
        legal: key -> the job that asked for its legal placements.
        questions: what was asked about the plan -> the job that answers; `asked_about` is the box that those of the inspector
            are about, `why` the (WHERE, placement) that is explained.
        exported, recipe: the last script and the last recipe file, each with the id of its plan.
        others: plans to compare with that are not in the project (recipes, other hardware, files), or why there is none.
        sweep: the sweep over mesh shapes, with its rows, running or ended.
        arrived: a new plan waits to be shown on the Explorer page.
        has_news: a job has ended, and the whole page has not been drawn since; `drawn`: the page that was begun last is drawn.
        touched: when the page was last begun or the selection moved on, on the monotonic clock.
    """

    document: Document | None = None
    running: Running | None = None
    proof: Running | None = None
    note: str = ""
    error: PlannerError | None = None
    storage_error: PlannerError | None = None
    infeasible: bool = False
    selected: str | None = None
    group: tuple[str, ...] = ()
    from_graph: str | None = None
    focus: tuple[str | None, int] = (None, 0)
    pane: str = "Inspect"
    author: str = ""
    legal: dict[str, Job] = field(default_factory=dict)
    questions: dict[tuple[Any, ...], Job] = field(default_factory=dict)
    asked_about: str | None = None
    why: tuple[str, str] | None = None
    exported: tuple[str, Any] | None = None
    recipe: tuple[str, Any] | None = None
    others: dict[str, Plan | PlannerError] = field(default_factory=dict)
    sweep: Running | None = None
    form: SetupForm = field(default_factory=SetupForm)
    overlay: tuple[Any, Any] | None = None
    stored: bool = False
    arrived: bool = False
    has_news: bool = False
    drawn: bool = False
    touched: float = 0.0


def is_new() -> bool:
    """Whether this browser session has nothing yet."""
    return "session" not in st.session_state


def session() -> Session:
    """The state of this browser session."""
    if is_new():
        st.session_state["session"] = Session()
    found = st.session_state["session"]
    assert isinstance(found, Session)
    return found


# ---- shared by all sessions: frozen values and the pool ----------------------------------------------------------------


@st.cache_resource(show_spinner=False)
def _pool(engine_path: str) -> WorkerPool:
    return WorkerPool(engine_path)


def pool() -> WorkerPool:
    return _pool(os.environ.get("PLAN_EXPLORER_ENGINE", PLANNER_ENGINE))


@st.cache_resource(max_entries=16, show_spinner=False)
def _shown(fingerprint: str, model: str, checkpointed: tuple[str, ...], _graph: JointGraph, _plan: Plan) -> JointGraph:
    return planned_graph(_plan, _graph)


@st.cache_resource(max_entries=16, show_spinner=False)
def _drawn(fingerprint: str, model: str, _graph: JointGraph) -> DrawnGraph:
    return DrawnGraph(_graph)


def drawn(graph: JointGraph) -> DrawnGraph:
    return _drawn(graph.fingerprint, graph.request.model, graph)


@st.cache_resource(max_entries=16, show_spinner=False)
def _form(asked: str, memory_bytes: int | None, _plan: Plan) -> SetupForm:
    """Looking up the hardware reads two files."""
    return form_of(_plan, memory_bytes, tuple(model.name for model in models()))


@st.cache_resource(max_entries=16, show_spinner=False)
def _plan_message(plan_id: str, hardware_hash: str, fingerprint: str, _drawn_graph: DrawnGraph, _plan: Plan) -> dict[str, Any]:
    return graph_messages.plan_message(_drawn_graph, _plan)


def plan_message(document: Document) -> dict[str, Any]:
    """What the graph shows of the open plan, whatever is pinned. Shared: not to be changed."""
    plan, shown = document.plan, document.shown
    return _plan_message(plan.plan_id, plan.hardware_hash, shown.fingerprint, drawn(shown), plan)


@st.cache_resource(max_entries=8, show_spinner=False)
def _overlapped(plan_id: str, hardware_hash: str, fingerprint: str, _graph: JointGraph, _plan: Plan) -> Overlapped | PlannerError:
    try:
        timeline = forecast(_plan, _graph, hardware_profile(_plan.hardware_name)).timeline
    except PlannerError as error:  # such as a plan that was priced with other constants: kept, as the answer stays the same
        return error
    return overlapped_events(_graph, _plan, timeline)


def overlapped(graph: JointGraph, plan: Plan) -> Overlapped | PlannerError:
    """The forecast of a plan with communication beside compute, or why there is none. `graph` is that of the plan."""
    return _overlapped(plan.plan_id, plan.hardware_hash, graph.fingerprint, graph, plan)


def workspace() -> Workspace:
    """`-- --workspace FOLDER` after `streamlit run app/main.py`, or the environment, or the user's data folder."""
    if "--workspace" in sys.argv[:-1]:
        return Workspace(Path(sys.argv[sys.argv.index("--workspace") + 1]).expanduser())
    folder = os.environ.get("PLAN_EXPLORER_WORKSPACE")
    return Workspace(Path(folder) if folder else default_folder())


@st.cache_resource(max_entries=8, show_spinner=False)
def _read_graph(path: Path, written: float) -> JointGraph:
    return JointGraph.load(path)


def read_graph(path: Path) -> JointGraph:
    """A graph file, read once while it stays as it is, whoever asks: 0.3 s for a large model.

    Raises:
        OSError: there is no such file.
    """
    return _read_graph(path, path.stat().st_mtime)


@st.cache_resource(max_entries=32, show_spinner=False)
def _read_plan(root: Path, project: str, plan_id: str, written: float) -> Plan:
    return Workspace(root).load_plan(project, plan_id)


def read_plan(project: str, plan_id: str) -> Plan:
    """A plan of the workspace, as `read_graph`. Raises as `Workspace.load_plan`."""
    folder = workspace()
    return _read_plan(folder.root, project, plan_id, folder.plan_written(project, plan_id))


def model_folders() -> Folders:
    """Folders from which this server runs models of its users, None for any path."""
    return allowed_folders(sys.argv, st.get_option("server.address"))


# ---- what is shown -----------------------------------------------------------------------------------------------------


def show(found: Session, document: Document, *, stored: bool = False) -> None:
    """Makes `document` what the session has open."""
    if found.sweep is not None and (found.document is None or _swept(found.document.plan) != _swept(document.plan)):
        found.sweep.job.end("cancelled")
        pool().forget(found.sweep.draft)
        found.sweep = None
    found.others = {}
    found.document, found.stored = document, stored
    found.error, found.infeasible, found.legal, found.overlay = None, False, {}, None
    found.exported = found.recipe = None
    found.from_graph, found.note, found.questions, found.why = None, "", {}, None
    plan = document.plan
    asked = (plan.request, plan.mesh, plan.hardware_name, plan.gpus_per_node, plan.memory_policy, plan.checkpoint)
    found.form = _form(repr(asked), document.memory_bytes, plan)
    if found.selected and found.selected not in drawn(document.shown).keys:
        found.selected = None


def _swept(plan: Plan) -> tuple[object, ...]:
    """What the rows of a sweep depend on, whatever the mesh."""
    return (plan.request, plan.mesh.num_devices, plan.hardware_hash, plan.gpus_per_node, plan.memory_policy, plan.checkpoint)


def select(found: Session, key: str | None) -> None:
    """Select a box from outside the graph, which is asked to show it."""
    found.selected, found.group = key, ()
    found.focus = (key, found.focus[1] + 1)


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
