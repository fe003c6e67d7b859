"""The shipped demo is what planning afresh gives."""

from pathlib import Path

import app.demo
from app.demo.__main__ import REQUEST
from planner import JointGraph, Plan, make_plan

FOLDER = Path(app.demo.__file__).parent


def test_planning_afresh_gives_the_shipped_graph_and_plan() -> None:
    graph = JointGraph.load(FOLDER / "llama3-8b.graph.json.gz")
    plan = Plan.load(FOLDER / "llama3-8b.plan.json.gz")
    fresh = make_plan(REQUEST)
    assert fresh.graph.to_json() == graph.to_json(), "run python -m app.demo"
    made, shipped = fresh.plan.to_json(), plan.to_json()
    for field in ("choices", "redistributions", "constraints", "hardware", "memory"):
        assert made[field] == shipped[field], f"{field} differs: run python -m app.demo"
    assert plan.report.status == "optimal"
