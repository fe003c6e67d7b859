"""The truth that exported scripts are compared with: the user's own module, plain autograd, one process, float32.

    python -m planner.tracing.reference REQUEST.json VALUES.pt OUT.pt

REQUEST.json holds `{"request": ModelRequest, "dropouts": JointGraph.dropouts}`, VALUES.pt `{"parameters": T, "buffers": T,
"inputs": T}`, OUT.pt receives `{"loss": tensor, "grads": T, "buffers": T}`, the buffers after the step; T = {name: tensor}. Runs
the user's code, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from planner.errors import PlannerError, TraceError
from planner.graph import ModelRequest
from planner.torch_compat import low_precision_as_float32, nothing_recomputed
from planner.tracing.dropout import KnownMasks
from planner.tracing.init_rules import InitRecorder
from planner.tracing.loss import WithLoss
from planner.tracing.sources import find_factory, sizes_for
from planner.tracing.trace import LoadedModel, named_leaves, parts_of


@dataclass(frozen=True, kw_only=True)
class _Loaded(LoadedModel):
    """`drawn_buffers`: names of those whose values are random, or were never made."""

    drawn_buffers: frozenset[str]


def reference_step(
    request: ModelRequest, values: Mapping[str, Mapping[str, Tensor]], dropouts: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    """Loss and gradients of the module with the given parameters and inputs, computed in float32. A module that returns no loss
    gets the stand-in of its graph.

    Raises:
        TraceError: the model has other parameters, or buffers that start otherwise, than the values.
    """
    with nothing_recomputed():
        return _step(_load(request), values, dropouts)


def _step(loaded: _Loaded, values: Mapping[str, Mapping[str, Tensor]], dropouts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    module = loaded.module.float()
    _set_parameters(module, values["parameters"])
    _compare_buffers(module, values["buffers"], loaded.drawn_buffers)
    args, kwargs = _with_inputs(loaded, values["inputs"])
    with low_precision_as_float32(), KnownMasks(dropouts):
        loss = WithLoss(module)(*args, **kwargs)
        loss.backward()
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "grads": grads, "buffers": {name: module.get_buffer(name) for name in values["buffers"]}}


def _load(request: ModelRequest) -> _Loaded:
    factory = find_factory(request.model)
    recorder = InitRecorder()
    with torch.device("cpu"), recorder:
        module, args, kwargs = parts_of(factory(**sizes_for(factory, request)), request.model)
    buffers = dict(module.named_buffers())
    random = {name for name, buffer in buffers.items() if recorder.rule(buffer).kind in ("normal", "uniform")}
    random |= {name for name, buffer in buffers.items() if buffer.is_meta}
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        kept = {name: buffer.clone() for name, buffer in buffers.items() if not buffer.is_meta}
        module.to_empty(device="cpu")
        for name, value in kept.items():
            module.get_buffer(name).copy_(value)
    return _Loaded(module=module, args=args, kwargs=kwargs, parameters=(), drawn_buffers=frozenset(random))


def _compare_buffers(module: nn.Module, values: Mapping[str, Tensor], drawn: frozenset[str]) -> None:
    """Buffers that the model draws at random, or makes without values, get those of the file; others must be equal to them."""
    for name, value in values.items():
        own = module.get_buffer(name)
        if name in drawn:
            own.copy_(value)
        elif own.shape != value.shape or not torch.allclose(own, value.to(own.dtype), rtol=1e-6, atol=1e-8, equal_nan=True):
            raise TraceError(
                f"the exported file computes another first value of the buffer {name} than the model",
                hint="Build the buffer with torch operators from the factory's arguments alone.",
            )


def _set_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    own = dict(module.named_parameters())
    if set(own) != set(values):
        raise TraceError(
            f"the model's parameters are not those of the plan: {', '.join(sorted(set(own) ^ set(values)))}",
            hint="The model changed since it was planned; plan it again.",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(values[name])


def _with_inputs(loaded: LoadedModel, inputs: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, structure = pytree.tree_flatten((loaded.args, loaded.kwargs))
    leaves = [inputs[name] if isinstance(leaf, Tensor) else leaf for name, leaf in named_leaves(loaded)]
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return args, kwargs


def main(argv: list[str]) -> int:
    request_file, values_file, out_file = map(Path, argv)
    torch.set_num_threads(1)
    try:
        asked = json.loads(request_file.read_text())
        values = torch.load(values_file, weights_only=True)
        torch.save(reference_step(ModelRequest.from_json(asked["request"]), values, asked["dropouts"]), out_file)
    except PlannerError as error:
        print(error.explain(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
