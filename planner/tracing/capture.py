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
from planner.tracing.dropout import replace_dropouts
from planner.tracing.loss import STAND_IN, WithLoss
from planner.tracing.region import RegionReader, stated_regions

LOW_PRECISION = torch.bfloat16
_MATMULS = (
    torch.matmul, operator.matmul, torch.bmm, torch.mm,
    torch.ops.aten.matmul.default, torch.ops.aten.bmm.default, torch.ops.aten.mm.default,
)  # fmt: skip
_WIDE = (torch.float32, torch.float64, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A joint graph, whether the user switched gradients off somewhere in forward, and whether its loss is the stand-in."""

    module: fx.GraphModule
    has_no_grad_region: bool
    has_stand_in_loss: bool


def capture_joint(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, precision: str) -> Captured:
    """`module` is changed: its parameters become fake tensors. Errors of torch pass through.

    In `bf16-mixed` the module runs with bf16 parameters, buffers and inputs; stored are the originals, and the casts between
    are part of the graph. Buffers that forward writes (running statistics) keep their dtype: in bf16 they would stand still.
    """
    regions = RegionReader(facts=stated_regions(module))
    module = WithLoss(module)
    mode = torch_compat.fake_tensor_mode()
    mixed = precision == "bf16-mixed"
    written = written_buffers(module, args, kwargs) if mixed else frozenset()
    originals = make_fake(module, mode, low=mixed, keep=written)
    wide = torch_compat.tree_map(lambda leaf: _fake_input(leaf, mode), (args, kwargs))
    with mode:
        args, kwargs = torch_compat.tree_map(_lowered, wide) if mixed else wide
    with torch_compat.local_maps_whole(regions.read):
        captured = torch_compat.capture(module, args, kwargs)
    replace_dropouts(captured)
    keep_products_whole(captured)
    torch_compat.recompile(captured)
    if mixed:
        args, kwargs = wide
        cast_stored_tensors(captured, originals)
        cast_inputs(captured, args, kwargs)
    no_grad = any(torch_compat.switches_gradients(node.target) for node in captured.graph.nodes)
    joint = torch_compat.export_joint(captured, args, kwargs, decompositions.table())
    stand_in = any(STAND_IN in path for node in captured.graph.nodes for path in torch_compat.module_stack(node))
    return Captured(module=joint, has_no_grad_region=no_grad, has_stand_in_loss=stand_in)


def written_buffers(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
    """Ids of the floating-point buffers that forward writes, found by running it once as it stands, on fake tensors.

    Where that fails, all of them: the capture will say what is wrong.
    """
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.dtype in _WIDE}
    if not buffers:
        return frozenset()
    mode = torch_compat.fake_tensor_mode()
    every = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with mode, torch.no_grad():
        fakes = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu") for name, t in every.items()}
        args, kwargs = torch_compat.tree_map(lambda leaf: _fake_input(leaf, mode), (args, kwargs))
        try:
            with _Writes() as writes:
                torch.func.functional_call(module, fakes, args, kwargs)
        except Exception:
            return frozenset(id(buffer) for buffer in buffers.values())
    return frozenset(
        id(buffer) for name, buffer in buffers.items() if torch_compat.storage_address(fakes[name]) in writes.storages
    )


_DISPATCH: Any = torch_compat.dispatch_mode_class()


class _Writes(_DISPATCH):
    """Notes the storages that operators write. Batch norms do not say in their schema that they write running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            tensor = given.get(argument.name)
            declared = argument.alias_info is not None and argument.alias_info.is_write
            statistics = argument.name in ("running_mean", "running_var") and bool(given.get("training", True))
            if isinstance(tensor, Tensor) and (declared or statistics):
                self.storages.add(torch_compat.storage_address(tensor))
        return func(*args, **(kwargs or {}))


def make_fake(module: nn.Module, mode: Any, *, low: bool, keep: frozenset[int] = frozenset()) -> dict[int, Tensor]:
    """Replace every parameter and buffer by a fake CPU tensor, in bf16 if `low` and its id is not in `keep`; tensors that are
    shared stay shared.

    Returns, by id of the tensor now in the module, a fake tensor of the original dtype.
    """
    converted: dict[int, tuple[Tensor, Tensor]] = {}  # the original is kept alive, so that its id stays unique
    originals: dict[int, Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in converted:
            with mode:
                wide: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                used = _lowered(wide) if low and id(tensor) not in keep else wide
            if isinstance(tensor, nn.Parameter):
                wide, used = (nn.Parameter(fake, requires_grad=tensor.requires_grad) for fake in (wide, used))
            converted[id(tensor)] = (tensor, used)
            originals[id(used)] = wide
        return converted[id(tensor)][1]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    held[name] = convert(tensor)  # type: ignore[assignment]
    return originals


def _lowered(value: Any) -> Any:
    return value.to(LOW_PRECISION) if isinstance(value, Tensor) and value.dtype in _WIDE else value


def _fake_input(leaf: Any, mode: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    with mode:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")


def cast_stored_tensors(captured: fx.GraphModule, originals: dict[int, Tensor]) -> None:
    """Give a module captured in bf16 its original parameters and buffers, with a cast after each read."""
    lowered = {
        name: tensor
        for name, tensor in (*captured.named_parameters(remove_duplicate=False), *captured.named_buffers(remove_duplicate=False))
        if originals[id(tensor)].dtype != tensor.dtype
    }
    for name, tensor in lowered.items():
        owner, _, attribute = name.rpartition(".")
        setattr(captured.get_submodule(owner), attribute, originals[id(tensor)])
    for node in list(captured.graph.nodes):
        if node.op == "get_attr" and node.target in lowered:
            _insert_cast(node)
    captured.recompile()


def cast_inputs(captured: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    leaves = torch_compat.tree_leaves((args, kwargs))
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(leaves), "a captured graph has one placeholder per leaf of the call"
    for node, leaf in zip(placeholders, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.dtype in _WIDE:
            _insert_cast(node)
    captured.recompile()


def _insert_cast(node: fx.Node) -> None:
    last = node
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    with node.graph.inserting_after(last):
        cast = node.graph.call_method("to", (node, LOW_PRECISION))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def keep_products_whole(captured: fx.GraphModule) -> None:
    """Replace linear, matmul and two-operand einsum in a captured forward by the one-op product."""
    for node in torch_compat.nodes_in_order(captured):
        if node.op == "call_method" and node.target == "matmul":
            _replace_matmul(node)
        elif node.op != "call_function":
            continue
        elif torch_compat.is_linear(node.target):
            node.target = einsum.linear
        elif node.target in _MATMULS:
            _replace_matmul(node)
        elif node.target in (torch.einsum, torch.ops.aten.einsum.default) and isinstance(node.args[0], str):
            operands = node.args[1] if isinstance(node.args[1], list | tuple) else node.args[1:]
            if einsum.equation_fits(node.args[0], len(operands)):
                node.target, node.args = einsum.product, (node.args[0].replace(" ", ""), *operands)


def _replace_matmul(node: fx.Node) -> None:
    if len(node.args) != 2 or node.kwargs:
        return
    a, b = (arg.meta.get("example_value", arg.meta.get("val")) if isinstance(arg, fx.Node) else None for arg in node.args)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and einsum.matmul_fits(a, b):
        node.op, node.target = "call_function", einsum.matmul
