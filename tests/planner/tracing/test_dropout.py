"""Dropout as a function of numbers: the masks, their place in the graph, and the module under the same masks."""

from __future__ import annotations

import pytest
import torch

from planner.graph import BACKWARD, FORWARD, JointGraph
from planner.tracing.dropout import OP, kept, layer_key
from planner.tracing.reference import reference_step
from planner.tracing.trace import trace
from tests.oracles.interpret import run
from tests.planner.tracing.common import user_request


def mask(shape: tuple[int, ...], p: float = 0.25, *, step: int = 0, layer: int = 0, ordinal: int = 0) -> torch.Tensor:
    return kept(p, layer_key(0, step, layer), ordinal, [torch.arange(size) for size in shape], shape)


@pytest.mark.parametrize("p", [0.01, 0.25, 0.5, 0.9])
def test_the_rate_is_that_asked_for(p: float) -> None:
    """Within 5 standard deviations, along every dim."""
    found = mask((64, 48, 96), p)
    for dims in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        count = torch.tensor([found.shape[d] for d in dims]).prod()
        deviation = (p * (1 - p) / count).sqrt()
        assert ((~found).double().mean(dims) - p).abs().max() < 5 * deviation


def test_masks_of_steps_layers_places_and_neighbours_have_nothing_in_common() -> None:
    base = mask((256, 256), 0.5)
    others = [mask((256, 256), 0.5, step=1), mask((256, 256), 0.5, layer=1), mask((256, 256), 0.5, ordinal=1)]
    for other in (*others, base.roll(1, 0), base.roll(1, 1), base.t()):
        assert abs((base == other).double().mean() - 0.5) < 0.01


def test_a_part_of_the_positions_gives_that_part_of_the_mask() -> None:
    whole = mask((8, 12, 6))
    part = kept(0.25, layer_key(0, 0, 0), 0, [torch.arange(4, 8), torch.arange(12), torch.arange(2, 4)], (8, 12, 6))
    assert torch.equal(part, whole[4:, :, 2:4])


def test_positions_beyond_32_bits_are_told_apart() -> None:
    places = [torch.arange(2**21, 2**21 + 256), torch.arange(4096)]
    high = kept(0.5, 7, 0, places, (2**22, 4096))
    low = kept(0.5, 7, 0, [torch.arange(256), torch.arange(4096)], (2**22, 4096))
    assert abs((high == low).double().mean() - 0.5) < 0.01


@pytest.fixture(scope="module")
def dropping() -> JointGraph:
    return trace(user_request("dropping"))


def test_layers_are_alike_and_nothing_of_a_mask_is_kept(dropping: JointGraph) -> None:
    found = [node for node in dropping.nodes if node.op == OP]
    assert dropping.dropouts == ((-1, 0), *((layer, n) for layer in range(2) for n in range(4)), (-1, 1), (-1, 2))
    layers = [[n.args[1:] for n in found if n.module.startswith(f"layers.{layer}") and n.phase == FORWARD] for layer in range(2)]
    assert layers[0] == layers[1] == [(0.2, 0), (0.25, 1), (0.1, 2), (0.25, 3)]
    forward, backward = ({n.args[1:] for n in found if n.phase == phase} for phase in (FORWARD, BACKWARD))
    assert forward - backward == {(0.5, 2)}, "channels are dropped by a factor without a gradient"
    assert backward < forward
    masks = [ref for ref in dropping.saved_for_backward if dropping.meta(ref).dtype == "bool"]
    assert {dropping.nodes[ref.node].op for ref in masks} == {"aten.le.Tensor"}, "which keys are earlier, not what is dropped"
    assert JointGraph.from_json(dropping.to_json()).dropouts == dropping.dropouts


@pytest.mark.parametrize("factory", ["dropping", "dropping_checkpointed"])
def test_the_graph_drops_what_the_module_drops_under_the_same_masks(factory: str) -> None:
    graph, generator = trace(user_request(factory)), torch.Generator().manual_seed(0)
    shapes = {p.name: graph.nodes[p.node].outputs[0].shape for p in graph.parameters}
    parameters = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    inputs = {"x": torch.randn(8, 12, 16, generator=generator)}
    wanted = reference_step(user_request(factory), {"parameters": parameters, "buffers": {}, "inputs": inputs}, graph.dropouts)
    loss, gradients = run(graph, parameters, inputs)
    assert torch.allclose(loss, wanted["loss"], rtol=1e-5)
    for name, gradient in wanted["grads"].items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name


def test_products_in_checkpointed_regions_stay_whole_and_have_their_module() -> None:
    graph = trace(user_request("checkpointed"))
    products = [node for node in graph.nodes if node.op == "planner.einsum.default" and node.phase == FORWARD]
    assert [node.module for node in products] == ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]
    assert not any(node.op.startswith("aten.mm") for node in graph.nodes)
