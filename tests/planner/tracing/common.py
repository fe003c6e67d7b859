"""Shared by the tracing tests: short requests, and the module's own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.graph import JointGraph, ModelRequest
from planner.tracing.loss import WithLoss
from planner.tracing.sources import find_factory, sizes_for
from planner.tracing.trace import LoadedModel, named_leaves, parts_of, trace
from tests.oracles.interpret import run

USER_MODELS = Path(__file__).with_name("user_models.py")


def user_request(factory: str, precision: str = "as-traced") -> ModelRequest:
    return ModelRequest(model=f"{USER_MODELS}:{factory}", precision=precision)


def line_of(comment: str) -> str:
    """`user_models.py:12` of the line that ends with this comment."""
    lines = USER_MODELS.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
    return f"user_models.py:{number}"


def largest_error(request: ModelRequest, graph: JointGraph | None = None) -> float:
    """Largest relative difference of loss and every gradient between the interpreted graph and the module with autograd."""
    torch.manual_seed(0)
    factory = find_factory(request.model)
    module, args, kwargs = parts_of(factory(**sizes_for(factory, request)), request.model)
    loaded = LoadedModel(module=module, args=args, kwargs=kwargs, parameters=())
    inputs: dict[str, Any] = {name: leaf for name, leaf in named_leaves(loaded) if isinstance(leaf, Tensor)}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            mean, std = (1.0, 0.3) if parameter.dim() == 1 else (0.0, parameter.shape[-1] ** -0.5)
            torch.nn.init.normal_(parameter, mean, std)
    graph = graph or trace(request)
    for given in graph.inputs:  # a factory's placeholders are all equal, which would hide mistakes
        if inputs[given.name].is_floating_point() and not inputs[given.name].any():
            inputs[given.name].normal_()
        if given.high is not None:
            inputs[given.name].copy_(torch.randint(0, given.high, inputs[given.name].shape))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # as they are before the step
    loss = WithLoss(module)(*args, **kwargs)
    loss.backward()
    parameters = {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
    found, gradients = run(graph, parameters, inputs, buffers)
    wanted = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert set(gradients) == set(wanted)
    floor = 1e-2 * max(float(grad.abs().max()) for grad in wanted.values())  # some gradients are zero but for rounding
    return max(_relative(found, loss, 0.0), *(_relative(gradients[name], grad, floor) for name, grad in wanted.items()))


def _relative(found: Tensor, wanted: Tensor, floor: float) -> float:
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(max(floor, 1e-30)))
