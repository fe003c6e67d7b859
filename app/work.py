"""The jobs of a session: start, solve, prove, export; what is legal at a tensor; and what becomes of their results.

A solve answers as soon as there is a plan with a bound. If the bound does not prove it, the proof goes on in a second worker,
behind the first one, which stays free for the next question.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from app import drafts
from app.engine import OpenSpec
from app.jobs import Job, Running, Worker
from app.state import Document, Session, pool, select, show, workspace
from app.view_models import demands
from app.view_models.other_plans import recipe_label, what_if_labels
from app.view_models.pins import PinHistory
from app.view_models.proofs import settle
from app.view_models.setup_form import describe
from app.workspace import new_id, project_id
from planner import InfeasibleError, PlanRequest
from planner.errors import SolverError
from planner.sweep import SweepRequest

SOLVE_LIMIT_S = 60.0
SOON_S = 0.5
"""A warm worker solves again in less: the page waits that long for the new plan, instead of being drawn once without it."""

OF_THE_INSPECTOR = ("overrides", "explain", "local_prices")
"""Questions about what is selected."""

SOLVES = ("start", "solve", "recipe", "what_if")
"""Kinds of jobs that have a plan to show before they end."""


def _spec(document: Document) -> OpenSpec:
    plan = document.plan
    return OpenSpec(
        request=plan.request, mesh=plan.mesh, hardware=plan.hardware_name, optimizer=plan.memory_policy.optimizer,
        checkpoint=plan.checkpoint, gpus_per_node=plan.gpus_per_node, graph_path=document.graph_path,
    )  # fmt: skip


def _worker(document: Document) -> Worker:
    return pool().worker(document.draft, _spec(document))


# ---- small questions ---------------------------------------------------------------------------------------------------


def warm_worker(found: Session) -> None:
    """Opens the plan in a worker and solves it there once, so that the first question is answered quickly."""
    document = found.document
    if document is not None and "" not in found.legal:
        found.legal[""] = _worker(document).submit("ready", document.memory_bytes)


def legal(found: Session, key: str) -> Job:
    """The job that finds what the output of a node can be pinned to; asked once per key and kept while it is good."""
    assert found.document is not None
    known = found.legal.get(key)
    if known is not None and (known.active or known.state == "done"):
        return known
    worker = _worker(found.document)
    stop_questions(found, *OF_THE_INSPECTOR)  # what is still shown is asked again
    for other, job in found.legal.items():
        if other and job.state == "queued":
            worker.cancel(job)  # the selection has moved on
    found.legal[key] = worker.submit("legal", key)
    return found.legal[key]


def ask(found: Session, command: str, about: tuple[Any, ...], *arguments: Any) -> Job:
    """The job that answers a question about the plan as it is; asked once, and again if it was stopped."""
    assert found.document is not None
    question = (command, found.document.plan.plan_id, *about)
    known = found.questions.get(question)
    if known is None or known.state == "cancelled":
        known = found.questions[question] = _worker(found.document).submit(command, *arguments)
    return known


def stop_questions(found: Session, *commands: str) -> None:
    """Those of these commands that are not answered yet; without commands all of them."""
    for (command, *_), job in found.questions.items():
        if job.active and found.document is not None and (not commands or command in commands):
            _worker(found.document).stop(job)


def opening_stage(found: Session) -> str:
    """What the worker does before it can answer anything, "" if it is ready."""
    opening = found.legal.get("")
    return opening.stages[-1].name if opening is not None and opening.active and opening.stages else ""


def is_idle(found: Session) -> bool:
    """Whether a question about the open plan would be answered at once."""
    return found.document is not None and not _worker(found.document).busy


def forget_failed(found: Session, key: str) -> None:
    found.legal.pop(key, None)


# ---- long jobs ---------------------------------------------------------------------------------------------------------


def start(found: Session, request: PlanRequest) -> None:
    """Trace (unless that model is open), price and solve as a new draft, under the constraints and pins of the request. What is
    open stays until the new plan is there."""
    cancel(found)
    document, draft = found.document, new_id()
    keep = document is not None and document.plan.request == request.sized_model
    spec = OpenSpec(
        request=request.sized_model, mesh=request.mesh, hardware=request.hardware, optimizer=request.optimizer,
        checkpoint=request.checkpoint, gpus_per_node=request.gpus_per_node,
        graph_path=document.graph_path if keep and document is not None else None,
    )  # fmt: skip
    worker = pool().worker(draft, spec)
    job = worker.submit("start", request.memory_bytes, request.time_limit_s, (*request.constraints, *request.pins))
    _run(found, Running(kind="start", job=job, worker=worker, draft=draft, request=request))


def solve(found: Session) -> None:
    """Solve again with the pins as they are now."""
    document = found.document
    assert document is not None
    stop_proof(found)
    worker = _worker(document)
    job = worker.submit("solve", document.history.pins, document.memory_bytes, SOLVE_LIMIT_S, False)
    _run(found, Running(kind="solve", job=job, worker=worker, draft=document.draft))
    if worker.alive and not opening_stage(found):
        job.wait(SOON_S)


def prove(found: Session, time_limit_s: float = SOLVE_LIMIT_S) -> None:
    """Look for a proof, or a better plan, of the plan that is open, with the layers that it checkpoints."""
    document = found.document
    assert document is not None
    stop_proof(found)
    draft = f"{document.draft} proof"
    worker = pool().worker(draft, _spec(document), behind=_worker(document))
    plan = document.plan
    job = worker.submit("solve", demands.of_plan(plan), document.memory_bytes, time_limit_s, None, plan.checkpointed)
    found.proof = Running(kind="proof", job=job, worker=worker, draft=draft, plan_id=document.plan.plan_id)


def export(found: Session, format: str = "script") -> None:
    """Write and check a file of the open plan, `script` or `recipe`."""
    document = found.document
    assert document is not None
    worker = _worker(document)
    job = worker.submit("export", document.plan, format)
    asked = Running(kind="export", job=job, worker=worker, draft=document.draft, name=format, plan_id=document.plan.plan_id)
    _run(found, asked)


def price_recipe(found: Session, name: str) -> None:
    """The best plan that follows a recipe, to compare with."""
    document = found.document
    assert document is not None
    worker = _worker(document)
    job = worker.submit("recipe", name, document.memory_bytes, SOLVE_LIMIT_S)
    _run(found, Running(kind="recipe", job=job, worker=worker, draft=document.draft, name=recipe_label(name)))


def what_if(found: Session, hardware: str) -> None:
    """The open plan on other hardware: priced anew, and solved anew."""
    document = found.document
    assert document is not None
    worker = _worker(document)
    job = worker.submit("what_if", document.plan, hardware, SOLVE_LIMIT_S)
    plan_id = document.plan.plan_id
    _run(found, Running(kind="what_if", job=job, worker=worker, draft=document.draft, plan_id=plan_id, name=hardware))


def start_sweep(found: Session, request: SweepRequest) -> None:
    """In a worker of its own, behind the one that answers questions; its rows come in one by one."""
    document = found.document
    assert document is not None
    stop_sweep(found)
    draft = f"{document.draft} sweep"
    worker = pool().worker(draft, _spec(document), behind=_worker(document))
    job = worker.submit("sweep", request)
    found.sweep = Running(kind="sweep", job=job, worker=worker, draft=draft)


def stop_sweep(found: Session) -> None:
    """Ends the sweep and its process. The rows so far stay."""
    if found.sweep is not None:
        found.sweep.job.end("cancelled")
        pool().forget(found.sweep.draft)


def _run(found: Session, running: Running) -> None:
    stop_questions(found)
    found.running, found.error, found.note = running, None, ""


def cancel(found: Session) -> None:
    """Ends the running job. The plan, the pins and what was exported stay."""
    running = found.running
    if running is None:
        return
    running.worker.cancel(running.job)
    if running.kind == "start":
        pool().forget(running.draft)
    found.running = None


def finish(found: Session) -> None:
    """Ends the running job with the best plan that it has; asked again, or if it has none, without one."""
    running = found.running
    if running is None or running.job.cut_short or running.kind not in SOLVES:
        cancel(found)
        return
    running.worker.finish(running.job)


def stop_proof(found: Session) -> None:
    """Ends the background proof and its process. The plan stays with the gap it has."""
    if found.proof is not None:
        found.proof.job.end("cancelled")
        pool().forget(found.proof.draft)
        found.proof = None


# ---- results -----------------------------------------------------------------------------------------------------------


def poll(found: Session) -> bool:
    """Takes over the results of jobs that have ended. Whether the whole page must be drawn for that."""
    _collect(found)
    return found.has_news


def begin_page(found: Session) -> None:
    """The whole page is being drawn, with the results of all jobs that have ended."""
    _collect(found)
    found.has_news = found.drawn = False
    found.touched = time.monotonic()


def _collect(found: Session) -> None:
    ended = [running for running in (found.running, found.proof) if running is not None and not running.job.active]
    for running in ended:
        found.has_news = True
        if running is found.running:
            found.running = None
            _take_over(found, running)
        elif running is found.proof:  # taking over the other one may have stopped it
            found.proof = None
            _take_over_proof(found, running)


def _take_over(found: Session, running: Running) -> None:
    job = running.job
    if job.state == "cancelled" or (job.cut_short and isinstance(job.error, SolverError)):  # no plan yet when it was asked to end
        if running.kind == "start":
            pool().forget(running.draft)
        return
    if running.kind in ("recipe", "what_if"):
        _take_over_other(found, running)
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
    stop_proof(found)
    if found.document is not None:
        pool().forget(found.document.draft)
    select(found, None)
    document = Document(
        project=project_id(plan.request.model, plan.mesh, graph.fingerprint),
        draft=running.draft, graph=graph, graph_path=running.worker.spec.graph_path, plan=plan,
        memory_bytes=running.request.memory_bytes, history=PinHistory(pins=demands.of_plan(plan)),
    )  # fmt: skip
    show(found, document)
    drafts.store(found)
    if found.stored:
        found.document = replace(document, graph_path=workspace().graph_path(document.project, graph.fingerprint))
    found.arrived = True
    _prove_if_open(found, running, running.request.time_limit_s)


def _solved(found: Session, running: Running) -> None:
    """The new plan's parent is the one it was solved from; an equal plan keeps the old comparison."""
    document, plan = found.document, running.job.result
    assert document is not None
    if plan.plan_id != document.plan.plan_id:
        drafts.set_plan(found, plan, document.plan)
    found.infeasible, found.error = False, None
    _prove_if_open(found, running, SOLVE_LIMIT_S)


def _prove_if_open(found: Session, running: Running, time_limit_s: float) -> None:
    """Not after a solve that the user ended: the plan stays with its gap until a proof is asked for."""
    if found.document is not None and found.document.plan.report.status != "optimal" and not running.job.cut_short:
        prove(found, time_limit_s)


def _exported(found: Session, running: Running) -> None:
    made = (running.plan_id, running.job.result)
    if running.name == "recipe":
        found.recipe = made
    else:
        found.exported = made


def _take_over_other(found: Session, running: Running) -> None:
    """A plan to compare with, or why there is none: nothing that is open changes."""
    job = running.job
    if running.kind == "recipe":
        found.others[running.name] = job.error if job.error is not None else job.result
        return
    same, best = what_if_labels(running.plan_id, running.name)
    if job.error is not None:
        found.others[same] = found.others[best] = job.error
    else:
        found.others[same], found.others[best] = job.result


def _take_over_proof(found: Session, running: Running) -> None:
    """What was found takes the place of the plan it was asked about, if that is still open."""
    document, job = found.document, running.job
    pool().forget(running.draft)
    if document is None or document.plan.plan_id != running.plan_id or job.state == "cancelled":
        return
    if job.error is not None:
        found.note = f"The search for a proof ended: {describe(job.error)}"
        return
    plan, found.note = settle(document.plan, job.result)
    drafts.set_plan(found, plan, document.base)
    found.exported = found.recipe = None


def elapsed_text(job: Job) -> str:
    """`trace 12 s, solve 3 s`"""
    stages = tuple(job.stages)
    ends = [*(stage.started for stage in stages[1:]), job.finished or time.monotonic()]
    return ", ".join(f"{stage.name} {end - stage.started:.0f} s" for stage, end in zip(stages, ends, strict=False))
