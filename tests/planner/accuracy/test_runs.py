"""Rows of training runs become meshes and recipes, or are refused with a reason; planning them adds up."""

from dataclasses import replace

import pytest

from planner.accuracy import described
from planner.accuracy.deep_memory import other_state
from planner.accuracy.facts import of_run
from planner.accuracy.rescale import GROUPED, PLAIN, Sizes, at_sizes, parsed
from planner.accuracy.rows import Skip
from planner.accuracy.runs import Run, parallelism, run_of, vtrain_run
from planner.accuracy.steps import MOST_KEPT, Predictor, as_described, every_other_product
from planner.actions import Actions
from planner.checkpointing import checkpointed, layer_names
from planner.costing.live_memory import walk
from planner.costing.timeline import simulate
from planner.graph import FORWARD, ModelRequest
from planner.hardware import load_profile
from planner.pipeline import trace
from planner.schedule import Part

SMALL = "decoder[dim=256,heads=8,kv_heads=8,ffn=512,vocab=1024,gated=0,norm=layer]"
ROW = {
    "row_id": "r1", "group": "g", "framework": "torchtitan", "model": "llama", "arch": "dense", "layers": "32", "hidden": "4096",
    "ffn": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256", "gpu": "H100-SXM-80GB", "gpus": "64", "dp": "2",
    "fsdp": "4", "tp": "8", "sp": "True", "cp": "1", "pp": "1", "zero": "3", "micro_batch": "2", "global_batch": "32",
    "seq": "4096", "precision": "bf16", "ac_policy": "full", "compile": "True", "reliability": "high",
}  # fmt: skip


def test_a_row_becomes_mesh_recipes_and_batch() -> None:
    run = run_of(ROW)
    assert str(run.mesh) == "dp=2,fsdp=4,tp=8"
    assert [recipe.describe() for recipe in run.recipes] == ["recipe hsdp on dp, fsdp", "recipe tp_sp on tp"]
    assert (run.batch, run.accumulation, run.checkpoint, run.compiled) == (16, 2, "full", True)
    assert run.model == "decoder[dim=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,gated=1,tied=0,norm=rms]"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pp": "4"}, "pipeline stages"),
        ({"cp": "2"}, "context parallelism"),
        ({"arch": "moe"}, "no builder for models of kind moe"),
        ({"precision": "fp8"}, "precision is not bf16"),
        ({"ac_policy": "selective layer"}, "recompute policy that plans do not have"),
        ({"model": "llama LoRA"}, "fine-tuning"),
        ({"gpus": "60"}, "degrees do not multiply"),
        ({"global_batch": "33"}, "global batch is no multiple"),
        ({"hidden": ""}, "hidden is not stated"),
        ({"gpu": "TPU"}, "no hardware profile"),
        ({"reliability": "low"}, "low reliability"),
    ],
)
def test_what_cannot_be_planned_says_why(changed: dict[str, str], reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        run_of({**ROW, **changed})


@pytest.mark.parametrize(
    ("note", "hardware"),
    [
        ("", "h100_sxm"),
        ("network 400Gb/s per node", "h100_sxm@network=0.125"),
        ("H100 with 1600 Gbps node-node interconnect (RoCE)", "h100_sxm@network=0.5"),
        ("3200 Gbps per node", "h100_sxm"),
        ("peak 400 Gb/s somewhere", "h100_sxm"),
        ("1 Gbps per node", "h100_sxm"),
    ],
)
def test_a_network_that_the_row_notes_is_used(note: str, hardware: str) -> None:
    assert run_of({**ROW, "note": note}).hardware == hardware


def test_facts_of_a_run_are_what_its_row_leaves_open() -> None:
    profile = load_profile("h100_sxm")
    assert of_run(ROW, run_of(ROW), profile) == ("several nodes, network not stated: ib_8x400g assumed",)
    open_row = {**ROW, "ac_policy": "", "compile": "", "sp": "", "note": "network 400Gb/s per node", "reliability": "medium"}
    found = of_run(open_row, run_of(open_row), profile)
    for said in ("recompute not stated", "compiled or eager not stated: eager", "sequence parallelism not stated", "as noted",
                 "medium reliability", "note: network"):  # fmt: skip
        assert any(said in fact for fact in found), said


def test_rows_of_ranked_plans() -> None:
    row = {"gpus": "8", "tp": "2", "dp": "4", "pp": "1", "hidden": "1024", "heads": "16", "layers": "24", "seq": "1024"}
    run = vtrain_run({**row, "micro_batch": "2", "global_batch": "32", "iter_ms": "100"})
    assert (str(run.mesh), run.batch, run.accumulation) == ("dp=4,tp=2", 8, 4)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor()


def small(**changes: object) -> Run:
    mesh, recipes = parallelism(2, 1, 2, False)
    values = {
        "model": SMALL, "layers": 4, "seq": 128, "hardware": "h100_sxm", "mesh": mesh, "recipes": recipes, "batch": 16,
        "accumulation": 1, "checkpoint": "none", "compiled": True, "zero": 0,
    }  # fmt: skip
    return Run(**{**values, **changes})  # type: ignore[arg-type]


def sharded(**changes: object) -> Run:
    mesh, recipes = parallelism(1, 4, 2, True)
    return small(**{"mesh": mesh, "recipes": recipes, "zero": 3, **changes})


def test_traced_sizes_are_primes_and_unlike() -> None:
    """So a number of the graph says which sizes it counts."""
    for sizes in (GROUPED, PLAIN):
        numbers = [number for number in vars(sizes).values() if number > 1]
        assert len(set(numbers)) == len(numbers)
        assert all(number % k for number in numbers for k in range(2, int(number**0.5) + 1))


def test_other_sizes_in_graph_space_are_another_trace(predictor: Predictor) -> None:
    """Shapes, arguments, work and structure as traced at those sizes."""
    name = "decoder[dim=256,heads=8,kv_heads=2,ffn=512,vocab=1024,gated=1,norm=rms]"
    sizes, flags = parsed(name, 6, 32)
    assert sizes == Sizes(batch=6, seq=32, kv_heads=2, group=4, half_head=16, ffn=512, vocab=1024)
    traced = trace(ModelRequest(model=name, batch=6, seq=32, layers=1))
    resized = at_sizes(predictor._traced(GROUPED, flags, 1), sizes, traced.request)
    assert resized.structure_fingerprint == traced.structure_fingerprint
    for mine, other in zip(resized.nodes, traced.nodes, strict=True):
        assert (mine.outputs, mine.flops) == (other.outputs, other.flops), mine.key
    assert resized.saved_for_backward == traced.saved_for_backward


@pytest.mark.slow
def test_deeper_models_are_simulated_as_if_traced_whole(predictor: Predictor) -> None:
    """A layer more than was planned: the time and the peak of a plan of the four-layer graph. What a collective holds is
    free once the device is seen to be done with it, so the peak of a small model jumps a little with its times."""
    for run in (small(), sharded(checkpoint="full")):
        whole, profile = predictor._described(run, 4), load_profile("h100_sxm")
        step = simulate(as_described(whole, run, profile), profile)
        assert predictor.step_us(run) == pytest.approx(step.step_us, rel=0.03)
        peak = walk(whole.actions, simulate(whole.actions, profile)).allocated_bytes
        assert predictor.memory(run).allocated_bytes == pytest.approx(peak, rel=0.01)


def test_step_grows_with_what_is_asked(predictor: Predictor) -> None:
    base = predictor.step_us(small())
    assert predictor.step_us(small(accumulation=2)) > 1.5 * base
    assert predictor.step_us(small(layers=8)) > 1.5 * base
    assert predictor.step_us(small(compiled=False)) > base, "the host starts every op by itself"
    kept, repeated = (predictor.memory(small(checkpoint=policy)).allocated_bytes for policy in ("none", "full"))
    assert repeated < predictor.memory(small(checkpoint="ops")).allocated_bytes < kept


def exported(predictor: Predictor, run: Run) -> Actions:
    return predictor._described(run, 2).actions


def test_bundled_messages_carry_the_same_bytes(predictor: Predictor) -> None:
    run = sharded()
    before, after = exported(predictor, run), as_described(predictor._described(run, 2), run, load_profile("h100_sxm"))

    def moved(actions: Actions) -> dict[str, int]:
        found: dict[str, int] = {}
        for action in actions.actions:
            if action.collective is not None:
                found[action.label] = found.get(action.label, 0) + action.collective.full_bytes
        return found

    assert moved(after) == moved(before)
    assert len([a for a in after.actions if a.collective]) < len([a for a in before.actions if a.collective])
    profile = load_profile("h100_sxm")
    assert simulate(after, profile).communication_us < simulate(before, profile).communication_us


def test_sums_in_16_bits_move_half_of_the_gradients_and_nothing_else(predictor: Predictor) -> None:
    before = exported(predictor, sharded())
    after = described.narrow_sums(before)
    halved = 0
    for one, other in zip(before.actions, after.actions, strict=True):
        if one.collective is None or one.part != Part.REDUCE:
            assert other == one
            continue
        assert other.collective is not None and other.collective.full_bytes * 2 == one.collective.full_bytes
        assert (one.collective.dtype, other.collective.dtype) == ("float32", "bfloat16")
        halved += 1
    assert halved > 4
    profile = load_profile("h100_sxm")
    wide, narrow = (
        as_described(predictor._described(sharded(), 2), replace(sharded(), narrow_sums=n), profile) for n in (False, True)
    )
    assert sum(a.us for a in narrow.actions) < sum(a.us for a in wide.actions)


def test_fsdp_1_sums_gradients_in_the_dtype_of_computing() -> None:
    for framework, narrow in (("FMS FSDP1", True), ("llm-foundry/composer FSDP1", True), ("torchtitan", False), ("FSDP2", False)):
        assert run_of({**ROW, "framework": framework}).narrow_sums is narrow


def test_exchanges_beside_products_take_less_but_not_nothing(predictor: Predictor) -> None:
    profile, actions = load_profile("h100_sxm"), exported(predictor, sharded())
    free = replace(profile, launch=replace(profile.launch, compiled_us=0.0, collective_us=0.0))
    hidden, open_ = simulate(described.pipelined(actions), free), simulate(actions, free)
    assert open_.alone_us["compute"] < hidden.step_us < open_.step_us
    assert hidden.communication_us == pytest.approx(open_.communication_us)


def test_micro_steps_leave_out_sums_and_update(predictor: Predictor) -> None:
    actions = exported(predictor, small())
    micro = described.without_update(described.without_gradient_sums(actions))
    left_out = [(a.name, a.part) for a, b in zip(actions.actions, micro.actions, strict=True) if a.us != b.us]
    assert any(name == "optimizer update" for name, _ in left_out)
    assert {part for name, part in left_out if name != "optimizer update"} == {"reduce"}


def test_selective_checkpointing_keeps_attention_and_every_other_product(predictor: Predictor) -> None:
    graph = predictor._graph(small(), 2)
    full = checkpointed(graph, layer_names(graph))
    some = checkpointed(graph, layer_names(graph), every_other_product(graph))

    def forward_flops(of: object) -> float:
        return sum(n.flops for n in of.nodes if n.flops > 0 and (n.phase == FORWARD or n.rematerialised))  # type: ignore[attr-defined]

    assert forward_flops(graph) < forward_flops(some) < forward_flops(full)
    assert not any("attention" in n.op and n.rematerialised for n in some.nodes)


@pytest.mark.parametrize(
    ("master", "zero", "per_element"),
    [(False, 0, 16), (False, 1, 8 + 8 / 2), (False, 2, 4 + 12 / 2), (True, 0, 18), (True, 1, 6 + 12 / 2)],
)
def test_state_of_other_ways_to_keep_parameters(master: bool, zero: int, per_element: float) -> None:
    run = small(has_master=master, zero=zero)
    assert run.data_ranks == 2
    assert 16 + other_state(run, 1.0) == pytest.approx(per_element)


def test_parameters_outside_layers_stay_gathered_where_frameworks_keep_them(predictor: Predictor) -> None:
    """Token table and head, in bf16, once each; two tensor-parallel ranks have half each. The rest are norms."""
    found = predictor._described(sharded(), 2)
    kept = described.with_root_gathered(found.actions, layer_names(found.graph))
    tables = 2 * 1024 * 256 * 2 // 2
    assert tables < kept.static_bytes["gathered parameters"] < tables + 2048
    assert sum(s.num_bytes for s in kept.storages if s.module.startswith("layers.")) == sum(
        s.num_bytes for s in found.actions.storages if s.module.startswith("layers.")
    )


@pytest.mark.parametrize(
    ("framework", "compiled", "kept"),
    [("torchtitan", "True", True), ("torchtitan", "SimpleFSDP aot_eager", False), ("MaxText", "", False)],
)
def test_which_frameworks_keep_them(framework: str, compiled: str, kept: bool) -> None:
    assert run_of({**ROW, "framework": framework, "compile": compiled}).keeps_root is kept


def test_operators_that_only_the_host_sees_make_eager_steps_longer(predictor: Predictor) -> None:
    few, many = (predictor.times(small(compiled=False), operators=operators) for operators in (1.0, 4.0))
    assert many.last > 2 * few.last


def test_few_plans_are_kept(predictor: Predictor) -> None:
    assert len(predictor.planned) <= MOST_KEPT
