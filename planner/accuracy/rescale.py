"""The same graph at another batch, without tracing again.

The graph is traced at a prime number of sequences that no other size of the model is a multiple of. So every size and every
argument that is a multiple of it counts sequences, and is replaced. Work of an op is proportional to the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from planner.graph import JointGraph, Node, TensorMeta

PRIME = 9973


def with_batch(graph: JointGraph, batch: int) -> JointGraph:
    """`graph` was traced at PRIME sequences. Scalars that the model divides by (a mean's count) are left as traced."""
    assert graph.request.batch == PRIME, "trace at a batch of PRIME"

    def size(value: int) -> int:
        return value // PRIME * batch if value and value % PRIME == 0 else value

    nodes = tuple(_resized(node, size, batch / PRIME) for node in graph.nodes)
    return replace(graph, request=replace(graph.request, batch=batch), nodes=nodes, symbols=())


def _resized(node: Node, size: Callable[[int], int], ratio: float) -> Node:
    outputs = tuple(None if m is None else TensorMeta(tuple(map(size, m.shape)), m.dtype) for m in node.outputs)
    return replace(
        node, outputs=outputs, args=_in_args(node.args, size), kwargs=_in_args(node.kwargs, size), flops=node.flops * ratio
    )


def _in_args(value: Any, size: Callable[[int], int]) -> Any:
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_in_args(item, size) for item in value)
    return size(value) if isinstance(value, int) and not isinstance(value, bool) else value
