"""The traced graph computes what the module computes: node by node on real tensors, against autograd, in float32."""

import pytest
import torch

from planner.graph import BACKWARD, ModelRequest
from planner.tracing.trace import trace
from tests.oracles.interpret import run
from tests.planner.tracing.common import largest_error, user_request


@pytest.mark.parametrize(
    "factory", ["mlp", "tied_lm", "spare_parts", "named_inputs", "self_attention", "own_init", "many_outputs", "named_loss"]
)
def test_loss_and_gradients_equal_autograd(factory: str) -> None:
    assert largest_error(user_request(factory)) < 1e-5


def test_sample_model_equals_autograd() -> None:
    assert largest_error(ModelRequest(model="llama3-tiny", size="tiny", precision="as-traced")) < 1e-5


def test_the_check_notices_a_wrong_graph() -> None:
    """Negative control: a graph of other constants is not taken for equal."""
    request = ModelRequest(model="llama3-tiny", size="tiny", layers=1, precision="as-traced")
    graph = trace(request)
    number = next(i for i, n in enumerate(graph.nodes) if n.phase == BACKWARD and n.op == "aten.mul.Scalar")
    node = graph.nodes[number]
    wrong = list(graph.nodes)
    wrong[number] = type(node)(**{**vars(node), "args": (node.args[0], node.args[1] * 1.001)})
    broken = type(graph)(**{**{f: getattr(graph, f) for f in graph.__dataclass_fields__}, "nodes": tuple(wrong)})
    assert largest_error(request, graph) < 1e-5 < largest_error(request, broken)


def test_mixed_precision_is_close_and_gradients_are_wide() -> None:
    request = ModelRequest(model="llama3-tiny", size="tiny", layers=1)
    graph = trace(request)
    torch.manual_seed(0)
    sizes = dict(graph.symbols)
    values = {p.name: torch.randn(graph.nodes[p.node].outputs[0].shape) * 0.1 for p in graph.parameters}
    tokens = torch.randint(0, sizes["V"], (2, sizes["B"], sizes["S"]))
    inputs = {"tokens": tokens[0], "labels": tokens[1]}
    loss, gradients = run(graph, values, inputs)
    wide = trace(ModelRequest(model="llama3-tiny", size="tiny", layers=1, precision="as-traced"))
    wanted_loss, wanted = run(wide, values, inputs)
    assert abs(loss - wanted_loss) < 0.02 * abs(wanted_loss)
    assert {g.dtype for g in gradients.values()} == {torch.float32}
    worst = max(float((gradients[n] - wanted[n]).norm() / wanted[n].norm()) for n in wanted)
    assert 1e-4 < worst < 0.1, "bf16 compute rounds, and no more than that"
