"""Dropout whose mask is a function of numbers, not of a random generator: (seed, step, layer, place in the layer, element).

`planner::dropout` is one op in the graph; its gradient is the same op on the gradient, so no mask is kept. Every device computes
its part of the same mask from the global position of its elements, whatever the mesh, and a layer that is recomputed drops the
same elements again. The numbers are mixed by a counter-based hash (multiply, shift, exclusive or on 32 bits; the constant is that
of C. Wellons' hash-prospector survey) in plain integer ops, which are exact on every device.

Importing this file registers the op with torch.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from planner import torch_compat
from planner.errors import TraceError
from planner.graph import layer_of
from planner.tracing import einsum
from planner.tracing.convert import Draft, JointDraft

OP = "planner.dropout.default"
OUTSIDE = -1
"""Number of the layer of dropouts outside the repeated layers."""

_LOW, _FACTOR, _STRIDE = 0xFFFFFFFF, 0x45D9F3B, 0x9E3779B1


# ---- the mask -----------------------------------------------------------------------------------------------------------
def layer_key(seed: int, step: int, layer: int) -> int:
    """32 bits for all dropouts of a layer in a step."""
    return int(hashlib.sha256(f"dropout:{seed}:{step}:{layer}".encode()).hexdigest()[:8], 16)


def _mixed(x: Tensor) -> Tensor:
    for _ in range(2):
        x = ((x ^ (x >> 16)) * _FACTOR) & _LOW
    return x ^ (x >> 16)


def kept(p: float, key: int, ordinal: int, positions: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """bool: which elements stay. `positions` are the global positions along each dim of a tensor of the global `shape`."""
    element = torch.zeros([1] * len(shape), dtype=torch.int64)
    for dim, (places, size) in enumerate(zip(positions, shape, strict=True)):
        element = element * size + places.view([-1 if d == dim else 1 for d in range(len(shape))])
    own = _mixed(torch.tensor((key + ordinal * _STRIDE) & _LOW))
    number = _mixed((element & _LOW) ^ own)
    number = _mixed((number + (element >> 32) * _STRIDE + own) & _LOW)
    return number >= round(p * 2**32)


def masked(x: Tensor, p: float, layer: int, ordinal: int) -> Tensor:
    """A whole tensor after the dropout at a place, in the first step with seed 0."""
    mask = kept(p, layer_key(0, 0, layer), ordinal, [torch.arange(size) for size in x.shape], x.shape)
    return torch.where(mask, x / (1 - p), torch.zeros((), dtype=x.dtype))


@torch.library.custom_op("planner::dropout", mutates_args=())
def dropout(x: Tensor, p: float, ordinal: int, site: int) -> Tensor:
    """`site` numbers the calls of a forward while it is traced; as it stands, the op is that of a place outside any layer."""
    return masked(x, p, OUTSIDE, ordinal)


@dropout.register_fake
def _shape(x: Tensor, p: float, ordinal: int, site: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, float, int, int], output: Tensor) -> None:
    ctx.call = inputs[1:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return dropout(gradient, *ctx.call), None, None, None


dropout.register_autograd(_backward, setup_context=_save)


# ---- in a captured graph ------------------------------------------------------------------------------------------------
def plain(x: Tensor, p: float, site: int) -> Tensor:
    return dropout(x, p, 0, site)


def in_place(x: Tensor, p: float, site: int) -> Tensor:
    return x.copy_(dropout(x, p, 0, site))


def of_channels(x: Tensor, p: float, site: int) -> Tensor:
    """Whole channels are dropped: x is [batch, channels, *space]."""
    ones = torch.ones([*x.shape[:2], *[1] * (x.dim() - 2)], dtype=x.dtype, device=x.device)
    return x * dropout(ones, p, 0, site)


def attention(site: int, *args: Any, **kwargs: Any) -> Tensor:
    return _written_out(lambda x, p: dropout(x, p, 0, site), *args, **kwargs)


def _written_out(
    drop: Callable[[Tensor, float], Tensor], query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention that drops probabilities: what the fused operator computes, with a mask that can be known."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = einsum.matmul(query, key.transpose(-2, -1)) * (scale if scale is not None else query.shape[-1] ** -0.5)
    if is_causal:
        rows, columns = (torch.arange(size, device=query.device) for size in scores.shape[-2:])
        scores = torch.where(columns <= rows.unsqueeze(-1), scores, -math.inf)
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return einsum.matmul(drop(torch.softmax(scores, -1), dropout_p), value)


_FUNCTIONAL = torch.nn.functional
_PLAIN = (_FUNCTIONAL.dropout, torch.dropout, torch.ops.aten.dropout.default)
_CHANNELS = (_FUNCTIONAL.dropout1d, _FUNCTIONAL.dropout2d, _FUNCTIONAL.dropout3d, torch.feature_dropout)


@dataclass(frozen=True)
class Call:
    """A call of a dropout that drops something, with its arguments read."""

    x: Any
    p: float
    in_place: bool
    of_channels: bool


def read_call(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """None if `target` is no dropout, or this one drops nothing."""
    if target not in (*_PLAIN, *_CHANNELS):
        return None
    by_function = target in (_FUNCTIONAL.dropout, *_CHANNELS[:3])
    names = ("input", "p", "training", "inplace") if by_function else ("input", "p", "train")
    given = {"p": 0.5, "training": True, "train": True, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
    if not given["p"] or not given["training"] or not given["train"]:
        return None
    return Call(given["input"], float(given["p"]), bool(given["inplace"]), target in _CHANNELS)


def drops_attention(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return target is _FUNCTIONAL.scaled_dot_product_attention and bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def replace_dropouts(captured: fx.GraphModule) -> None:
    """Give each dropout of a captured forward its number, in the order of the calls."""
    site = 0
    for node in torch_compat.nodes_in_order(captured):
        if node.op != "call_function":
            continue
        call = read_call(node.target, node.args, node.kwargs)
        if call is not None:
            node.target = of_channels if call.of_channels else in_place if call.in_place else plain
            node.args, node.kwargs = (call.x, call.p, site), {}
            site += 1
        elif drops_attention(node.target, node.args, node.kwargs):
            node.target, node.args = attention, (site, *node.args)
            site += 1


def name_places(draft: JointDraft) -> tuple[tuple[int, int], ...]:
    """Replace the numbers of dropouts by places, which are alike in all layers: the layer is that of the module, the ordinal
    counts in it. Returns (layer, ordinal) of each call, in order; a call without use in the graph counts as outside."""
    drafts = [node for node in draft.op_drafts() if node.op == OP]
    forward: dict[int, Draft] = {}
    for node in drafts:
        forward.setdefault(node.args[3], node)
    count: Counter[int] = Counter()
    places: dict[int, tuple[int, int]] = {}
    for site in sorted(forward):
        layer = layer_of(forward[site].module)
        number = OUTSIDE if layer is None else layer
        places[site] = number, count[number]
        count[number] += 1
    for node in drafts:
        site = node.args[3]
        node.module, node.homeless, node.args = forward[site].module, False, (*node.args[:2], places[site][1])
    return tuple(places.get(site, (OUTSIDE, 0)) for site in range(max(forward, default=-1) + 1))


# ---- in the user's own module -------------------------------------------------------------------------------------------
class KnownMasks(TorchFunctionMode):
    """While active, dropouts of a module drop what the exported file drops in its first step with seed 0.

    `places` gives (layer, ordinal) of each call of a forward, in order; calls must not be repeated.
    """

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self._places = iter(places)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        call = read_call(func, args, kwargs)
        if call is None:
            drops = drops_attention(func, args, kwargs)
            return _written_out(self._drop(), *args, **kwargs) if drops else func(*args, **kwargs)
        drop, x = self._drop(), call.x
        if call.of_channels:
            return x * drop(torch.ones([*x.shape[:2], *[1] * (x.dim() - 2)]), call.p)
        return x.copy_(drop(x, call.p)) if call.in_place else drop(x, call.p)

    def _drop(self) -> Callable[[Tensor, float], Tensor]:
        place = next(self._places, None)
        if place is None:
            raise TraceError("the model calls dropout more often than when it was traced", hint="Plan the model again.")
        layer, ordinal = place
        return lambda x, p: masked(x, p, layer, ordinal)
