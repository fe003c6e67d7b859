"""Facts about the graph that rules, solver and exporter are built on."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from planner.graph import BACKWARD, FORWARD, InitRule, JointGraph, ModelRequest, OperandRef, TensorRef, layer_of, without_layer
from planner.tracing.trace import trace
from tests.planner.tracing.common import user_request

LAYERS = 2
LINEARS_PER_LAYER = 7


@pytest.fixture(scope="module")
def graph() -> JointGraph:
    return trace(ModelRequest(model="llama3-tiny"))


def test_invariants_hold(graph: JointGraph) -> None:
    graph.check()
    assert graph.nodes[graph.node_by_key["output:loss"]].operands == (graph.loss,)
    assert "tangent:loss" in graph.node_by_key
    assert graph.class_name == "sample_models.llama3.Llama3"
    assert graph.layers == tuple(range(LAYERS))


def test_every_linear_is_one_product_per_phase_and_operand(graph: JointGraph) -> None:
    count = Counter((n.name, n.phase) for n in graph.nodes if n.op == "planner.einsum.default")
    linears = LINEARS_PER_LAYER * LAYERS + 1
    assert count == {
        ("linear", FORWARD): linears,
        ("linear_input_grad", BACKWARD): linears,
        ("linear_weight_grad", BACKWARD): linears,
    }
    wq = graph.nodes[graph.node_by_key["layers.1.attention.wq/linear/fwd#0"]]
    assert wq.args == ("bsk,nk->bsn", OperandRef(0), OperandRef(1))
    sizes = dict(graph.symbols)
    assert wq.flops == 2 * sizes["B"] * sizes["S"] * sizes["D"] ** 2
    assert wq.source.startswith("llama3.py:")


def test_sequence_and_batch_stay_apart(graph: JointGraph) -> None:
    """No tensor merges batch and sequence: both stay shardable from the tokens to the loss and back."""
    sizes = dict(graph.symbols)
    merged = sizes["B"] * sizes["S"]
    for node in graph.nodes:
        for meta in node.outputs:
            assert meta is None or merged not in meta.shape, node.key


def test_loss_is_split_along_the_vocabulary(graph: JointGraph) -> None:
    sizes = dict(graph.symbols)
    ops = {n.op for n in graph.nodes if (n.outputs[0] and sizes["V"] in n.outputs[0].shape) or n.name in ("amax", "gather")}
    assert {"aten.amax.default", "aten.exp.default", "aten.gather.default", "aten.scatter_add.default"} <= ops
    assert not any("softmax" in n.op or "mean" in n.op or "nll" in n.op for n in graph.nodes)


def test_causal_attention_counts_half(graph: JointGraph) -> None:
    sizes = dict(graph.symbols)
    full = 4 * sizes["B"] * sizes["H"] * sizes["S"] ** 2 * sizes["HD"]
    forward = graph.nodes[graph.node_by_key["layers.0.attention/attention/fwd#0"]]
    backward = graph.nodes[graph.node_by_key["layers.0.attention/attention_backward/bwd#0"]]
    assert forward.flops == full / 2
    assert backward.flops == 2.5 * forward.flops


def test_parameters_are_read_once_per_phase(graph: JointGraph) -> None:
    for parameter in graph.parameters:
        uses = Counter(graph.nodes[user].phase for user, _ in graph.users[(parameter.node, 0)])
        assert uses[FORWARD] == 1 and uses[BACKWARD] <= 1, parameter.name
        assert parameter.gradient is not None
        assert str(graph.meta(parameter.gradient)) == str(graph.nodes[parameter.node].outputs[0])


def test_backward_keeps_nothing_made_of_parameters_alone(graph: JointGraph) -> None:
    made_of_parameters: set[int] = {p.node for p in graph.parameters}
    for index, node in enumerate(graph.nodes):
        if node.phase == FORWARD and node.is_op and node.operands and all(r.node in made_of_parameters for r in node.operands):
            made_of_parameters.add(index)
    assert not [ref for ref in graph.saved_for_backward if ref.node in made_of_parameters]
    casts = [n for n in graph.nodes if n.rematerialised and n.module.endswith("wq")]
    assert [n.key for n in casts] == [f"layers.{i}.attention.wq/cast/bwd#0" for i in reversed(range(LAYERS))]


def test_casts_stand_beside_their_use(graph: JointGraph) -> None:
    """A parameter's cast comes just before its product, a gradient's last cast just after: nothing piles up at the ends."""
    for module in ("layers.0.attention.wq", "layers.1.feed_forward.w2"):
        at = graph.node_by_key
        assert at[f"{module}/linear/fwd#0"] - at[f"{module}/cast/fwd#0"] == 1
        assert at[f"{module}/cast/bwd#1"] - at[f"{module}/linear_weight_grad/bwd#0"] == 1


def test_layers_have_equal_keys_ops_and_wiring_shapes(graph: JointGraph) -> None:
    per_layer: dict[int, list[tuple[str, str, int]]] = {}
    for node in graph.nodes:
        if (layer := layer_of(node.module)) is not None and node.is_op:
            per_layer.setdefault(layer, []).append((without_layer(node.key), node.op, len(node.operands)))
    assert per_layer[0] == per_layer[1]
    outside = {n.module for n in graph.nodes if n.is_op and layer_of(n.module) is None}
    assert outside == {"", "tok_embeddings", "norm", "output"}


def test_keys_survive_batch_sequence_and_depth(graph: JointGraph) -> None:
    other = trace(ModelRequest(model="llama3-tiny", batch=16, seq=64))
    assert other.structure_fingerprint == graph.structure_fingerprint
    assert other.fingerprint != graph.fingerprint
    assert dict(other.symbols)["B"] == 16 and other.nodes[other.inputs[0].node].outputs[0].shape == (16, 64)
    deeper = trace(ModelRequest(model="llama3-tiny", layers=3))
    assert set(graph.node_by_key) < set(deeper.node_by_key)
    again = trace(ModelRequest(model="llama3-tiny"))
    assert again.fingerprint == graph.fingerprint


def test_tiny_size_has_the_same_structure_and_only_other_numbers(graph: JointGraph) -> None:
    tiny = trace(ModelRequest(model="llama3-tiny", size="tiny"))
    assert tiny.structure_fingerprint == graph.structure_fingerprint
    full_sizes, tiny_sizes = dict(graph.symbols), dict(tiny.symbols)
    assert list(full_sizes) == list(tiny_sizes)
    assert all(full_sizes[name] != tiny_sizes[name] and tiny_sizes[name] % 4 == 0 for name in full_sizes)


def test_saved_file_gives_the_same_graph(graph: JointGraph, tmp_path: Path) -> None:
    graph.save(tmp_path / "a.json.gz")
    loaded = JointGraph.load(tmp_path / "a.json.gz")
    assert loaded.fingerprint == graph.fingerprint and loaded.nodes == graph.nodes
    assert loaded.parameters == graph.parameters and loaded.inputs == graph.inputs and loaded.request == graph.request
    loaded.save(tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_inputs_say_what_they_are(graph: JointGraph) -> None:
    assert [(i.name, i.batch_dim, i.high) for i in graph.inputs] == [("tokens", 0, 2048), ("labels", 0, 2048)]
    named = trace(user_request("named_inputs"))
    assert [(i.name, i.batch_dim) for i in named.inputs] == [("batch.x", 0), ("batch.extra.y", 0), ("shift", None), ("scale", 0)]


def test_no_path_of_this_machine_is_in_the_graph(graph: JointGraph) -> None:
    assert not [n.source for n in graph.nodes if "/" in n.source]
    assert {n.source.partition(":")[0] for n in graph.nodes} == {"", "llama3.py"}


def test_tied_parameter_is_one_node_with_two_names() -> None:
    graph = trace(user_request("tied_lm"))
    assert [p.names for p in graph.parameters] == [("embed.weight", "head.weight"), ("mid.weight",)]
    gradient = graph.parameters[0].gradient
    assert gradient is not None and graph.nodes[gradient.node].op == "aten.add.Tensor", "both gradients are added"


def test_unused_and_frozen_parameters_are_listed_without_gradient() -> None:
    graph = trace(user_request("spare_parts", precision="bf16-mixed"))
    trained = {p.name: p.gradient is not None for p in graph.parameters}
    assert trained == {
        "frozen": False, "order": False, "used.weight": True, "used.bias": True, "spare.weight": False, "spare.bias": False,
    }  # fmt: skip
    dtypes = {p.name: graph.nodes[p.node].outputs[0].dtype for p in graph.parameters}
    assert dtypes["order"] == "int64" and dtypes["used.weight"] == "float32"
    assert "buffer:offset" in graph.node_by_key
    assert not graph.users.get((graph.parameter_by_name["spare.weight"].node, 0))


def test_initialisation_is_that_of_the_users_code() -> None:
    rules = {p.name: p.init for p in trace(user_request("own_init")).parameters}
    assert rules["scaled"] == InitRule("normal", (0.0, 0.25))
    assert rules["shifted"] == InitRule("uniform", (-1.0, 1.0))
    assert rules["linear.weight"] == InitRule("normal", (0.25, 0.125)), "the last write counts"
    assert rules["linear.bias"] == InitRule("constant", (0.0,))
    assert rules["norm.weight"] == InitRule("constant", (1.0,))
    for mixed in ("truncated", "row_apart", "padded.weight"):
        assert rules[mixed] == InitRule("unknown"), "not a plain fill: never approximated"


def test_initialisation_of_the_sample(graph: JointGraph) -> None:
    for parameter in graph.parameters:
        is_norm = "norm" in parameter.name
        assert parameter.init == (InitRule("constant", (1.0,)) if is_norm else InitRule("normal", (0.0, 0.02)))


@pytest.mark.slow
def test_all_layers_of_8b(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    graph = trace(ModelRequest(model="llama3-8b"))
    traced = time.perf_counter()
    graph.save(tmp_path / "g.json.gz")
    saved = time.perf_counter()
    assert JointGraph.load(tmp_path / "g.json.gz").fingerprint == graph.fingerprint
    loaded = time.perf_counter()
    with capsys.disabled():
        size = (tmp_path / "g.json.gz").stat().st_size
        print(
            f"\nllama3-8b, 32 layers: traced in {traced - start:.1f} s, {len(graph.nodes)} nodes, "
            f"file {size / 1000:.0f} kB, loaded and fingerprinted in {loaded - saved:.2f} s"
        )
    elements = sum(graph.nodes[p.node].outputs[0].num_elements for p in graph.parameters)
    assert elements == 8_030_261_248, "the published 8B has as many parameters"
    assert len(graph.layers) == 32


def test_a_model_that_returns_tensors_gets_a_stand_in_loss() -> None:
    """Of main, mid and two views of main: four sums of squares; the input returned as it is and the positions have none."""
    graph = trace(user_request("many_outputs", "bf16-mixed"))
    assert graph.stand_in_loss and JointGraph.from_json(graph.to_json()).stand_in_loss
    own = [node for node in graph.nodes if node.module == "loss" and node.phase == FORWARD and node.op.startswith("aten.sum")]
    assert [node.key for node in own] == [f"loss/sum/fwd#{number}" for number in range(4)]
    assert graph.meta(graph.loss).dtype == "float32"
    assert all(graph.meta(TensorRef(graph.node_by_key[node.key], 0)).dtype == "float32" for node in own)
    assert {p.name for p in graph.parameters} == {"loss.weight", "loss.bias", "head.weight"}


@pytest.mark.parametrize("factory", ["mlp", "named_loss"])
def test_a_model_with_a_loss_keeps_it(factory: str) -> None:
    graph = trace(user_request(factory))
    assert not graph.stand_in_loss
    assert not any(node.module == "loss" for node in graph.nodes)


WIDTHS = """
import torch
from torch import nn

class Outer(nn.Module):
    def __init__(self, rows, columns, used):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, rows), nn.Linear(8, columns), nn.Linear(columns, 8)
        self.used = used
    def forward(self, x):  # kept for the gradient of `last`: its operand, used x columns, or what that is made of, rows + columns
        outer = self.first(x).unsqueeze(2) + self.second(x).unsqueeze(1)
        return self.last(outer[:, : self.used].exp()).sum()

def make(size="full"):
    return Outer(*((8, 8, 6) if size == "full" else (32, 4, 2))), (torch.ones(4, 8),)
"""


def test_a_model_repeats_the_same_ops_in_backward_at_every_size(tmp_path: Path) -> None:
    """What is cheapest to keep depends on the sizes; the tiny version follows the full one all the same."""
    path = tmp_path / "widths.py"
    path.write_text(WIDTHS)
    full = trace(ModelRequest(model=f"{path}:make", precision="as-traced"))
    alone = trace(ModelRequest(model=f"{path}:make", precision="as-traced", size="tiny"))
    assert alone.structure_fingerprint != full.structure_fingerprint, "the sizes are such that it matters"
    followed = trace(ModelRequest(model=f"{path}:make", precision="as-traced", size="tiny"), full.repeated)
    assert followed.structure_fingerprint == full.structure_fingerprint
    assert followed.repeated == full.repeated != alone.repeated
    assert JointGraph.from_json(full.to_json()).repeated == full.repeated


def test_an_operator_of_the_user_is_one_op_per_phase_with_the_module_that_registers_it() -> None:
    graph = trace(user_request("own_operator"))
    own = [(node.key, node.op) for node in graph.nodes if node.op.startswith("user_models.")]
    assert own == [
        ("soft_cut/fwd#0", "user_models.soft_cut.default"), ("soft_cut_backward/bwd#0", "user_models.soft_cut_backward.default"),
    ]  # fmt: skip
    assert graph.operators == tuple((op, "user_models") for _, op in own)
    assert JointGraph.from_json(graph.to_json()).operators == graph.operators
