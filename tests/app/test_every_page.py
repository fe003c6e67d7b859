"""Every page with every sort of plan: it draws, says its name, and its numbers have units."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app import opening
from app.view_models.pins import plan_event
from app.workspace import Workspace, project_id
from planner import InfeasibleError, JointGraph, Mesh, Plan
from planner.checkpointing import checkpointed, layer_names
from tests.app.conftest import run
from tests.app.synthetic import make_plan, small_graph
from tests.app.test_pages import document, session, strip_text

PAGES = ("setup", "explorer", "communication", "memory", "compare", "export")
GRAPH = small_graph(2)


def experts(graph: JointGraph) -> JointGraph:
    """The same graph, its second linear an expert: what a mixture of experts calls its modules."""

    def renamed(text: str) -> str:
        return text.replace("attention.wo", "moe.experts")

    nodes = tuple(replace(node, key=renamed(node.key), module=renamed(node.module)) for node in graph.nodes)
    parameters = tuple(replace(p, names=tuple(map(renamed, p.names))) for p in graph.parameters)
    return replace(graph, nodes=nodes, parameters=parameters)


MOE = experts(GRAPH)
PLANS: dict[str, tuple[JointGraph, Plan]] = {
    "dense": (GRAPH, make_plan(GRAPH)),
    "experts": (MOE, make_plan(MOE, Mesh.parse("dp=2,ep=4"))),
    "checkpointed": (GRAPH, make_plan(checkpointed(GRAPH, layer_names(GRAPH)[:1]))),
    "one axis": (GRAPH, make_plan(GRAPH, Mesh.parse("dp=8"))),
    "three axes": (GRAPH, make_plan(GRAPH, Mesh.parse("dp=2,cp=2,tp=4"))),
    "four axes": (GRAPH, make_plan(GRAPH, Mesh.parse("pod=2,dp=2,cp=2,tp=2"))),
    "over its budget": (GRAPH, make_plan(GRAPH, memory_bytes=2**30)),
}


def texts(at: AppTest) -> str:
    found = [*at.markdown, *at.caption, *at.info, *at.warning, *at.error]
    return " ".join([*(item.value for item in found), *(item.body for item in at.get("html"))])


def walk(at: AppTest) -> None:
    for name in PAGES:
        at.switch_page(f"views/{name}.py")
        run(at)
        assert f">{name.title()}</h1>" in texts(at)


@pytest.mark.parametrize("kind", PLANS)
def test_every_page_draws_every_sort_of_plan(
    open_app: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    graph, plan = PLANS[kind]
    (tmp_path / "plan.json.gz").write_bytes(gzip.compress(plan.dumps().encode()))
    graph.save(tmp_path / "graph.json.gz")
    monkeypatch.setattr(opening, "DEMO_GRAPH", tmp_path / "graph.json.gz")
    monkeypatch.setattr(opening, "DEMO_PLAN", tmp_path / "plan.json.gz")
    at = open_app()
    assert document(at).plan.plan_id == plan.plan_id
    assert ("GiB over" if kind == "over its budget" else "fits") in strip_text(at)
    for axis in {axis for group in plan.comm_bytes for axis in group.split("+")}:
        assert axis in strip_text(at)
    walk(at)


def test_without_a_plan_every_page_says_where_to_begin(open_app, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(opening, "DEMO_GRAPH", tmp_path / "none.json.gz")
    at = open_app()
    walk(at)
    for name in PAGES:
        at.switch_page(f"views/{name}.py")
        run(at)
        assert ("no demo plan" if name == "setup" else "No plan is open") in texts(at)
        assert name == "setup" or at.button(key="no_plan_setup")


def test_demands_that_cannot_hold_are_told_on_every_page_and_the_last_plan_stays(open_app) -> None:
    at = open_app()
    found = session(at)
    found.error = InfeasibleError("no plan satisfies all pins", hint="Remove one.", conflicts=["pin a = RR", "pin b = S(0)R"])
    found.infeasible = True
    for name in PAGES:
        at.switch_page(f"views/{name}.py")
        run(at)
        assert "No plan satisfies all pins" in at.error[0].value and "last good plan shown" in strip_text(at)
        assert "pin a = RR" in texts(at) and "pin b = S(0)R" in texts(at)


def test_a_plan_whose_graph_is_gone_is_an_error_beside_the_demo(open_app, demo: Path) -> None:
    plan = make_plan(GRAPH)
    folder, project = Workspace(demo), project_id("gone", plan.mesh, GRAPH.fingerprint)
    folder.save_project(project, {"schema": 1, "name": "gone", "graph": GRAPH.fingerprint})
    folder.save_plan(project, plan)
    folder.append_event(project, "d1", plan_event(plan, None, GRAPH, None))
    at = open_app(project=project, draft="d1")
    assert "is not in the workspace" in at.error[0].value and "Trace the model again" in at.error[0].value
    walk(at)
