"""Checkpointing as a change of the graph: the same numbers, less kept, the forward work paid again."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planner.checkpointing import Checkpoint, checkpoint_order, checkpointed, first_layers, layer_names
from planner.constraint import Pin
from planner.costing.estimate import compute_us
from planner.errors import InfeasibleError, InputError, InvalidConstraintError, PlanFormatError
from planner.graph import BACKWARD, FORWARD, JointGraph, ModelRequest, TensorRef, layer_path
from planner.matching import check_same_model, planned_graph
from planner.mesh import Mesh
from planner.pipeline import PlanRequest, make_plan, trace
from planner.plan import Plan
from planner.workbench import Workbench
from tests.oracles.interpret import run

MODELS = Path(__file__).with_name("layered_models.py")
DTYPES = {"float32": torch.float32, "int64": torch.int64}


@pytest.fixture(scope="module")
def llama() -> JointGraph:
    return trace(ModelRequest(model="llama3-tiny", size="tiny", layers=3, precision="as-traced"))


@pytest.fixture(scope="module")
def bench() -> Workbench:
    graph = trace(ModelRequest(model="llama3-tiny", layers=3, batch=16))
    return Workbench.build(graph, Mesh.parse("dp=2,tp=2"))


def step(graph: JointGraph) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the graph on fixed random numbers."""
    made = torch.Generator().manual_seed(0)
    values = {p.name: torch.randn(graph.meta(TensorRef(p.node, 0)).shape, generator=made) * 0.1 for p in graph.parameters}
    inputs = {}
    for given in graph.inputs:
        shape = graph.meta(TensorRef(given.node, 0)).shape
        is_index = given.high is not None
        inputs[given.name] = (
            torch.randint(0, given.high, shape, generator=made) if is_index else torch.randn(shape, generator=made)
        )
    buffers = {
        b.name: torch.rand(graph.meta(TensorRef(b.node, 0)).shape, generator=made).to(
            DTYPES[graph.meta(TensorRef(b.node, 0)).dtype]
        )
        for b in graph.buffers
    }
    return run(graph, values, inputs, buffers)


def saved_bytes(graph: JointGraph) -> int:
    return sum(graph.meta(ref).num_bytes for ref in graph.saved_for_backward)


# ---- the change of the graph ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("chosen", [[0], [2], [0, 2], [0, 1, 2]])
def test_loss_and_gradients_are_the_same_bits(llama: JointGraph, chosen: list[int]) -> None:
    names = layer_names(llama)
    graph = checkpointed(llama, [names[number] for number in chosen])
    loss, gradients = step(graph)
    wanted_loss, wanted = step(llama)
    assert torch.equal(loss, wanted_loss) and set(gradients) == set(wanted)
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "model", ["moe-tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vit-tiny", "hybrid-tiny"))]
)
def test_other_models_give_the_same_bits(model: str) -> None:
    graph = trace(ModelRequest(model=model, size="tiny", precision="as-traced"))
    full = checkpointed(graph, layer_names(graph))
    loss, gradients = step(full)
    wanted_loss, wanted = step(graph)
    assert torch.equal(loss, wanted_loss)
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
    assert saved_bytes(full) < saved_bytes(graph)


@pytest.mark.parametrize("model", ["counted", "pairs", "two_stacks"])
def test_hard_layers_give_the_same_bits_and_keep_what_crosses_alone(model: str) -> None:
    graph = trace(ModelRequest(model=f"{MODELS}:{model}", precision="as-traced"))
    names = layer_names(graph)
    wanted_loss, wanted = step(graph)
    for layers in (names, names[:1], names[-1:], names[::2]):
        found = checkpointed(graph, layers)
        loss, gradients = step(found)
        assert torch.equal(loss, wanted_loss)
        assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
        assert_one_layer_at_a_time(found)


def test_a_repeated_layer_drops_the_same_elements() -> None:
    factory = MODELS.parent / "tracing" / "user_models.py"
    graph = trace(ModelRequest(model=f"{factory}:dropping", precision="as-traced"))
    full = checkpointed(graph, layer_names(graph))
    assert any(full.repeated_layer(node) and node.name == "dropout" and "/recompute#" in node.key for node in full.nodes)
    loss, gradients = step(full)
    wanted_loss, wanted = step(graph)
    assert torch.equal(loss, wanted_loss) and all(torch.equal(gradients[name], wanted[name]) for name in wanted)
    assert_one_layer_at_a_time(full)


def assert_one_layer_at_a_time(graph: JointGraph) -> None:
    """What a layer's repetition reads is kept or made outside the other layers' repetitions."""
    for node in graph.nodes:
        home = graph.repeated_layer(node)
        if home is not None:
            for ref in node.operands:
                assert graph.repeated_layer(graph.nodes[ref.node]) in (None, home), node.key
        elif node.phase == BACKWARD and (path := layer_path(node.module)) is not None:
            for ref in node.operands:
                assert graph.repeated_layer(graph.nodes[ref.node]) in (None, path), node.key


def test_what_reads_a_buffer_before_it_changes_is_kept() -> None:
    """In backward the buffer holds its next value."""
    graph = trace(ModelRequest(model=f"{MODELS}:counted", precision="as-traced"))
    full = checkpointed(graph, layer_names(graph))
    changed = {buffer.node for buffer in full.buffers if buffer.update is not None}
    constant = {buffer.node for buffer in full.buffers} - changed
    reads = {ref.node for node in full.nodes if node.phase == BACKWARD for ref in node.operands}
    assert len(changed) == 3 and not changed & reads and constant <= reads
    assert [buffer.update for buffer in full.buffers] == [buffer.update for buffer in graph.buffers]
    assert sum(full.repeated_layer(node) is not None and node.name == "linear" for node in full.nodes) == 0
    kept = {full.nodes[ref.node].module for ref in full.saved_for_backward}
    assert {f"layers.{number}" for number in range(3)} <= kept


def test_only_what_crosses_the_border_is_kept(llama: JointGraph) -> None:
    full = checkpointed(llama, layer_names(llama))
    inside = [ref for ref in full.saved_for_backward if layer_path(full.nodes[ref.node].module) is not None]
    for ref in inside:
        home = layer_path(full.nodes[ref.node].module)
        readers = [user for user, _ in full.users[ref] if full.nodes[user].phase == FORWARD]
        assert any(layer_path(full.nodes[user].module) != home for user in readers), full.nodes[ref.node].key
    assert len(inside) == 3, "one tensor leaves each layer"
    assert saved_bytes(full) < 0.5 * saved_bytes(llama)


def test_each_layer_is_repeated_right_before_its_backward(llama: JointGraph) -> None:
    """What is repeated is not held longer than it must be: after the backward of the layer behind it has ended."""
    full = checkpointed(llama, layer_names(llama))
    position = {name: [] for name in layer_names(full)}
    for index, node in enumerate(full.nodes):
        if node.phase == BACKWARD and (path := layer_path(node.module)) is not None:
            position[path].append(index)
    for earlier, later in itertools.pairwise(layer_names(full)):
        assert min(position[earlier]) > max(position[later])


def test_forward_and_ordinary_keys_stay(llama: JointGraph) -> None:
    full = checkpointed(llama, layer_names(llama))
    forward = [node for node in llama.nodes if node.phase == FORWARD]
    assert list(full.nodes[: len(forward)]) == forward
    assert llama.node_by_key.keys() <= full.node_by_key.keys()
    added = full.node_by_key.keys() - llama.node_by_key.keys()
    assert added and all("/recompute#" in key and key.replace("/recompute#", "/fwd#") in llama.node_by_key for key in added)


def test_what_backward_does_not_need_is_not_repeated(llama: JointGraph) -> None:
    full = checkpointed(llama, layer_names(llama))
    repeated = [node for node in full.nodes if full.repeated_layer(node)]
    assert not any(node.module.endswith("w2") and node.name == "linear" for node in repeated)
    assert sum(node.module.endswith("w1") and node.name == "linear" for node in repeated) == 3
    assert len({node.key for node in repeated}) == len(repeated)


def test_the_same_layers_give_the_same_graph(llama: JointGraph) -> None:
    a, b = (checkpointed(llama, names) for names in (["layers.1", "layers.0"], ["layers.0", "layers.1"]))
    assert a.fingerprint == b.fingerprint and a.checkpointed == b.checkpointed == ("layers.0", "layers.1")
    assert a.fingerprint != checkpointed(llama, ["layers.0"]).fingerprint
    assert checkpointed(llama, []) is llama and checkpointed(a, a.checkpointed) is a
    again = JointGraph.from_json(a.to_json())
    assert again.fingerprint == a.fingerprint and again.checkpointed == a.checkpointed


def test_alike_layers_are_checkpointed_from_the_first(llama: JointGraph) -> None:
    assert checkpoint_order(llama) == layer_names(llama) == ("layers.0", "layers.1", "layers.2")
    assert first_layers(llama, checkpoint_order(llama), 2) == ("layers.0", "layers.1")


def test_layers_that_keep_no_more_than_crosses_their_border_are_not_worth_it() -> None:
    """One thin product per layer: what it keeps is as large as what enters it."""
    graph = trace(ModelRequest(model=f"{MODELS}:pairs", precision="as-traced"))
    assert saved_bytes(checkpointed(graph, layer_names(graph))) >= saved_bytes(graph)
    assert checkpoint_order(graph) == ()
    assert Checkpoint.parse("full").layers(graph) == layer_names(graph)


def test_unlike_layers_are_put_in_order_by_what_they_save() -> None:
    graph = trace(ModelRequest(model="hybrid-tiny", size="tiny"))
    order = checkpoint_order(graph)
    assert sorted(order) == sorted(layer_names(graph))
    worth = []
    for name in order:
        one = checkpointed(graph, [name])
        work = sum(node.flops for node in one.nodes) - sum(node.flops for node in graph.nodes)
        worth.append((saved_bytes(graph) - saved_bytes(one), work))
    assert all(saved > 0 for saved, _ in worth)


@pytest.mark.parametrize("written", ["", "some", "full:", "full:-1", "none:3", "auto:2", "FULL"])
def test_other_words_are_refused(written: str) -> None:
    with pytest.raises(InputError, match="no way of checkpointing") as caught:
        Checkpoint.parse(written)
    assert "full:16" in caught.value.hint


def test_more_layers_than_there_are_and_models_without_layers_are_refused(llama: JointGraph) -> None:
    with pytest.raises(InputError, match="more layers than the model has") as caught:
        Checkpoint.parse("full:4").layers(llama)
    assert "full:3" in caught.value.hint
    assert Checkpoint.parse("full:3").layers(llama) == layer_names(llama)
    assert Checkpoint.parse("full:0").layers(llama) == Checkpoint.parse("none").layers(llama) == ()
    with pytest.raises(InputError, match=r"no layer layers\.9"):
        checkpointed(llama, ["layers.9"])
    flat = replace(llama, nodes=tuple(replace(node, module="") for node in llama.nodes))
    with pytest.raises(InputError, match="no repeated layers"):
        Checkpoint.parse("full").layers(flat)


# ---- memory and time -----------------------------------------------------------------------------------------------------
def test_memory_falls_and_time_rises_by_the_repeated_forward_pass(bench: Workbench) -> None:
    constraints = bench.default_constraints()
    none, full = (bench.solve(constraints, checkpoint=how) for how in ("none", "full"))
    assert none.checkpointed == () and full.checkpointed == layer_names(bench.graph)
    assert full.memory.activation_bytes < none.memory.activation_bytes
    variant = bench.variants.bench(full.checkpointed)
    kept = [local_bytes(variant.graph, ref, full) for ref in variant.graph.saved_for_backward]
    assert sum(kept) == full.memory.activation_bytes
    rise = full.compute_us - none.compute_us
    assert rise > 0
    repeated = [n for n in variant.graph.nodes if n.key not in bench.graph.node_by_key]
    assert rise == pytest.approx(sum(full.choices[n.key].compute_us for n in repeated), rel=0.2), "fusion moves a little"
    forward = [n for n in bench.graph.nodes if n.phase == FORWARD and layer_path(n.module) and not n.module.endswith("w2")]
    assert sum(n.flops for n in repeated) == sum(n.flops for n in forward)


def local_bytes(graph: JointGraph, ref: TensorRef, plan: Plan) -> int:
    placements = plan.choices[graph.nodes[ref.node].key].outputs[ref.output]
    assert placements is not None
    parts = math.prod(size for size, one in zip(plan.mesh.axis_sizes, placements, strict=True) if str(one).startswith("S"))
    return graph.meta(ref).num_bytes // parts


def test_repeats_of_different_layers_are_not_fused(bench: Workbench) -> None:
    """Each layer's repetition costs the same: nothing is read once for all of them."""
    full = bench.variants.bench(layer_names(bench.graph))
    prices = compute_us(full.space, full.hardware)
    per_layer = {
        name: sum(float(prices[i].max()) for i, node in enumerate(full.graph.nodes) if full.graph.repeated_layer(node) == name)
        for name in layer_names(full.graph)
    }
    one, *others = per_layer.values()
    assert one > 0 and all(math.isclose(one, other, rel_tol=1e-9) for other in others), per_layer


# ---- auto ----------------------------------------------------------------------------------------------------------------
def test_with_room_nothing_is_checkpointed_and_nothing_else_is_tried(bench: Workbench) -> None:
    none = bench.solve(bench.default_constraints())
    found = bench.solve(bench.default_constraints(), checkpoint="auto")
    assert found.checkpointed == () and found.choices == none.choices and found.report.method == none.report.method


def fixed_plans(bench: Workbench, budget: int) -> dict[str, float]:
    """Step time of every way to checkpoint that fits."""
    found = {}
    for how in ("none", "full:1", "full:2", "full:3"):
        try:
            found[how] = bench.solve(bench.default_constraints(budget), checkpoint=how).objective_us
        except InfeasibleError as error:
            assert error.shortfall_bytes is not None
    return found


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_under_a_tight_budget_auto_is_never_dearer_than_a_fixed_choice(bench: Workbench, share: float) -> None:
    free = bench.solve(bench.default_constraints()).memory.peak_bytes
    budget = round(share * free)
    fixed = fixed_plans(bench, budget)
    if not fixed:
        with pytest.raises(InfeasibleError, match="with all 3 layers checkpointed"):
            bench.solve(bench.default_constraints(budget), checkpoint="auto")
        return
    found = bench.solve(bench.default_constraints(budget), checkpoint="auto")
    assert found.memory.peak_bytes <= budget
    assert found.objective_us <= min(fixed.values()) * (1 + 1e-6)
    assert "the best of 4 numbers of layers tried" in found.report.method


def test_auto_takes_the_least_number_where_repeating_is_all_that_helps(bench: Workbench) -> None:
    """Below what any sharding reaches without repetition: the first number of layers that fits at all."""
    least = {}
    for how in ("none", "full:1", "full:2", "full:3"):
        with pytest.raises(InfeasibleError) as caught:
            bench.solve(bench.default_constraints(1), checkpoint=how)
        least[how] = 1 + (caught.value.shortfall_bytes or 0)
    assert least["none"] > least["full:1"] > least["full:2"] > least["full:3"]
    found = bench.solve(bench.default_constraints((least["full:1"] + least["full:2"]) // 2), checkpoint="auto")
    assert len(found.checkpointed) >= 2
    with pytest.raises(InfeasibleError, match="with all 3 layers checkpointed") as refused:
        bench.solve(bench.default_constraints(least["full:3"] - 1), checkpoint="auto")
    assert refused.value.shortfall_bytes == 1


# ---- plans ---------------------------------------------------------------------------------------------------------------
def test_a_plan_says_what_it_checkpoints_and_can_be_replayed(bench: Workbench) -> None:
    plan = bench.solve(bench.default_constraints(), checkpoint="full:2")
    again = Plan.from_json(plan.to_json())
    assert (again.checkpoint, again.checkpointed) == ("full:2", ("layers.0", "layers.1"))
    assert again.plan_id == plan.plan_id
    check_same_model(again, bench.graph)
    check_same_model(again, planned_graph(again, bench.graph))
    replayed = bench.replay(again)
    assert replayed.plan_id == plan.plan_id and replayed.objective_us == pytest.approx(plan.objective_us)
    assert replayed.checkpoint == "full:2" and replayed.report.status == plan.report.status
    with pytest.raises(PlanFormatError, match=r"it checkpoints layers\.1"):
        check_same_model(again, trace(ModelRequest(model="llama3-tiny", layers=1, batch=16)))


def test_an_old_plan_checkpoints_nothing(bench: Workbench) -> None:
    data = bench.solve(bench.default_constraints()).to_json()
    del data["checkpoint"]
    old = Plan.from_json(data)
    assert old.checkpointed == () and old.checkpoint == "auto"


def test_pins_keep_working_on_every_variant(bench: Workbench) -> None:
    mesh = bench.mesh
    pins = [Pin.parse("layers.*.attention.wq=S(0)S(2)", mesh), Pin.parse("layers.1.feed_forward.w1.weight=S(0)S(1)", mesh)]
    for how in ("none", "full:1", "full", "auto"):
        plan = bench.solve((*bench.default_constraints(), *pins), checkpoint=how)
        texts = {"".join(map(str, plan.choices[f"layers.{i}.attention.wq/linear/fwd#0"].outputs[0] or ())) for i in range(3)}
        assert texts == {"S(0)S(2)"}


def test_a_pin_on_a_repeated_op_asks_for_its_layer_to_be_checkpointed(bench: Workbench) -> None:
    key = "layers.1.attention.wq/linear/recompute#0"
    bench.solve(bench.default_constraints(), checkpoint="full")
    assert bench.legal(key)
    pin = Pin.parse(f"{key}=S(0)S(2)", bench.mesh)
    with pytest.raises(InvalidConstraintError):
        bench.solve((*bench.default_constraints(), pin), checkpoint="none")
    found = bench.solve((*bench.default_constraints(), pin), checkpoint="auto")
    assert "layers.1" in found.checkpointed
    assert "".join(map(str, found.choices[key].outputs[0] or ())) == "S(0)S(2)"


def test_overrides_are_priced_on_the_plan_s_own_graph(bench: Workbench) -> None:
    constraints = bench.default_constraints()
    plan = bench.solve(constraints, checkpoint="full:1")
    for key in ("layers.0.attention.wq/linear/recompute#0", "layers.1.attention.wq/linear/fwd#0"):
        rows = bench.overrides(key, constraints=constraints, checkpointed=plan.checkpointed)
        now = plan.choices[key].outputs[0]
        values = {row.placements: row.objective_us for row in rows if row.objective_us is not None}
        assert len(values) > 1 and values[now] == pytest.approx(plan.objective_us, rel=1e-6) == min(values.values())


def test_unpinning_restores_the_plan(bench: Workbench) -> None:
    free = bench.solve(bench.default_constraints()).memory.peak_bytes
    constraints = bench.default_constraints(round(0.8 * free))
    first = bench.solve(constraints, checkpoint="auto")
    bench.solve((*constraints, Pin.parse("layers.0.attention.wo=RR", bench.mesh)), checkpoint="auto")
    assert bench.solve(constraints, checkpoint="auto").plan_id == first.plan_id


def test_a_request_decides_how() -> None:
    request = PlanRequest(model=ModelRequest(model="llama3-tiny", layers=2), mesh=Mesh.parse("dp=2,tp=2"), checkpoint="full:1")
    found = make_plan(request)
    assert found.plan.checkpointed == ("layers.0",) and found.graph.checkpointed == ()
    assert found.stats.num_nodes == len(planned_graph(found.plan, found.graph).nodes) > len(found.graph.nodes)
    again = make_plan(replace(request, checkpoint="auto"), graph=found.graph, replay=found.plan)
    assert again.plan.plan_id == found.plan.plan_id
    with pytest.raises(InputError, match="no way of checkpointing"):
        make_plan(replace(request, checkpoint="sometimes"))
