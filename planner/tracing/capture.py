"""Model -> joint forward/backward graph of torch operators. Nothing is allocated: tensors are fake, on the CPU.

Fake CPU, because CPU costs nothing and leaves the device to the exported script. Not the meta device: some losses have no
autograd there and their backward would vanish without an error.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner import torch_compat
from planner.tracing import decompositions, einsum

WRAPPER = "planner_traced_module"
"""Attribute under which the mixed-precision wrapper holds the user's module; stripped from names and paths."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A joint graph, and whether the user switched gradients off somewhere in forward."""

    graph: fx.Graph
    has_no_grad_region: bool


class MixedPrecision(nn.Module):
    """fp32 parameters, bf16 compute: floating parameters, buffers and inputs are cast, and the casts are part of the graph."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(WRAPPER, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = getattr(self, WRAPPER)
        state = {name: _to_bfloat16(p) for name, p in module.named_parameters()}
        state.update({name: _to_bfloat16(b) for name, b in module.named_buffers()})
        args, kwargs = torch.utils._pytree.tree_map(_to_bfloat16, (args, kwargs))
        return torch.func.functional_call(module, state, args, kwargs)


def _to_bfloat16(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64, torch.float16):
        return value.to(torch.bfloat16)
    return value


def capture_joint(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, precision: str) -> Captured:
    """`module` is changed: its parameters become fake tensors. Errors of torch pass through."""
    mode = torch_compat.fake_tensor_mode()
    make_fake(module, mode)
    args, kwargs = torch.utils._pytree.tree_map(lambda leaf: _fake_input(leaf, mode), (args, kwargs))
    traced = MixedPrecision(module) if precision == "bf16-mixed" else module
    captured = torch_compat.capture(traced, args, kwargs)
    keep_products_whole(captured)
    no_grad = any(torch_compat.switches_gradients(node.target) for node in captured.graph.nodes)
    graph = torch_compat.export_joint(captured, args, kwargs, decompositions.table())
    return Captured(graph=graph, has_no_grad_region=no_grad)


def make_fake(module: nn.Module, mode: Any) -> None:
    """Replace every parameter and buffer by a fake CPU tensor; tensors that are shared stay shared."""
    converted: dict[int, tuple[Tensor, Tensor]] = {}  # the original is kept alive, so that its id stays unique

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in converted:
            with mode:
                fake: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            converted[id(tensor)] = (tensor, fake)
        return converted[id(tensor)][1]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    held[name] = convert(tensor)  # type: ignore[assignment]


def _fake_input(leaf: Any, mode: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    with mode:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")


def keep_products_whole(captured: fx.GraphModule) -> None:
    """Replace linear, matmul and two-operand einsum in a captured forward by the one-op product."""
    for node in captured.graph.nodes:
        if node.op == "call_method" and node.target == "matmul":
            _replace_matmul(node)
        elif node.op != "call_function":
            continue
        elif torch_compat.is_linear(node.target):
            node.target = einsum.linear
        elif node.target in (torch.matmul, operator.matmul, torch.bmm, torch.mm):
            _replace_matmul(node)
        elif node.target is torch.einsum and isinstance(node.args[0], str):
            operands = node.args[1] if isinstance(node.args[1], list | tuple) else node.args[1:]
            if einsum.equation_fits(node.args[0], len(operands)):
                node.target, node.args = einsum.einsum, (node.args[0].replace(" ", ""), *operands)
    captured.recompile()


def _replace_matmul(node: fx.Node) -> None:
    values = [arg.meta.get("example_value", arg.meta.get("val")) if isinstance(arg, fx.Node) else None for arg in node.args]
    if len(values) == 2 and all(isinstance(v, Tensor) for v in values) and einsum.matmul_fits(*values):
        node.op, node.target = "call_function", einsum.matmul
