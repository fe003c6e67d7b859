"""The plans that a session can compare: what is open, its base, those of the project, recipes, and what was tried besides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from app import drafts, work
from app.state import Document, Session, pool, read_graph, read_plan, select, show, workspace
from app.view_models import demands
from app.view_models.history import Past
from app.view_models.history import history as of_logs
from app.view_models.other_plans import recipe_labels
from app.view_models.pins import PinHistory
from app.view_models.status import budget_bytes
from app.workspace import new_id, project_id
from planner import InputError, JointGraph, Plan, PlannerError, check_same_model

MOST_STORED = 30


@dataclass(frozen=True, kw_only=True)
class Option:
    """`plan` if it is at hand; else a recipe to be priced, or a plan id in the workspace."""

    plan: Plan | PlannerError | None = None
    recipe: str = ""
    stored: str = ""
    written: float | None = None


def open_label(found: Session) -> str:
    assert found.document is not None
    return f"open plan {found.document.plan.plan_id[:7]}"


def base_label(found: Session) -> str:
    """ "" without a base."""
    base = found.document.base if found.document else None
    return f"base plan {base.plan_id[:7]}" if base else ""


def options(found: Session) -> dict[str, Option]:
    """Label -> plan, in the order in which they are offered."""
    document = found.document
    assert document is not None
    listed = {open_label(found): Option(plan=document.plan)}
    if document.base is not None:
        listed[base_label(found)] = Option(plan=document.base)
    known = {document.plan.plan_id, document.base.plan_id if document.base else ""}
    for plan_id, written in workspace().plans(document.project)[:MOST_STORED]:
        if plan_id not in known:
            listed[f"plan {plan_id[:7]}"] = Option(stored=plan_id, written=written)
    recipes = recipe_labels()
    listed |= {label: Option(plan=plan) for label, plan in found.others.items() if label not in recipes}
    listed |= {label: Option(plan=found.others.get(label), recipe=name) for label, name in recipes.items()}
    if found.sweep is not None:
        listed |= {f"mesh {entry.mesh} (sweep)": Option(plan=plan) for entry, plan in found.sweep.job.rows if plan is not None}
    return listed


def load(found: Session, option: Option) -> Plan | PlannerError | None:
    """None for a recipe that is not priced yet."""
    document = found.document
    assert document is not None
    if not option.stored:
        return option.plan
    try:
        return read_plan(document.project, option.stored)
    except PlannerError as error:
        return error


def history(found: Session) -> tuple[tuple[Past, ...], tuple[PlannerError, ...]]:
    """(plans of the project, what could not be read)."""
    document = found.document
    assert document is not None
    folder, logs, problems = workspace(), [], []
    for draft in folder.drafts(document.project):
        try:
            logs.append(tuple(folder.events(document.project, draft)))
        except PlannerError as error:
            problems.append(error)
    return of_logs(logs), tuple(problems)


# ---- opening one of them ------------------------------------------------------------------------------------------------


def open_plan(found: Session, plan: Plan, graph: JointGraph, graph_path: Path | None) -> None:
    """A plan of a graph that is at hand, as a new draft; that of the same model, mesh and hardware replaces the open plan, which
    becomes its base.

    Raises:
        PlanFormatError: the plan is of another model or of other sizes.
    """
    check_same_model(plan, graph)
    document = found.document
    work.cancel(found)
    work.stop_proof(found)
    base = document.plan if document is not None and _alike(document.plan, plan) else None
    opened = Document(
        project=project_id(plan.request.model, plan.mesh, graph.fingerprint), draft=new_id(), graph=graph, graph_path=graph_path,
        plan=plan, base=base if base is None or base.plan_id != plan.plan_id else None,
        history=PinHistory(pins=demands.of_plan(plan)), memory_bytes=budget_bytes(plan),
    )  # fmt: skip
    if document is not None:
        pool().forget(document.draft)
    select(found, None)
    show(found, opened)
    drafts.store(found)
    if found.stored:
        found.document = replace(opened, graph_path=workspace().graph_path(opened.project, graph.fingerprint))


def _alike(one: Plan, other: Plan) -> bool:
    return (one.mesh, one.hardware_name, one.request) == (other.mesh, other.hardware_name, other.request)


def open_file(found: Session, plan: Plan) -> None:
    """A plan from a file: its graph is the one that is open, or one in the workspace.

    Raises:
        InputError: the model was not traced here.
    """
    document, problem = found.document, ""
    if document is not None:
        try:
            open_plan(found, plan, document.graph, document.graph_path)
            return
        except PlannerError as error:
            problem = f" The open model does not fit: {error.message}."
    for recent in workspace().recent():
        for path in workspace().graphs(recent.project):
            graph = read_graph(path)
            try:
                check_same_model(plan, graph)
            except PlannerError:
                continue
            open_plan(found, plan, graph, path)
            return
    raise InputError(
        f"the plan is of {plan.request.model}, fingerprint {plan.fingerprint}, which was not traced in this workspace.{problem}",
        hint="Trace that model at those sizes on Setup, then open the file again.",
    )
