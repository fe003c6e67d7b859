"""How each op of the graph is written in an exported file, on local pieces: a registry from op name to text.

Most ops are shape-free: on pieces they are the same call. Ops with a size among their arguments get the local size; ops that
index along a split dim get a masked form. An op without an entry is written as it stands if it runs on whole copies, and is an
error otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.errors import ExportError
from planner.exporting.symbols import END, Sizes
from planner.graph import DtypeRef, Node, OperandRef, TensorMeta
from planner.placement import Partial, Placements, Replicate, Shard, text
from planner.plan import Choice


@dataclass(frozen=True, kw_only=True)
class Site:
    """One op about to be written.

    Attributes:
        node, tiny: the node at full and at tiny size (the same object if there is only one size).
        inputs, tiny_inputs: global shapes and dtypes of the operands at both sizes.
        names: the variable that holds each operand's local piece, None where the op reads no data.
        layout: gives the file's name of a layout.
        noise: key of the random numbers of the layer that the op belongs to, as text.
    """

    node: Node
    tiny: Node
    inputs: tuple[TensorMeta, ...]
    tiny_inputs: tuple[TensorMeta, ...]
    choice: Choice
    names: tuple[str | None, ...]
    sizes: Sizes
    layout: Callable[[Placements], str]
    noise: str = ""

    # ---- placements -------------------------------------------------------------------------------------------------
    @property
    def out(self) -> Placements:
        """Layout of output 0."""
        found = self.choice.outputs[0]
        assert found is not None
        return found

    def operand(self, slot: int) -> Placements:
        found = self.choice.operands[slot]
        assert found is not None
        return found

    def is_whole(self) -> bool:
        """All operands and outputs are copies: the local op is the global op."""
        every = [p for p in (*self.choice.operands, *self.choice.outputs) if p is not None]
        return all(isinstance(one, Replicate) for placements in every for one in placements)

    def axes(self, placements: Placements, dim: int) -> tuple[int, ...]:
        """Mesh axes that split `dim`, outermost first."""
        return tuple(axis for axis, one in enumerate(placements) if one == Shard(dim))

    def error(self, why: str) -> ExportError:
        node = self.node
        where = ", ".join(part for part in (f"module {node.module or '(top level)'}", node.source) if part)
        chosen = ", ".join("-" if p is None else text(p) for p in self.choice.operands)
        return ExportError(
            f"{node.op} ({where}) cannot be written on pieces laid out as {chosen}: {why}",
            hint=f"Pin {node.key} to a layout without splits, or add a lowering for {node.op}.",
        )

    # ---- text -------------------------------------------------------------------------------------------------------
    @property
    def args(self) -> tuple[str, ...]:
        return tuple(self.argument(a, b) for a, b in zip(self.node.args, self.tiny.args, strict=True))

    def arg(self, index: int) -> str:
        return self.argument(self.node.args[index], self.tiny.args[index])

    def kwargs(self, *skip: str) -> list[str]:
        tiny = dict(self.tiny.kwargs)
        kept = [(k, v) for k, v in self.node.kwargs if v is not None and k not in (*skip, *_IGNORED_KWARGS)]
        return [f"{name}={self.argument(value, tiny[name])}" for name, value in kept]

    def argument(self, full: Any, tiny: Any) -> str:
        if isinstance(full, OperandRef):
            name = self.names[full.index]
            assert name is not None, f"{self.node.key} does not read operand {full.index}"
            return name
        if isinstance(full, DtypeRef):
            return dtype_text(full.name)
        if isinstance(full, tuple):
            return f"[{', '.join(self.argument(a, b) for a, b in zip(full, tiny, strict=True))}]"
        if isinstance(full, bool) or full is None:
            return repr(full)
        if isinstance(full, int):
            return self.sizes.number(full, int(tiny))
        if isinstance(full, float):
            return self.sizes.real(full, float(tiny))
        if full != tiny:
            raise self.error(f"its argument {full!r} changes with the sizes ({tiny!r})")
        return repr(full)

    def local_shape(self, output: int = 0) -> str:
        """Shape of this rank's piece of an output, as text."""
        full, tiny = self.node.outputs[output], self.tiny.outputs[output]
        assert full is not None and tiny is not None
        return self.sizes.shape(full.shape, tiny.shape, self.choice.outputs[output])

    def local_size(self, slot: int, dim: int) -> str:
        full, tiny = self.inputs[slot].shape[dim], self.tiny_inputs[slot].shape[dim]
        return self.sizes.local(full, tiny, self.operand(slot), dim)

    def out_dtype(self) -> str:
        meta = self.node.outputs[0]
        assert meta is not None
        return dtype_text(meta.dtype)

    def number(self, full: Any) -> int:
        assert isinstance(full, int) and not isinstance(full, bool), full
        return full


_IGNORED_KWARGS = ("layout", "device", "pin_memory", "non_blocking")

Lowering = Callable[[Site], str]
LOWERINGS: dict[str, Lowering] = {}
"""op name -> how it is written. Filled once, by the decorators below."""


def lowering(*ops: str) -> Callable[[Lowering], Lowering]:
    def register(function: Lowering) -> Lowering:
        for op in ops:
            assert op not in LOWERINGS, op
            LOWERINGS[op] = function
        return function

    return register


def write_op(site: Site) -> str:
    """The call, as text. Raises ExportError naming op, module and source if there is no way to write it."""
    found = LOWERINGS.get(site.node.op)
    if found is not None:
        return found(site)
    if not site.is_whole():
        raise site.error("there is no lowering for this op")
    return call(f"torch.ops.{site.node.op}", site)


def call(function: str, site: Site) -> str:
    return f"{function}({', '.join([*site.args, *site.kwargs()])})"


def dtype_text(name: str) -> str:
    """Low precision is a name of the file, so that its check can compute everything in fp32."""
    return "LOWP" if name == "bfloat16" else f"torch.{name}"


# ---- ops that are the same call on pieces --------------------------------------------------------------------------
SAME_CALL = {
    "aten.add.Tensor": "torch.add", "aten.sub.Tensor": "torch.sub", "aten.mul.Tensor": "torch.mul",
    "aten.div.Tensor": "torch.div", "aten.add.Scalar": "torch.add", "aten.sub.Scalar": "torch.sub",
    "aten.mul.Scalar": "torch.mul", "aten.div.Scalar": "torch.div", "aten.rsub.Scalar": "torch.rsub",
    "aten.neg.default": "torch.neg", "aten.exp.default": "torch.exp", "aten.log.default": "torch.log",
    "aten.rsqrt.default": "torch.rsqrt", "aten.sqrt.default": "torch.sqrt", "aten.reciprocal.default": "torch.reciprocal",
    "aten.abs.default": "torch.abs", "aten.sign.default": "torch.sign", "aten.pow.Tensor_Scalar": "torch.pow",
    "aten.pow.Scalar": "torch.pow", "aten.pow.Tensor_Tensor": "torch.pow", "aten.cos.default": "torch.cos",
    "aten.sin.default": "torch.sin", "aten.tanh.default": "torch.tanh", "aten.sigmoid.default": "torch.sigmoid",
    "aten.relu.default": "torch.relu", "aten.silu.default": "aten.silu", "aten.silu_backward.default": "aten.silu_backward",
    "aten.gelu.default": "aten.gelu", "aten.gelu_backward.default": "aten.gelu_backward",
    "aten.threshold_backward.default": "aten.threshold_backward", "aten.tanh_backward.default": "aten.tanh_backward",
    "aten.sigmoid_backward.default": "aten.sigmoid_backward", "aten.maximum.default": "torch.maximum",
    "aten.minimum.default": "torch.minimum", "aten.clamp.default": "torch.clamp", "aten.clamp_min.default": "torch.clamp_min",
    "aten.where.self": "torch.where", "aten.where.ScalarSelf": "torch.where", "aten.where.ScalarOther": "torch.where",
    "aten.where.Scalar": "torch.where", "aten.masked_fill.Scalar": "torch.masked_fill",
    "aten.logical_not.default": "torch.logical_not", "aten.logical_and.default": "torch.logical_and",
    "aten.logical_or.default": "torch.logical_or", "aten.bitwise_and.Tensor": "torch.bitwise_and",
    "aten.bitwise_or.Tensor": "torch.bitwise_or", "aten.bitwise_not.default": "torch.bitwise_not",
    "aten.eq.Tensor": "torch.eq", "aten.eq.Scalar": "torch.eq", "aten.ne.Tensor": "torch.ne", "aten.ne.Scalar": "torch.ne",
    "aten.lt.Tensor": "torch.lt", "aten.lt.Scalar": "torch.lt", "aten.le.Tensor": "torch.le", "aten.le.Scalar": "torch.le",
    "aten.gt.Tensor": "torch.gt", "aten.gt.Scalar": "torch.gt", "aten.ge.Tensor": "torch.ge", "aten.ge.Scalar": "torch.ge",
    "aten.clone.default": "torch.clone", "aten.t.default": "torch.t", "aten.transpose.int": "torch.transpose",
    "aten.permute.default": "torch.permute", "aten.unsqueeze.default": "torch.unsqueeze", "aten.squeeze.dim": "torch.squeeze",
    "aten.squeeze.dims": "torch.squeeze", "aten.mm.default": "torch.mm",
    "aten.view_as_complex.default": "torch.view_as_complex", "aten.view_as_real.default": "torch.view_as_real",
    "aten._conj.default": "torch.conj", "aten.bmm.default": "torch.bmm",
    "aten.sum.default": "torch.sum", "aten.sum.dim_IntList": "torch.sum", "aten.amax.default": "torch.amax",
    "aten._softmax.default": "aten._softmax", "aten._log_softmax.default": "aten._log_softmax",
    "aten.erf.default": "torch.erf", "aten.log1p.default": "torch.log1p", "aten.expm1.default": "torch.expm1",
    "aten.exp2.default": "torch.exp2", "aten.log2.default": "torch.log2", "aten.atan.default": "torch.atan",
    "aten.sgn.default": "torch.sgn", "aten.floor.default": "torch.floor", "aten.lerp.Scalar": "torch.lerp",
    "aten.floor_divide.default": "torch.floor_divide", "aten.remainder.Scalar": "torch.remainder",
    "aten.isnan.default": "torch.isnan", "aten.bitwise_xor.Tensor": "torch.bitwise_xor",
    "aten.amin.default": "torch.amin", "aten.max.dim": "torch.max", "aten.min.dim": "torch.min", "aten.max.default": "torch.max",
    "aten.min.default": "torch.min", "aten.prod.dim_int": "torch.prod", "aten.argmax.default": "torch.argmax",
    "aten.argmin.default": "torch.argmin", "aten.any.dim": "torch.any", "aten.any.default": "torch.any",
    "aten.all.default": "torch.all", "aten.all.dim": "torch.all", "aten.cumsum.default": "torch.cumsum",
    "aten.cumprod.default": "torch.cumprod", "aten.logcumsumexp.default": "torch.logcumsumexp", "aten.topk.default": "torch.topk",
    "aten.sort.default": "torch.sort", "aten.flip.default": "torch.flip", "aten.roll.default": "torch.roll",
    "aten.repeat.default": "aten.repeat", "aten.constant_pad_nd.default": "aten.constant_pad_nd",
    "aten.diagonal.default": "torch.diagonal", "aten.diagonal_scatter.default": "torch.diagonal_scatter",
    "aten.unfold.default": "aten.unfold", "aten.bucketize.Tensor": "torch.bucketize",
    "aten.avg_pool2d.default": "aten.avg_pool2d", "aten.avg_pool2d_backward.default": "aten.avg_pool2d_backward",
    "aten.max_pool2d_with_indices.default": "aten.max_pool2d_with_indices",
    "aten.max_pool2d_with_indices_backward.default": "aten.max_pool2d_with_indices_backward",
    "aten._softmax_backward_data.default": "aten._softmax_backward_data",
    "aten._log_softmax_backward_data.default": "aten._log_softmax_backward_data",
}  # fmt: skip
"""Pointwise ops, permutations of dims, contractions and reductions: which dims may be split is the plan's business, and the
result on pieces is the piece (or the pending part) of the result."""


def _same_call(site: Site) -> str:
    return call(SAME_CALL[site.node.op], site)


for _op in SAME_CALL:
    LOWERINGS[_op] = _same_call


@lowering("planner.einsum.default")
def _einsum(site: Site) -> str:
    equation, *operands = site.args
    return f'torch.einsum("{equation[1:-1]}", {", ".join(operands)})'


@lowering("planner.expert_product.default")
def _expert_product(site: Site) -> str:
    axes = site.axes(site.operand(1), 0)
    return f"product_by_expert({', '.join([*site.args, *([str(axes)] if axes else [])])})"


@lowering("planner.expert_weight_grad.default")
def _expert_weight_grad(site: Site) -> str:
    a, b, index, _ = site.args
    full, tiny = site.node.outputs[0], site.tiny.outputs[0]
    assert full is not None and tiny is not None
    axes = site.axes(site.out, 0)
    count = site.sizes.local(full.shape[0], tiny.shape[0], site.out, 0)
    return f"weight_grad_by_expert({', '.join([a, b, index, count, *([str(axes)] if axes else [])])})"


@lowering("planner.dropout.default")
def _dropout(site: Site) -> str:
    """The mask is a function of the key and of global positions."""
    x, p, ordinal = site.args
    full, tiny = site.node.outputs[0], site.tiny.outputs[0]
    assert full is not None and tiny is not None
    return f"dropout({x}, {p}, {site.noise}, {ordinal}, {site.sizes.shape(full.shape, tiny.shape)}, {site.layout(site.out)})"


@lowering("aten._to_copy.default")
def _to_copy(site: Site) -> str:
    return f"{site.arg(0)}.to({site.out_dtype()})"


@lowering("aten._scaled_dot_product_flash_attention_for_cpu.default")
def _attention(site: Site) -> str:
    return call("sdpa_fwd", site)


@lowering("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def _attention_backward(site: Site) -> str:
    return call("sdpa_bwd", site)


# ---- ops with a size among their arguments -------------------------------------------------------------------------
@lowering("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
def _view(site: Site) -> str:
    return f"torch.reshape({site.arg(0)}, {site.local_shape()})"


@lowering("aten.expand.default")
def _expand(site: Site) -> str:
    return f"{site.arg(0)}.expand({site.local_shape()})"


@lowering("aten.slice.Tensor")
def _slice(site: Site) -> str:
    """A cut along a split dim is only right if it keeps everything."""
    x, dim, start, end, step = _slice_arguments(site.node)
    length = site.inputs[0].shape[dim]
    if start == 0 and end >= length and step == 1:
        return f"aten.alias({site.names[x]})"
    if site.axes(site.operand(0), dim):
        raise site.error(f"it cuts dim {dim}, which is split")
    _, _, tiny_start, tiny_end, _ = _slice_arguments(site.tiny)
    tiny_length = site.tiny_inputs[0].shape[dim]
    first = _bound(site, start, tiny_start, length, tiny_length)
    last = _bound(site, end, tiny_end, length, tiny_length)
    return f"aten.slice({site.names[x]}, {dim}, {first}, {last}{'' if step == 1 else f', {step}'})"


def _slice_arguments(node: Node) -> tuple[int, int, int, int, int]:
    """Operand index, dim, start, end, step with the operator's defaults; the dim counted from the front, no negative start."""
    given: tuple[Any, ...] = (*node.args, *(None, 0, None, None, 1)[len(node.args) :])
    x, dim, start, end, step = given
    assert isinstance(x, OperandRef) and node.outputs[0] is not None
    return x.index, dim % len(node.outputs[0].shape), start or 0, END if end is None else end, step


def _bound(site: Site, full: int, tiny: int, length: int, tiny_length: int) -> str:
    if full >= length and tiny >= tiny_length:
        return "END"
    return site.sizes.number(full, tiny)


@lowering("aten.slice_backward.default", "aten.select_backward.default")
def _slice_backward(site: Site) -> str:
    """The full (here: local) input sizes are the second argument; the cut dim must be whole."""
    dim = site.number(site.node.args[2]) % len(site.node.outputs[0].shape)  # type: ignore[union-attr]
    if site.axes(site.out, dim):
        raise site.error(f"it pads dim {dim}, which is split")
    args = site.args
    return f"{site.node.op.removesuffix('.default')}({', '.join([args[0], site.local_shape(), *args[2:]])})"


@lowering("aten.select.int")
def _select(site: Site) -> str:
    dim = site.number(site.node.args[1]) % len(site.inputs[0].shape)
    if site.axes(site.operand(0), dim):
        raise site.error(f"it selects from dim {dim}, which is split")
    return call("torch.select", site)


@lowering("aten.cat.default")
def _cat(site: Site) -> str:
    dim = (site.number(site.node.args[1]) if len(site.node.args) > 1 else 0) % len(site.inputs[0].shape)
    if site.axes(site.out, dim):
        raise site.error(f"it joins along dim {dim}, which is split")
    return call("torch.cat", site)


@lowering("aten.stack.default")
def _stack(site: Site) -> str:
    dim = (site.number(site.node.args[1]) if len(site.node.args) > 1 else 0) % len(site.node.outputs[0].shape)  # type: ignore[union-attr]
    if site.axes(site.out, dim):
        raise site.error(f"it stacks along dim {dim}, which is split")
    return call("torch.stack", site)


@lowering("aten.slice_scatter.default", "aten.select_scatter.default")
def _scatter_part(site: Site) -> str:
    dim = (site.number(site.node.args[2]) if len(site.node.args) > 2 else 0) % len(site.inputs[0].shape)
    if site.axes(site.out, dim):
        raise site.error(f"it writes a part of dim {dim}, which is split")
    return call(site.node.op.removesuffix(".default"), site)


# ---- ops that make tensors from nothing -----------------------------------------------------------------------------
@lowering("aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default", "aten.empty.memory_format",
          "aten.empty_like.default", "aten.new_empty.default", "aten.new_empty_strided.default")  # fmt: skip
def _zeros(site: Site) -> str:
    return f"torch.zeros({site.local_shape()}, dtype={site.out_dtype()}, device=DEVICE)"


@lowering("aten.ones.default", "aten.new_ones.default", "aten.ones_like.default")
def _ones(site: Site) -> str:
    return _filled(site, "1")


@lowering("aten.full.default", "aten.full_like.default", "aten.new_full.default")
def _full(site: Site) -> str:
    at = 2 if site.node.op == "aten.new_full.default" else 1
    return _filled(site, site.argument(site.node.args[at], site.tiny.args[at]))


@lowering("aten.scalar_tensor.default")
def _scalar_tensor(site: Site) -> str:
    return _filled(site, site.arg(0))


def _filled(site: Site, value: str) -> str:
    if any(one == Partial() for one in site.out) and value not in ("0", "0.0"):
        raise site.error("a constant is no pending sum")
    return f"torch.full({site.local_shape()}, {value}, dtype={site.out_dtype()}, device=DEVICE)"


@lowering("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def _arange(site: Site) -> str:
    if any(isinstance(one, Partial) for one in site.out):
        raise site.error("a range is no pending sum")
    whole = f"torch.arange({', '.join(site.args)}, dtype={site.out_dtype()}, device=DEVICE)"
    return f"piece({whole}, {site.layout(site.out)})" if site.axes(site.out, 0) else whole


# ---- reductions by the number of elements ---------------------------------------------------------------------------
@lowering("aten.mean.dim", "aten.mean.default")
def _mean(site: Site) -> str:
    """Over a split dim the pieces' sums are divided by the global count, so the pending sum adds up to the mean."""
    rank = len(site.inputs[0].shape)
    listed = site.node.args[1] if len(site.node.args) > 1 else None
    dims = [dim % rank for dim in listed] if listed else list(range(rank))
    if not any(site.axes(site.operand(0), dim) for dim in dims):
        return call("torch.mean", site)
    count = [site.sizes.number(site.inputs[0].shape[dim], site.tiny_inputs[0].shape[dim]) for dim in dims]
    return f"{call('torch.sum', site)} / ({'*'.join(count)})"


# ---- ops that index along a dim: masked where it is split -----------------------------------------------------------
@lowering("aten.embedding.default")
def _embedding(site: Site) -> str:
    axes = site.axes(site.operand(0), 0)
    weight, index = site.args[:2]
    return f"masked_embedding({weight}, {index}, {axes})" if axes else f"aten.embedding({weight}, {index})"


@lowering("aten.embedding_dense_backward.default")
def _embedding_backward(site: Site) -> str:
    axes = site.axes(site.out, 0)
    grad, index, _, padding_idx, by_frequency = site.args
    full, tiny = site.node.outputs[0], site.tiny.outputs[0]
    assert full is not None and tiny is not None
    length = site.sizes.local(full.shape[0], tiny.shape[0], site.out, 0)
    if not axes:
        if by_frequency != "False" and any(one == Partial() for one in site.out):
            raise site.error("gradients scaled by frequency need all indices")
        return f"aten.embedding_dense_backward({grad}, {index}, {length}, {padding_idx}, {by_frequency})"
    if by_frequency != "False":
        raise site.error("scaling by frequency is not written for a table that is split along its rows")
    padding = "" if padding_idx == "-1" else f", {padding_idx}"
    return f"masked_embedding_backward({grad}, {index}, {length}, {axes}{padding})"


@lowering("aten.gather.default")
def _gather(site: Site) -> str:
    x, dim, index = site.args[:3]
    axes = site.axes(site.operand(0), site.number(site.node.args[1]) % len(site.inputs[0].shape))
    return f"masked_gather({x}, {dim}, {index}, {axes})" if axes else f"torch.gather({x}, {dim}, {index})"


@lowering("aten.scatter.value", "aten.scatter.src", "aten.scatter_add.default")
def _scatter(site: Site) -> str:
    x, dim, index, value = site.args[:4]
    axes = site.axes(site.out, site.number(site.node.args[1]) % len(site.inputs[0].shape))
    function = site.node.op.split(".")[1]
    return (
        f"masked_{function}({x}, {dim}, {index}, {value}, {axes})" if axes else f"torch.{function}({x}, {dim}, {index}, {value})"
    )


@lowering("aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_put.default", "aten._unsafe_index_put.default")
def _index(site: Site) -> str:
    """Indexing with tensors of positions is the same on pieces if the indexed dims are whole."""
    listed = site.node.args[1]
    assert isinstance(listed, tuple)
    for dim, index in enumerate(listed):
        if isinstance(index, OperandRef) and site.axes(site.operand(0), dim):
            raise site.error(f"it indexes dim {dim}, which is split")
    return call(f"aten.{site.node.op.split('.')[1].removeprefix('_unsafe_')}", site)


# ---- convolutions: sizes of channels among the arguments ------------------------------------------------------------
@lowering("aten.convolution.default")
def _convolution(site: Site) -> str:
    *args, groups = site.args
    return f"aten.convolution({', '.join(args)}, {_groups(site, groups, 0)})"


@lowering("aten.convolution_backward.default")
def _convolution_backward(site: Site) -> str:
    args = list(site.args)
    if site.node.args[3]:
        args[3] = f"[{site.local_size(0, 1)}]"
    args[9] = _groups(site, args[9], 1)
    return f"aten.convolution_backward({', '.join(args)})"


def _groups(site: Site, groups: str, x: int) -> str:
    """Groups of a piece: if channels of a grouped convolution are split, every group is one channel."""
    return site.local_size(x, 1) if site.axes(site.operand(x), 1) and groups != "1" else groups
