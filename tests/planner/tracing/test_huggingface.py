"""Models of transformers from a config: what is read, what is refused, and that experts compute what the library computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.enumerating.enumerate import enumerate_strategies
from planner.errors import InputError, UnknownModelError
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.tracing import huggingface
from planner.tracing.trace import trace
from tests.oracles.strategies import wrong_strategies

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}

Write = Callable[[Any], str]


@pytest.fixture
def config(tmp_path: Path) -> Write:
    def write(data: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return f"hf:{path}"

    return write


def request(model: str, **sizes: Any) -> ModelRequest:
    return ModelRequest(model=model, precision="as-traced", **sizes)


def test_a_config_becomes_a_graph_with_named_sizes(config: Write) -> None:
    graph = trace(request(config(LLAMA), batch=2, seq=16, layers=2))
    assert dict(graph.symbols) == {"B": 2, "S": 16, "V": 96, "D": 32, "F": 48, "H": 4, "KV": 2, "HD": 8}
    assert [(item.name, item.batch_dim, item.high) for item in graph.inputs] == [("input_ids", 0, 96), ("labels", 0, 96)]
    assert graph.layers == (0, 1)
    assert sum(node.name == "attention" for node in graph.nodes) == 2, "attention is the operator with prices of its own"
    assert not graph.stand_in_loss
    assert all(p.gradient is not None for p in graph.parameters)


def test_the_tiny_version_has_the_same_structure(config: Write) -> None:
    model = config(LLAMA)
    full = trace(request(model, layers=2, batch=2, seq=32))
    tiny = trace(request(model, layers=2, size="tiny"), full.repeated)
    assert full.structure_fingerprint == tiny.structure_fingerprint
    assert [name for name, _ in full.symbols] == [name for name, _ in tiny.symbols]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> JointGraph:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    return trace(request(f"hf:{path}", batch=2, seq=4))


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_every_strategy_of_experts_equals_the_op_on_whole_tensors(mixture: JointGraph, mesh: str) -> None:
    space = enumerate_strategies(mixture, Mesh.parse(mesh))
    assert space.replicated_for_lack_of_a_rule == ()
    names = {node.name for node in mixture.nodes}
    assert {"expert_product", "expert_weight_grad"} <= names
    wrong, tried = wrong_strategies(space, most_per_op=12)
    assert tried > 300
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_compute_what_the_library_computes(kind: str) -> None:
    """gpt_oss: weights the other way round, biases, and a gate of its own."""
    few = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields = few | {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "gpt_oss":
        fields |= {"head_dim": 8, "layer_types": ["full_attention"]}
    model = f"hf:{kind}" + "".join(f",{name}={value}" for name, value in fields.items())
    torch.manual_seed(0)
    module, _, inputs = huggingface.factory(model)(batch=2, seq=8)
    tokens = {name: torch.randint(0, 64, tensor.shape) for name, tensor in inputs.items()}
    losses, gradients = [], []
    for implementation in (huggingface.experts.IMPLEMENTATION, "eager"):
        module.set_experts_implementation(implementation)
        module.zero_grad()
        loss = module(**tokens).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[0], losses[1])
    assert gradients[0].keys() == gradients[1].keys() == dict(module.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{", "is no config"),
        ({"hidden_size": 3}, "is no config"),
        ([1], "is no config"),
        ({"model_type": "of_my_own", "auto_map": {"AutoConfig": "code.Mine"}}, "'of_my_own'"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantised"),
        (LLAMA | {"hidden_size": 33}, "refused by transformers"),
        ({"model_type": "vit"}, "no causal language model"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ({"model_type": "opt", "layerdrop": 0.2}, "layerdrop=0.2"),
    ],
)
def test_configs_that_cannot_be_used_are_refused_in_words(config: Write, data: Any, said: str) -> None:
    model = config(data)
    with pytest.raises(InputError, match=said) as caught:
        huggingface.factory(model)()
    assert caught.value.hint


def test_unknown_files_architectures_and_fields_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="no file"):
        huggingface.factory(f"hf:{tmp_path}/none/config.json")
    with pytest.raises(UnknownModelError, match="no architecture 'lama'"):
        huggingface.factory("hf:lama")
    with pytest.raises(InputError, match="no field hidden"):
        huggingface.factory("hf:llama,hidden=3")


def test_depth_cuts_what_is_said_layer_by_layer() -> None:
    config = huggingface.with_layers(huggingface.read_config("hf:gemma3_text"), 3)
    assert config.num_hidden_layers == 3 == len(config.layer_types)


@pytest.mark.parametrize(
    "kind", ["llama", "falcon", "gemma2", "opt", "gpt_oss", "deepseek_v3", "mamba2", "bamba", "qwen3_next", "phi3"]
)
def test_tiny_sizes_fit_together_and_can_be_split(kind: str) -> None:
    """The library checks what belongs together (heads and hidden size, groups of experts); widths split over two axes of 2."""
    full = huggingface.with_layers(huggingface.read_config(f"hf:{kind}"), 2)
    sizes, small = (huggingface.named_sizes(config, 4, 64) for config in (full, huggingface.tiny_config(full, 64)))
    assert sizes.keys() == small.keys()
    assert all(small[name] <= sizes[name] for name in small if name not in ("H", "KV"))
    assert all(small[name] % 4 == 0 or small[name] == sizes[name] for name in small)
