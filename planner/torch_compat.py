"""Every private torch API the planner relies on, one function each. Written for and checked with torch 2.13.

On an upgrade of torch this file is what to re-read: each function says what it expects. Used by `tracing` and `enumerating`.
"""

from __future__ import annotations

import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

# ---- tracing ----------------------------------------------------------------------------------------------------------


def fake_tensor_mode() -> Any:
    """A mode in which tensors have shape, dtype and device but no data. 2.13: `torch._subclasses.FakeTensorMode`."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


def dispatch_mode_class() -> type:
    """Base class for modes that see every operator call. 2.13: `torch.utils._python_dispatch.TorchDispatchMode`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def is_fake(tensor: torch.Tensor) -> bool:
    """2.13: `torch._subclasses.FakeTensor`."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_dtensor(value: Any) -> bool:
    """2.13: public `torch.distributed.tensor.DTensor`; plain builds have it too."""
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def distributed_wrapper(module: nn.Module) -> str:
    """Name of the wrapper of torch that makes a module distributed, "" if it is none. 2.13: DDP and both kinds of FSDP."""
    names = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
    return next(
        (kind.__name__ for kind in type(module).__mro__ if kind.__name__ in names and kind.__module__.startswith("torch.")), ""
    )


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor of any dtype. 2.13: public; numpy knows no bfloat16, so they are read as bytes."""
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """Forward of `module` as one graph of torch calls that keeps module paths, source lines and parameter names.

    2.13: the capture that `torch.export` uses; parameters come out under mangled names, `_restore_state_dict` undoes that.
    Its last step compares shapes with constraints of the caller. There are none here, and the guards it builds for that take a
    fifth of the time, so the step is left out.
    """
    from torch._dynamo import functional_export
    from torch.export._trace import _restore_state_dict

    with patch.object(functional_export, "_suggest_or_raise_constraint_violation", lambda *_, **__: None):
        captured = functional_export._dynamo_graph_capture_for_export(module)(*args, **kwargs)
    _restore_state_dict(module, captured)
    return captured


@contextmanager
def nothing_recomputed() -> Iterator[None]:
    """Activation checkpointing of a model only calls what it is given. For code that is imported while this is active.

    2.13: `torch.utils.checkpoint.checkpoint`, also behind `checkpoint_sequential`.
    """
    import torch.utils.checkpoint as checkpointing

    options = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    with patch.object(checkpointing, "checkpoint", call):
        yield


def nodes_in_order(captured: fx.GraphModule) -> Iterator[fx.Node]:
    """Nodes of a captured forward in the order in which they run, with those inside wrapped regions (activation checkpointing).

    2.13: a region is a graph module of its own, read by a `get_attr` node just before its call.
    """
    for node in list(captured.graph.nodes):
        inside = getattr(captured, str(node.target), None) if node.op == "get_attr" and "." not in str(node.target) else None
        if isinstance(inside, fx.GraphModule):
            yield from nodes_in_order(inside)
        yield node


def recompile(captured: fx.GraphModule) -> None:
    """Make the changes of a captured forward's graphs, wrapped regions too, take effect."""
    for part in captured.modules():
        if isinstance(part, fx.GraphModule):
            part.recompile()


def reset_capture() -> None:
    """Forget everything earlier captures left behind. 2.13: `torch._dynamo.reset`."""
    import torch._dynamo

    torch._dynamo.reset()


def export_joint(
    captured: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], decompositions: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """Forward and backward of `captured` as one graph of operators. 2.13: `aot_export_joint_with_descriptors`."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, captured, args, dict(kwargs), decompositions=dict(decompositions))
        return joint.graph_module


def decompositions(packets: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's own decompositions of these operators. 2.13: `torch._decomp.get_decompositions`."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(list(packets)))


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` on every leaf of nested tuples, lists and dicts. 2.13: `torch.utils._pytree`; None is a leaf."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Leaves in torch's order. 2.13: `torch.utils._pytree`."""
    from torch.utils import _pytree

    return list(_pytree.tree_leaves(tree))


def leaves_with_path(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys and positions down to the leaf, leaf) in torch's order. 2.13: `torch.utils._pytree`."""
    from torch.utils import _pytree

    for path, leaf in _pytree.tree_flatten_with_path(tree)[0]:
        yield tuple(str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part)))) for part in path), leaf


def storage_address(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, also on the meta device, where `data_ptr` is 0. 2.13: `_cdata`."""
    return int(tensor.untyped_storage()._cdata)


def is_operator(target: Any) -> bool:
    """An ordinary operator, not Python code or a higher-order one. 2.13: `torch._ops.OpOverload`."""
    return isinstance(target, torch._ops.OpOverload)


def registering_module(op: str) -> str:
    """Python module that registers the custom operator `space.name.overload`, "" if that is not known (a C++ library, `define`).

    2.13: `torch._library.custom_ops.OPDEFS` holds those made by the `torch.library.custom_op` decorator.
    """
    from torch._library import custom_ops

    space, name, _ = op.split(".")
    found = custom_ops.OPDEFS.get(f"{space}::{name}")
    return "" if found is None else str(found._init_fn.__module__)


def is_linear(target: Any) -> bool:
    """2.13: `F.linear` is a builtin, also reachable as `torch._C._nn.linear`; an exported program has the operator."""
    return target in (torch.nn.functional.linear, torch._C._nn.linear, torch.ops.aten.linear.default)


@dataclass(frozen=True, kw_only=True)
class LocalMapCall:
    """A call of a function wrapped by `local_map`, as a capture meets it: fake tensors and constants among the arguments."""

    function: Any
    in_placements: Any
    out_placements: Any
    in_grad_placements: Any
    device_mesh: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    mode: Any


@contextmanager
def local_maps_whole(read: Callable[[LocalMapCall], tuple[Callable[..., Any], str, bool]]) -> Iterator[None]:
    """During captures, a `local_map` call is one node: `read` gives the function to put there, its first argument, and whether
    the one tensor it returns in a list stands alone. Errors of `read` come out as they are.

    2.13: the capture has a variable for `local_map`, off by default, that traces into it; only its `_call_function` is replaced.
    """
    from torch._dynamo.variables import higher_order_ops as variables
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.lists import TupleVariable

    local_map, failed = variables.LocalMapWrappedHigherOrderVariable, []

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function, out, inside, grads, mesh, _, *given = (_python_value(arg) for arg in args)
        keywords = {name: _python_value(value) for name, value in kwargs.items()}
        found = LocalMapCall(
            function=function, in_placements=inside, out_placements=out, in_grad_placements=grads, device_mesh=mesh,
            arguments=tuple(given), keywords=keywords, mode=tx.fake_mode,
        )  # fmt: skip
        try:
            target, first, alone = read(found)
        except Exception as error:
            failed.append(error)
            raise
        proxies = [arg.as_proxy() for arg in args[6:] if arg.is_tensor()]
        made: Any = wrap_fx_proxy(tx, tx.output.create_proxy("call_function", target, (first, proxies), {}))
        return made.items[0] if alone else TupleVariable(list(made.items))

    with local_map.enable(), patch.object(local_map, "_call_function", call):
        try:
            yield
        except Exception:
            if failed:
                raise failed[0] from None
            raise


def _python_value(variable: Any) -> Any:
    """What stands behind a variable of the capture: a fake tensor, a function, a constant, a list of such. 2.13."""
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.lists import BaseListVariable

    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    if variable.is_tensor():
        return variable.as_proxy().node.meta["example_value"]
    if isinstance(variable, BaseListVariable):
        made = [_python_value(item) for item in variable.items]
        return tuple(made) if variable.python_type() is tuple else made
    if hasattr(variable, "fn"):
        return variable.fn
    try:
        return variable.as_python_constant()
    except NotImplementedError:
        return getattr(variable, "value", variable)


@contextmanager
def autograd_inside_operator() -> Iterator[None]:
    """Let a kernel of a custom operator record and run autograd, which the dispatcher switches off there.

    2.13: the dispatcher keeps what is switched off as a set of keys of the thread.
    """
    off = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradCPU", "AutogradOther", "ADInplaceOrView"):
        off = off.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off):
        yield


def is_placement(value: Any) -> bool:
    """Shard, Replicate or Partial of DTensor. 2.13: `torch.distributed.tensor.placement_types.Placement`."""
    from torch.distributed.tensor.placement_types import Placement

    return isinstance(value, Placement)


def switches_gradients(target: Any) -> bool:
    """A `torch.no_grad` region of the user. 2.13: a call of `_set_grad_enabled` or a higher-order operator around it."""
    return "set_grad_enabled" in str(target) or getattr(target, "__name__", "") == "_set_grad_enabled"


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def is_backward(node: fx.Node) -> bool:
    """2.13: the joint tracer marks nodes that ran inside autograd."""
    return bool(node.meta.get("autograd_backward")) or node.meta.get("partitioner_tag") == "is_backward"


def module_stack(node: fx.Node) -> list[str]:
    """Raw paths of the modules around a node, outermost first; a backward node has those of its forward op.

    2.13: two spellings of a path occur, `L['self'].layers.0` and `getattr(L['self'].layers, '0')`.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [path for path, _ in stack.values()]


def placeholder_role(node: fx.Node) -> tuple[str, Any]:
    """("param", name), ("buffer", name), ("input", position in the flattened call) or ("tangent", None).

    2.13: descriptors in `torch._functorch._aot_autograd.descriptors`.
    """
    from torch._functorch._aot_autograd import descriptors

    description = node.meta["desc"]
    if isinstance(description, descriptors.ParamAOTInput):
        return "param", description.target
    if isinstance(description, descriptors.BufferAOTInput):
        return "buffer", description.target
    if isinstance(description, descriptors.PlainAOTInput):
        return "input", description.idx
    if isinstance(description, descriptors.TangentAOTInput):
        return "tangent", None
    raise AssertionError(f"unknown role of a graph input: {description!r}")


def joint_outputs(graph: fx.Graph) -> Iterator[tuple[str, Any, fx.Node | None]]:
    """What a joint graph returns: ("output", position), ("gradient", parameter), ("mutation", (kind, name)), with the node.

    Gradients of inputs are left out. 2.13: mutated buffers come first and shift the position of the loss.
    """
    from torch._functorch._aot_autograd import descriptors

    (output,) = (node for node in graph.nodes if node.op == "output")
    for node, description in zip(output.args[0], output.meta["desc"], strict=True):
        if isinstance(description, descriptors.PlainAOTOutput):
            yield "output", description.idx, node
        elif isinstance(description, descriptors.GradAOTOutput):
            if isinstance(description.grad_of, descriptors.ParamAOTInput):
                yield "gradient", description.grad_of.target, node
        elif isinstance(description, descriptors.InputMutationAOTOutput):
            target = description.mutated_input
            is_buffer, is_parameter = (isinstance(target, t) for t in (descriptors.BufferAOTInput, descriptors.ParamAOTInput))
            kind = "buffer" if is_buffer else "parameter" if is_parameter else "input"
            yield "mutation", (kind, getattr(target, "target", "")), node
        else:
            yield "other", repr(description), node


def constant_value(joint: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """The tensor behind a `get_attr` node of a joint graph. 2.13: small tensors written out in forward, with real values.

    A fake one keeps its numbers in `constant`.
    """
    value = getattr(joint, str(node.target))
    known = getattr(value, "constant", None)
    return known if known is not None else value


def error_frames(error: BaseException) -> list[Any]:
    """Frames (filename, lineno) of the user's code that the capture was reading when it failed, outermost first.

    2.13: errors of the capture carry `real_stack`, a `traceback.StackSummary`.
    """
    return list(getattr(error, "real_stack", None) or [])


def error_summary(error: BaseException) -> str:
    """What went wrong, in one line: `add of shapes 8x16 and 7: ...`, `ValueError: ...`.

    2.13: the capture wraps the user's exception in a text of its own; unknown texts give their first line.
    """
    text = str(error)
    if "data-dependent" in text.lower() or type(error).__name__ == "DataDependentOutputException":
        return "what forward does depends on values of tensors"
    if type(error).__name__ == "DynamicOutputShapeException":
        return f"the output of {text.split(maxsplit=1)[0]} has a shape that depends on values of tensors"
    failed = re.search(
        r"call_(?:function|method) (?:<built-in \w+ )?([\w.]+).*?: got (\w+)\((['\"])(.*?)\3\)$", text, re.MULTILINE
    )
    if failed:
        shapes = [part.strip(" ,").replace(", ", "x") or "scalar" for part in re.findall(r"size=\(([^)]*)\)", failed[0])]
        return f"{failed[1]}{' of shapes ' + ' and '.join(shapes) if shapes else ''}: {failed[4]}"
    raised = re.search(r"raised exception (\w+)\((['\"]?)(.*?)\2\)$", text, re.MULTILINE)
    if raised:
        return f"{raised[1]}: {raised[3]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the tracer from printing its own account of an error that the planner reports. 2.13: logger names of torch."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._dynamo", "torch.fx")]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


# ---- DTensor's one-axis rules (enumerating) -----------------------------------------------------------------------------


def operator_by_name(name: str) -> Any:
    """`aten.mul.Tensor` -> the OpOverload. Raises AttributeError if this torch does not have it."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


@dataclass(frozen=True)
class DTensorRules:
    """DTensor's tables of sharding rules and a mesh of one axis and one device to ask them with.

    torch 2.13: `sharding_propagator.op_single_dim_strategy_funcs` (rows of one axis, no mesh needed) and the older
    `op_strategy_funcs`. A one-device mesh without backend makes every dim divisible, so evenness stays our own matter.
    """

    propagator: Any
    mesh: Any

    @classmethod
    def load(cls) -> DTensorRules:
        from torch.distributed.tensor._api import DTensor
        from torch.distributed.tensor.device_mesh import DeviceMesh

        return cls(DTensor._op_dispatcher.sharding_propagator, DeviceMesh("cpu", [0], _init_backend=False, _rank=0))

    def knows_one_axis(self, op: Any) -> bool:
        return op in self.propagator.op_single_dim_strategy_funcs

    def knows_many_axes(self, op: Any) -> bool:
        return op in self.propagator.op_strategy_funcs

    @staticmethod
    def tensor_meta(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """DTensor's TensorMeta of a contiguous tensor."""
        from torch.distributed.tensor._dtensor_spec import TensorMeta

        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * max(size, 1))
        return TensorMeta(torch.Size(shape), tuple(reversed(strides)) if shape else (), dtype)

    def one_axis_rows(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Any]]:
        """Rows of placements, outputs first, without the all-replicate row. Tensors in `args` are TensorMetas."""
        rows: list[list[Any]] = self.propagator.op_single_dim_strategy_funcs[op](op, args, kwargs)
        return rows

    def many_axes_rows(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operand: Any, placements: list[Any]
    ) -> list[list[Any]]:
        """Rows of a one-operand op with an older rule; `operand` (a sentinel in args) is offered one placement at a time,
        because the view family raises on some instead of leaving them out."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec
        from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy

        rows = []
        for placement in placements:
            offer = OpStrategy([OpSpec(DTensorSpec(self.mesh, (placement,), tensor_meta=operand))])
            offered = tuple(offer if arg is operand else arg for arg in args)
            schema = OpSchema(op, offered, kwargs, schema_info=self.propagator.op_to_schema_info.get(op))
            try:
                found = self.propagator.op_strategy_funcs[op](schema).strategies
            except (RuntimeError, KeyError, IndexError, AssertionError):  # DTensor refuses this placement of the operand
                continue
            for spec in found:
                inputs = list(spec.input_specs) if spec.input_specs is not None else [spec.output_spec]
                outputs = list(spec.output_specs) if isinstance(spec.output_specs, tuple) else [spec.output_specs]
                rows.append([s.placements[0] for s in (*outputs, *inputs)])
        return rows


def low_precision_as_float32() -> Any:
    """A context in which everything that asks for bfloat16 gets float32: the arithmetic of an exported file's --check.

    The dispatch mode sees casts and factories below autograd, whoever makes them.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Float32Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("dtype") is torch.bfloat16:
                kwargs["dtype"] = torch.float32
            return func(*args, **kwargs)

    return Float32Mode()


def placement_code(placement: Any) -> int | None:
    """DTensor placement (or placeholder) -> our code; None for what we do not plan with (strided shard, P(avg), P(min), ...)."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return 0
    if kind in ("Shard", "_ShardingPlaceholder"):
        return 3 + int(placement.dim)
    if kind == "Partial":
        return {"sum": 1, "max": 2}.get(placement.reduce_op)
    return None
