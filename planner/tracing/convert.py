"""torch's joint graph -> drafts of plain nodes: the only translation of fx nodes.

A draft names its operands by object; numbers and keys come last (`arrange`, `assemble`). Tuples of outputs, detach, alias and
other identities are not nodes: a use points at (producer, output number).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from planner import torch_compat
from planner.errors import TraceError, UnsupportedOpError
from planner.graph import BACKWARD, FORWARD, DtypeRef, OperandRef, TensorMeta
from planner.region import REGION, REGION_BACKWARD
from planner.tracing.locate import source_line
from planner.tracing.loss import user_name
from planner.tracing.region import published

aten = torch.ops.aten

_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default})
_PLACE_KWARGS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_SUM_OF_GRADIENTS = "Gradient addition node"
MAX_CONSTANT = 64
"""Largest number of elements of a tensor written out in forward; more belongs in a buffer."""
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


@dataclass(eq=False, kw_only=True)
class Draft:
    """A node on its way: like `planner.graph.Node`, operands by object. Mutable, lives only inside tracing.

    `label` is the name of a leaf. `homeless`: no line of the user made it (a cast of the wrapper, a sum of gradients).
    """

    op: str
    kind: str
    phase: str
    operands: tuple[Use, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[TensorMeta | None, ...] = ()
    module: str = ""
    source: str = ""
    label: str = ""
    homeless: bool = False
    rematerialised: bool = False


Use = tuple[Draft, int]
"""One tensor: a draft and the number of its output."""


@dataclass(kw_only=True)
class JointDraft:
    """Everything read off the fx graph, in its order: parameters, buffers, inputs, forward, output, tangent, backward."""

    leaves: list[Draft] = field(default_factory=list)
    forward: list[Draft] = field(default_factory=list)
    backward: list[Draft] = field(default_factory=list)
    parameters: dict[str, Draft] = field(default_factory=dict)
    buffers: dict[str, Draft] = field(default_factory=dict)
    inputs: dict[int, Draft] = field(default_factory=dict)
    tangent: Draft | None = None
    loss: Use | None = None
    gradients: dict[str, Use] = field(default_factory=dict)
    updates: dict[str, Use] = field(default_factory=dict)
    """Buffer -> the value that the step leaves in it."""
    detached: set[Use] = field(default_factory=set)

    def op_drafts(self) -> list[Draft]:
        return self.forward + self.backward


def read_joint(joint: fx.GraphModule) -> JointDraft:
    """Raises TraceError or UnsupportedOpError for what a plan could not execute."""
    draft = JointDraft()
    where: dict[fx.Node, Use] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor):
            assert not node.users, "a number passed to forward is a constant of the graph"
        elif node.op == "placeholder":
            where[node] = (_read_leaf(node, draft), 0)
        elif node.op == "get_attr":
            where[node] = _read_constant(node, torch_compat.constant_value(joint, node), draft)
        elif node.op == "call_function":
            same = _same_tensor(node, where)
            if same is None:
                where[node] = (_read_op(node, where, draft), 0)
                continue
            where[node] = same
            if node.target is aten.detach.default and not torch_compat.is_backward(node):
                draft.detached.add(same)
    _read_outputs(joint.graph, where, draft)
    return draft


def _read_leaf(node: fx.Node, draft: JointDraft) -> Draft:
    kind, what = torch_compat.placeholder_role(node)
    leaf = Draft(op=kind, kind=kind, phase=BACKWARD if kind == "tangent" else FORWARD, outputs=_metas(node))
    if kind == "param":
        leaf.label = user_name(what)
        draft.parameters[leaf.label] = leaf
    elif kind == "buffer":
        leaf.label = user_name(what)
        draft.buffers[leaf.label] = leaf
    elif kind == "input":
        draft.inputs[what] = leaf
    else:
        leaf.label = "loss"
        draft.tangent = leaf
    if kind != "tangent":
        draft.leaves.append(leaf)
    return leaf


def _read_constant(node: fx.Node, value: Tensor, draft: JointDraft) -> Use:
    """A tensor written out in forward (`torch.tensor([0, 2])`, an index list): one `scalar_tensor` per number, stacked."""
    if value.numel() > MAX_CONSTANT or value.is_complex():
        raise TraceError(
            f"forward creates a constant tensor of shape {tuple(value.shape)} ({_place(node)})",
            hint="Register it as a buffer of the module, or compute it from torch.arange or torch.full.",
        )
    module, source = module_path(node), source_line(node.meta.get("stack_trace") or "")
    dtype = str(value.dtype).removeprefix("torch.")

    def add(op: str, args: tuple[Any, ...], operands: Sequence[Use], shape: tuple[int, ...], **kwargs: Any) -> Use:
        made = Draft(
            op=op, kind="op", phase=FORWARD, args=args, kwargs=tuple(kwargs.items()), operands=tuple(operands),
            outputs=(TensorMeta(shape, dtype),), module=module, source=source,
        )  # fmt: skip
        draft.forward.append(made)
        return made, 0

    numbers = [add("aten.scalar_tensor.default", (number,), (), (), dtype=DtypeRef(dtype)) for number in value.flatten().tolist()]
    if value.dim() == 0:
        return numbers[0]
    parts = tuple(OperandRef(index) for index in range(len(numbers)))
    flat = add("aten.stack.default", (parts,), numbers, (len(numbers),))
    return flat if value.dim() == 1 else add("aten.view.default", (OperandRef(0), tuple(value.shape)), [flat], tuple(value.shape))


def _same_tensor(node: fx.Node, where: dict[fx.Node, Use]) -> Use | None:
    """The tensor that `node` merely passes on, None if it computes something."""
    if torch_compat.is_getitem(node):
        source, number = node.args
        assert isinstance(source, fx.Node) and isinstance(number, int)
        return where[source][0], number
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if first is None:
        return None
    if node.target in _IDENTITIES:
        return where[first]
    if node.target is aten._to_copy.default and first.meta["val"].dtype == node.meta["val"].dtype:
        return where[first]  # only the device or layout was named
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1:
        return where[first]  # the derivative of a square
    if node.target is aten.slice.Tensor and first.meta["val"].shape == node.meta["val"].shape:
        return where[first]
    return None


def _read_op(node: fx.Node, where: dict[fx.Node, Use], draft: JointDraft) -> Draft:
    _refuse_unsupported(node)
    operands: list[Use] = []
    trace = node.meta.get("stack_trace") or ""
    source = source_line(trace)

    def encode(value: Any) -> Any:
        if isinstance(value, fx.Node):
            operands.append(where[value])
            return OperandRef(len(operands) - 1)
        if isinstance(value, list | tuple):
            return tuple(encode(item) for item in value)
        if isinstance(value, torch.dtype):
            return DtypeRef(str(value).removeprefix("torch."))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return None
        raise UnsupportedOpError(
            f"{node.target} takes a {type(value).__name__} ({_place(node)})",
            op=str(node.target), module=module_path(node), source=source_line(node.meta.get("stack_trace") or ""),
            hint="Write this step with tensors and numbers.",
        )  # fmt: skip

    op, args = _plain_form(node)
    made = Draft(
        op=op,
        kind="op",
        phase=BACKWARD if torch_compat.is_backward(node) else FORWARD,
        args=tuple(encode(arg) for arg in args),
        kwargs=tuple((name, encode(arg)) for name, arg in node.kwargs.items() if name not in _PLACE_KWARGS),
        outputs=_metas(node),
        module=module_path(node),
        source=source,
        homeless=not source or _SUM_OF_GRADIENTS in trace,
    )
    made.operands = tuple(operands)
    (draft.backward if made.phase == BACKWARD else draft.forward).append(made)
    return made


def _plain_form(node: fx.Node) -> tuple[str, tuple[Any, ...]]:
    """Operator name and arguments; a strided view of contiguous numbers in their order is an ordinary view, a region has the name
    that an exported file imports.

    Raises UnsupportedOpError for other strided views: they depend on how a tensor lies in memory, which a piece of it does not
    share.
    """
    if str(node.target) in (REGION, REGION_BACKWARD):
        return str(node.target), (published(str(node.args[0])), *node.args[1:])
    if node.target is not aten.as_strided.default:
        return str(node.target), tuple(node.args)
    made, source, offset = node.meta["val"], node.args[0].meta["val"], node.args[3] if len(node.args) > 3 else 0  # type: ignore[union-attr]
    if not offset and source.is_contiguous() and made.is_contiguous() and made.numel() == source.numel():
        return "aten.view.default", (node.args[0], node.args[1])
    raise UnsupportedOpError(
        f"{node.target} depends on how its operand lies in memory ({_place(node)})",
        op=str(node.target), module=module_path(node), source=source_line(node.meta.get("stack_trace") or ""),
        hint="Use view, reshape, unfold or indexing instead of as_strided.",
    )  # fmt: skip


def _read_outputs(graph: fx.Graph, where: dict[fx.Node, Use], draft: JointDraft) -> None:
    outputs: list[fx.Node | None] = []
    for kind, what, node in torch_compat.joint_outputs(graph):
        if kind == "mutation":
            assert node is not None
            written, name = what
            _read_update(written, name, node, where[node], draft)
        if kind == "gradient" and node is not None:
            draft.gradients[user_name(what)] = where[node]
        elif kind == "output":
            outputs.append(node)
    (loss,) = outputs
    assert loss is not None and _metas(loss)[0] is not None, "what is captured returns one scalar, see planner.tracing.loss"
    draft.loss = where[loss]


def _read_update(kind: str, name: str, node: fx.Node, new: Use, draft: JointDraft) -> None:
    """A buffer's new value. Parameters are changed by the optimizer alone, inputs by nobody."""
    name = user_name(name)
    if kind != "buffer":
        source = source_line(node.meta.get("stack_trace") or "")
        raise UnsupportedOpError(
            f"forward changes the {kind} {name} in place".replace("input ", "input") + (f" ({source})" if source else ""),
            op="copy_", module=name.rpartition(".")[0], source=source,
            hint="Use the out-of-place form and go on with its result; only buffers can be changed by a step.",
        )  # fmt: skip
    old = draft.buffers[name]
    if new == (old, 0):
        return
    if new[0].kind != "op" or any(new == other for other in draft.updates.values()):  # two buffers must not share a tensor
        copied = Draft(
            op="aten.clone.default", kind="op", phase=FORWARD, args=(OperandRef(0),), operands=(new,), outputs=old.outputs,
            module=name.rpartition(".")[0], source=source_line(node.meta.get("stack_trace") or ""),
        )  # fmt: skip
        draft.forward.append(copied)
        new = copied, 0
    draft.updates[name] = new


def _refuse_unsupported(node: fx.Node) -> None:
    target: Any = node.target
    reason, hint = "", ""
    if not torch_compat.is_operator(target):
        reason, hint = (
            "is not an ordinary operator",
            "Control flow and wrapped regions cannot be planned; write them as plain code.",
        )
    elif target.namespace in _COLLECTIVES:
        reason, hint = "communicates", "Give the model for a single device; the planner adds the communication."
    elif target._schema.is_mutable:
        reason, hint = "changes its argument in place", "Use the out-of-place form."
    elif torch.Tag.nondeterministic_seeded in target.tags and not _attention_without_dropout(node):
        reason, hint = "draws random numbers", "Only dropouts of torch.nn.functional can; set others to 0, or call .eval()."
    elif any(not isinstance(size, int) for shape in _shapes(node) for size in shape):
        reason, hint = "has a shape that depends on data", "Use operators whose output shape follows from the input shapes."
    if reason:
        raise UnsupportedOpError(
            f"{target} {reason} ({_place(node)})",
            op=str(target), module=module_path(node), source=source_line(node.meta.get("stack_trace") or ""), hint=hint,
        )  # fmt: skip


def _attention_without_dropout(node: fx.Node) -> bool:
    """Attention operators carry the tag of random ones, but draw nothing at dropout 0."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given == 0.0)


def _place(node: fx.Node) -> str:
    source = source_line(node.meta.get("stack_trace") or "")
    return f"in {module_path(node) or 'the top module'}" + (f", {source}" if source else "")


def _values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, list | tuple) else [value]


def _shapes(node: fx.Node) -> list[Sequence[Any]]:
    return [value.shape for value in _values(node) if isinstance(value, Tensor)]


def _metas(node: fx.Node) -> tuple[TensorMeta | None, ...]:
    return tuple(
        TensorMeta(tuple(int(size) for size in value.shape), str(value.dtype).removeprefix("torch."))
        if isinstance(value, Tensor)
        else None
        for value in _values(node)
    )


# ---- names of modules -------------------------------------------------------------------------------------------------
_GETATTR = re.compile(r"getattr\(([^(),]+), '([^']+)'\)")


def normal_path(raw: str) -> str:
    """`getattr(L['self'].layers, '0').wq` -> `layers.0.wq`"""
    path = raw
    while (changed := _GETATTR.sub(r"\1.\2", path)) != path:
        path = changed
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    return user_name(path.replace("_modules.", "").removeprefix("L.self").lstrip(".").removeprefix("_export_root."))


def module_path(node: fx.Node) -> str:
    stack = torch_compat.module_stack(node)
    return normal_path(stack[-1]) if stack else ""
