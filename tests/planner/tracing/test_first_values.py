"""First values of buffers: repeated from what the factory ran, they are the numbers of the module when it is really built."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.graph import DtypeRef, FirstValue, JointGraph, OperandRef
from planner.tracing.sources import find_factory
from planner.tracing.trace import trace
from tests.oracles.interpret import resolve
from tests.planner.tracing.common import largest_error, user_request


def computed(steps: FirstValue) -> Tensor:
    """The value that these steps make."""
    results: list[Any] = []

    def decode(value: Any) -> Any:
        if isinstance(value, OperandRef):
            return results[value.index]
        if isinstance(value, DtypeRef):
            return getattr(torch, value.name)
        return [decode(item) for item in value] if isinstance(value, tuple) else value

    for step in steps:
        if step.op == "literal":
            dtype, shape, numbers = step.args
            out: Any = torch.tensor(numbers, dtype=decode(dtype)).reshape(shape)
        elif step.op == "packed":
            dtype, shape, text = step.args
            out = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=decode(dtype)).reshape(shape)
        else:
            out = resolve(step.op)(*decode(step.args), **{name: decode(value) for name, value in step.kwargs})
        results += list(out) if isinstance(out, list | tuple) else [out]
    return results[-1]


@pytest.fixture(scope="module")
def tables() -> JointGraph:
    return trace(user_request("tables"))


def test_every_buffer_is_computed_as_the_model_does(tables: JointGraph) -> None:
    module = find_factory(user_request("tables").model)()[0]
    found = {buffer.name: buffer for buffer in tables.buffers}
    assert set(found) == {"inv_freq", "mask", "positions", "waves", "slopes", "bends", "features", "table"}
    for name, buffer in found.items():
        assert buffer.first_value is not None, buffer.unknown
        if name != "features":
            wanted = module.get_buffer(name)
            value = computed(buffer.first_value)
            assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape) and torch.equal(value, wanted), name


def test_random_numbers_are_drawn_by_their_rule(tables: JointGraph) -> None:
    (features,) = (buffer for buffer in tables.buffers if buffer.name == "features")
    assert features.first_value is not None
    assert [(step.op, step.args) for step in features.first_value] == [("drawn", ("normal", 0.0, 0.25, (32, 32)))]


def test_persistent_as_the_model_says_and_saved_with_the_graph(tables: JointGraph) -> None:
    assert {buffer.name for buffer in tables.buffers if not buffer.persistent} == {"inv_freq", "positions"}
    assert JointGraph.from_json(tables.to_json()).buffers == tables.buffers


def test_numbers_from_outside_are_carried_if_they_are_few() -> None:
    (few,) = trace(user_request("few_numbers")).buffers
    assert few.first_value is not None
    assert torch.equal(computed(few.first_value), find_factory(user_request("few_numbers").model)()[0].outside)
    (many,) = trace(user_request("many_numbers")).buffers
    assert many.first_value is None and "too many" in many.unknown


@pytest.mark.parametrize("precision", ["as-traced", "bf16-mixed"])
def test_written_buffers_have_an_update_in_their_own_dtype(precision: str) -> None:
    graph = trace(user_request("statistics", precision))
    updates = {buffer.name: buffer.update for buffer in graph.buffers}
    names = {"average", "steps", "last", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(updates) == names and all(updates.values())
    assert {graph.nodes[buffer.node].outputs[0].dtype for buffer in graph.buffers} == {"float32", "int64"}


def test_two_buffers_never_share_one_update() -> None:
    graph = trace(user_request("averaged"))
    updates = [buffer.update for buffer in graph.buffers]
    assert len(updates) == len(set(updates)) == 2


@pytest.mark.parametrize("factory", ["tables", "statistics", "averaged"])
def test_the_graph_computes_what_the_module_computes(factory: str) -> None:
    assert largest_error(user_request(factory)) < 1e-4
