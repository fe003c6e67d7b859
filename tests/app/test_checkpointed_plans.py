"""Plans that repeat layers, in the app: what is stored is the model's graph, what is shown is the plan's."""

from pathlib import Path

from app.engine import OpenSpec, PlannerEngine, Progress
from app.state import Document
from app.view_models import changes, inspector, op_table, pins, status
from app.view_models.graph_messages import DrawnGraph, marked, plan_message
from app.workspace import Workspace
from planner import Mesh, ModelRequest, Pin, Plan, planned_graph
from planner.checkpointing import checkpointed, layer_names
from tests.app.synthetic import make_plan, small_graph

GRAPH = small_graph()
FULL = checkpointed(GRAPH, layer_names(GRAPH)[:2])
REPEATED = "layers.0.attention/attention/recompute#0"


def document(plan: Plan, base: Plan | None = None) -> Document:
    return Document(project="p", draft="d", graph=GRAPH, graph_path=None, plan=plan, base=base)


def test_the_plan_s_graph_is_shown_and_the_model_s_is_stored(tmp_path: Path) -> None:
    found = document(make_plan(FULL))
    assert found.graph is GRAPH and REPEATED in found.shown.node_by_key
    assert found.shown.fingerprint == found.plan.fingerprint
    plain = document(make_plan(GRAPH))
    assert plain.shown is GRAPH
    folder = Workspace(tmp_path)
    folder.save_graph("p", found.graph)
    folder.save_plan("p", found.plan)
    loaded = folder.load_plan("p", found.plan.plan_id)
    assert planned_graph(loaded, folder.load_graph("p", GRAPH.fingerprint)).fingerprint == found.plan.fingerprint


def test_repeated_ops_are_drawn_listed_inspected_and_can_be_pinned() -> None:
    found = document(make_plan(FULL), base=make_plan(GRAPH))
    drawn = DrawnGraph(found.shown)
    assert REPEATED in drawn.keys and REPEATED in drawn.topology["odd_keys"].values()
    message = marked(plan_message(drawn, found.plan))
    assert len(message["placement"]) == len(drawn.keys)
    assert all(len(column) == len(drawn.keys) for column in op_table.columns(drawn, message, found.plan).values())
    seen = inspector.inspect(found.shown, found.plan, REPEATED)
    assert seen is not None and seen.phase == "backward"
    (target,) = pins.targets(found.shown, REPEATED)[:1]
    assert target.where == REPEATED and target.everywhere == "layers.*.attention/attention/recompute#0"
    assert pins.count_matches(found.shown, target.everywhere) == 2
    assert found.base is not None
    assert REPEATED not in changes.changed_keys(found.shown, found.base, found.plan)
    assert any(group.before == "absent" for group in changes.grouped(found.base, found.plan))


def test_the_numbers_say_what_is_repeated() -> None:
    def sources(plan: Plan) -> str:
        return " ".join(quantity.source for quantity in status.strip(plan, None, ()).quantities)

    assert "forward of 2 layers runs again in backward: layers.0, layers.1" in sources(make_plan(FULL))
    assert "runs again" not in sources(make_plan(GRAPH))


def test_a_worker_repeats_what_it_is_asked_to() -> None:
    spec = OpenSpec(
        request=ModelRequest(model="llama3-tiny", layers=2),
        mesh=Mesh.parse("dp=2,tp=2"),
        hardware="h100_sxm",
        checkpoint="full:1",
    )
    told: list[tuple[str, str]] = []
    progress = Progress(told.append)
    engine = PlannerEngine(spec, progress)
    graph, plan = engine.start(progress, None, 60.0)
    assert graph.checkpointed == () and (plan.checkpoint, plan.checkpointed) == ("full:1", ("layers.0",))
    assert engine.legal(progress, REPEATED) and engine.legal(progress, "layers.1.attention.wq/linear/fwd#0")
    assert ("progress", "solve") in told and any(kind == "news" for kind, _ in told)
    pin = Pin.parse("layers.0.attention.wq/linear/recompute#0=S(0)S(2)", spec.mesh)
    pinned = engine.solve(progress, (pin,), None, 60.0, False)
    assert pinned.checkpointed == ("layers.0",) and pinned.objective_us >= plan.objective_us * (1 - 1e-9)
    proof = engine.solve(progress, (), None, 60.0, None, ("layers.0", "layers.1"))
    assert proof.checkpointed == ("layers.0", "layers.1") and proof.checkpoint == "full:1"
