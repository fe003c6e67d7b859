"""A joint graph executed node by node on whole tensors: the single-device truth for rules, plans and exported scripts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

import planner.tracing.einsum  # noqa: F401  registers planner::einsum
from planner.graph import DtypeRef, JointGraph, Node, OperandRef, layer_of
from planner.tracing.dropout import OP, OUTSIDE, masked


def run(
    graph: JointGraph, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by parameter name. `params` by any one of a parameter's names, `inputs` by input name."""
    values = run_all(graph, params, inputs, buffers)
    gradients = {p.name: values[p.gradient.node][p.gradient.output] for p in graph.parameters if p.gradient is not None}
    return values[graph.loss.node][graph.loss.output], gradients


def run_all(
    graph: JointGraph, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
) -> list[tuple[Any, ...]]:
    """Outputs of every node, by node number."""
    given: dict[int, Tensor] = {i.node: inputs[i.name] for i in graph.inputs}
    for parameter in graph.parameters:
        given[parameter.node] = next(params[name] for name in parameter.names if name in params)
    values: list[tuple[Any, ...]] = []
    with torch.no_grad():
        for index, node in enumerate(graph.nodes):
            operands = [values[ref.node][ref.output] for ref in node.operands]
            if index in given:
                out: tuple[Any, ...] = (given[index],)
            elif node.kind == "buffer":
                out = ((buffers or {})[node.key.removeprefix("buffer:")],)
            elif node.kind == "tangent":
                out = (torch.ones(()),)
            elif node.kind == "output":
                out = tuple(operands)
            else:
                out = run_node(node, operands)
            _check(node, out)
            values.append(out)
    return values


def run_node(node: Node, operands: list[Tensor]) -> tuple[Any, ...]:
    """Views become copies of the asked shape where strides would not allow a view."""
    args, kwargs = (_decode(part, operands) for part in (node.args, node.kwargs))
    if node.op in ("aten.view.default", "aten._unsafe_view.default"):
        return (operands[0].reshape(args[1]),)
    if node.op == OP:
        layer = layer_of(node.module)
        return (masked(*args[:2], OUTSIDE if layer is None else layer, args[2]),)
    result = resolve(node.op)(*args, **dict(kwargs))
    return tuple(result) if isinstance(result, list | tuple) else (result,)


def resolve(op: str) -> Any:
    """`aten.mul.Tensor` -> the operator."""
    return reduce(getattr, op.split("."), torch.ops)


def _decode(value: Any, operands: list[Tensor]) -> Any:
    if isinstance(value, OperandRef):
        return operands[value.index]
    if isinstance(value, DtypeRef):
        return getattr(torch, value.name)
    if isinstance(value, tuple):
        return [_decode(item, operands) for item in value]
    return value


def _check(node: Node, out: tuple[Any, ...]) -> None:
    for meta, value in zip(node.outputs, out, strict=True):
        if meta is not None:
            assert (tuple(value.shape), str(value.dtype)) == (meta.shape, f"torch.{meta.dtype}"), node.key
