"""The same graph at other sizes, without tracing again.

A decoder of each structure is traced once, all its sizes distinct primes: then every number of the graph that is a multiple of
one of them counts that size, to a power, and is replaced. Which cheap ops backward repeats was decided at the traced sizes; these
have the proportions of common models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from planner.accuracy.rows import Skip
from planner.graph import JointGraph, ModelRequest, Node, TensorMeta

FAMILY = "decoder"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a decoder and of its batch. Heads are `kv_heads * group`, the width is `heads * 2 * half_head`."""

    batch: int
    seq: int
    kv_heads: int
    group: int
    half_head: int
    ffn: int
    vocab: int

    def model(self, flags: str) -> str:
        """The name of the sample."""
        heads = self.kv_heads * self.group
        sizes = f"dim={2 * heads * self.half_head},heads={heads},kv_heads={self.kv_heads},ffn={self.ffn},vocab={self.vocab}"
        return f"{FAMILY}[{sizes}{',' if flags else ''}{flags}]"


GROUPED = Sizes(batch=131, seq=1031, kv_heads=13, group=17, half_head=37, ffn=57037, vocab=128021)
PLAIN = replace(GROUPED, kv_heads=229, group=1)
"""What is traced; all but a group of 1 are primes, and none divides a constant of the model."""


def parsed(model: str, batch: int, seq: int) -> tuple[Sizes, str]:
    """Sizes and flags (`gated=1,norm=rms`) of a decoder's name. Raises Skip for heads that the sample does not have."""
    written = dict(part.split("=") for part in model.removeprefix(f"{FAMILY}[").removesuffix("]").split(","))
    dim, heads, kv_heads, ffn, vocab = (int(written.pop(name)) for name in ("dim", "heads", "kv_heads", "ffn", "vocab"))
    if dim % (2 * heads) or heads % kv_heads:
        raise Skip("heads do not divide the width into even parts, or key-value heads the heads")
    sizes = Sizes(
        batch=batch, seq=seq, kv_heads=kv_heads, group=heads // kv_heads, half_head=dim // heads // 2, ffn=ffn, vocab=vocab
    )
    return sizes, ",".join(f"{name}={value}" for name, value in sorted(written.items()))


def traced_sizes(sizes: Sizes) -> Sizes:
    return PLAIN if sizes.group == 1 else GROUPED


def at_sizes(graph: JointGraph, sizes: Sizes, request: ModelRequest) -> JointGraph:
    """`graph` was traced at `traced_sizes(sizes)`; `request` is what the result is called. Scalars that the model divides by are
    left as traced."""
    before = traced_sizes(sizes)
    changes = {getattr(before, f.name): getattr(sizes, f.name) for f in fields(Sizes) if getattr(before, f.name) > 1}

    def size(value: int) -> int:
        return _replaced(value, changes)

    return replace(graph, request=request, nodes=tuple(_resized(node, size) for node in graph.nodes), symbols=())


def _replaced(value: int, changes: Mapping[int, int]) -> int:
    if value <= 1:
        return value
    factor = 1
    for prime, size in changes.items():
        while value % prime == 0:
            value //= prime
            factor *= size
    return value * factor


def _resized(node: Node, size: Callable[[int], int]) -> Node:
    outputs = tuple(None if m is None else TensorMeta(tuple(map(size, m.shape)), m.dtype) for m in node.outputs)
    return replace(
        node, outputs=outputs, args=_in_args(node.args, size), kwargs=_in_args(node.kwargs, size),
        flops=float(size(round(node.flops))),
    )  # fmt: skip


def _in_args(value: Any, size: Callable[[int], int]) -> Any:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_in_args(item, size) for item in value)
    return size(value) if isinstance(value, int) and not isinstance(value, bool) else value
