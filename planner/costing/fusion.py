"""Which tensors pointwise kernels really read and write, when a compiler fuses neighbours. From the graph alone.

Neighbouring pointwise and reduction ops of one phase with no matmul, attention or other kernel of its own between them form
one group; neighbours are producer and consumer, or two of one shape that read the same tensor. Per group each distinct outside
tensor is read once (charged to its first reader), each tensor that somebody outside needs is written once, and one kernel is
launched (charged to the first member). Tensors inside a group are free.

The grouping does not depend on the plan: a redistribution inside a group would split it and pay twice. So this is a lower
bound on what a compiled program moves, and it keeps the objective linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph import BACKWARD, JointGraph, TensorRef
from planner.strategy import StrategySpace

TABLE_OPERAND = {
    "aten.embedding.default": 0,
    "aten.gather.default": 0,
    "aten.index_select.default": 0,
    "aten.index.Tensor": 0,
    "aten._unsafe_index.Tensor": 0,
}
"""Ops that read as many bytes of this operand as they write, not the whole of it."""

UPDATE_OPS = frozenset({
    "aten.scatter_add.default", "aten.index_add.default", "aten.index_put.default", "aten.scatter.src", "aten.scatter.value",
    "aten._unsafe_index_put.default",
})  # fmt: skip
"""Ops that change some elements of operand 0, in place: they read and write as much as their last operand holds."""

OWN_KERNEL = UPDATE_OPS | {
    "aten.embedding_dense_backward.default", "aten.sort.default", "aten.topk.default", "aten.cumsum.default",
}  # fmt: skip
"""Ops priced by their bytes that a compiler does not fuse with their neighbours."""

PART_VIEWS = frozenset({"aten.slice.Tensor", "aten.select.int"})


@dataclass(frozen=True)
class Traffic:
    """What one node is charged for.

    Attributes:
        reads: per edge operand the share of its local bytes, 0 if another member of the group has read it.
        writes: per output how many times its local bytes move (rows taken from a table are read and written: 2).
        launches: 1 for the first member of a group, else 0.
        joins_others: an op that could be kept instead (`JointGraph.kept_from`) is part of a larger group: without it the others
            still need its kernel, and what it reads.
    """

    reads: tuple[float, ...]
    writes: tuple[float, ...]
    launches: int
    joins_others: bool = False


NO_TRAFFIC = Traffic((), (), 0)


def fused_traffic(space: StrategySpace, *, compiled: bool = True) -> tuple[Traffic, ...]:
    """Per node; NO_TRAFFIC for nodes that are not pointwise. Without a compiler only the parts of one call that PyTorch has a
    kernel for (a norm, a softmax) are one kernel: nodes of one line of the user's in one module fuse, others do not."""
    graph = space.graph
    roles = [_role(node.op, strategies.kernel.kind) for node, strategies in zip(graph.nodes, space.strategies, strict=True)]
    slots = [strategies.operand_slots for strategies in space.strategies]
    sources = _Sources(graph, roles)
    groups = _groups(graph, roles, slots, sources, across_calls=compiled)
    outside = _read_outside(graph, roles, slots, groups, sources)
    members = Counter(groups)
    seen: set[tuple[int, TensorRef]] = set()
    launched: set[int] = set()
    found = []
    for index, node in enumerate(graph.nodes):
        if roles[index] not in ("fused", "own"):
            found.append(NO_TRAFFIC)
            continue
        charged = []
        for slot in slots[index]:
            ref = node.operands[slot]
            key = (groups[index], sources.identity(ref))
            charged.append(groups[sources.root(ref).node] != groups[index] and key not in seen)
            seen.add(key)
        reads = [sources.share(node.operands[slot]) * c for slot, c in zip(slots[index], charged, strict=True)]
        writes = [float(TensorRef(index, output) in outside) for output in range(len(node.outputs))]
        if node.op in TABLE_OPERAND and charged[TABLE_OPERAND[node.op]]:
            reads[TABLE_OPERAND[node.op]] = 0.0
            writes[0] += 1
        elif node.op in UPDATE_OPS:
            reads = [0.0, *reads[1:-1], 2.0]
            writes[0] = 0.0
        joins = index in graph.kept_from and members[groups[index]] > 1
        found.append(Traffic(tuple(reads), tuple(writes), int(groups[index] not in launched), joins))
        launched.add(groups[index])
    return tuple(found)


def _role(op: str, kind: str) -> str:
    """`fused`, `own` (a kernel by itself, by bytes), `view`, `leaf` or `barrier` (matmul, attention)."""
    if kind in ("pointwise", "factory"):
        return "own" if op in OWN_KERNEL else "fused"
    return kind if kind in ("view", "leaf") else "barrier"


class _Sources:
    """Tensors behind views."""

    def __init__(self, graph: JointGraph, roles: Sequence[str]) -> None:
        self.graph, self.roles = graph, roles

    def root(self, ref: TensorRef) -> TensorRef:
        """The tensor that a chain of views starts from."""
        while self.roles[ref.node] == "view":
            ref = self.graph.nodes[ref.node].operands[0]
        return ref

    def identity(self, ref: TensorRef) -> TensorRef:
        """Equal for views of the same bytes; different parts of one tensor differ."""
        while self.roles[ref.node] == "view" and self.graph.nodes[ref.node].op not in PART_VIEWS:
            ref = self.graph.nodes[ref.node].operands[0]
        return ref

    def share(self, ref: TensorRef) -> float:
        """Bytes of memory behind a tensor over its own bytes: under 1 where a view repeats elements."""
        behind = self.graph.meta(self.identity(ref)).num_elements
        return min(1.0, behind / max(self.graph.meta(ref).num_elements, 1))


def _levels(graph: JointGraph, roles: Sequence[str], slots: Sequence[tuple[int, ...]]) -> list[int]:
    """Number of kernels of their own on the longest way to each node inside its phase.

    Nodes with no such kernel before them (casts of parameters, masks, rotary tables, derivatives that need only saved tensors)
    may run any time in their phase: they get the level of their earliest user. Two nodes of one level and phase have no such
    kernel on any way between them, so merging them makes no cycle.
    """
    level = [0] * len(graph.nodes)
    early = [True] * len(graph.nodes)
    reached = 0
    start: dict[str, int] = {}  # a checkpointed layer is repeated when backward has come to it
    for index, node in enumerate(graph.nodes):
        early[index] = roles[index] in ("fused", "view", "leaf")
        if (layer := graph.repeated_layer(node)) is not None:
            level[index] = start.setdefault(layer, reached)
        for slot in slots[index]:
            producer = node.operands[slot].node
            if graph.nodes[producer].phase == node.phase:
                own = roles[producer] in ("own", "barrier")
                level[index] = max(level[index], level[producer] + own)
                early[index] &= early[producer] and not own
        if node.phase == BACKWARD:
            reached = max(reached, level[index])
    for index in range(len(graph.nodes) - 1, -1, -1):
        if early[index] and roles[index] in ("fused", "view"):
            of_users = [
                level[user]
                for output in range(len(graph.nodes[index].outputs))
                for user, slot in graph.users.get(TensorRef(index, output), ())
                if slot in slots[user] and graph.nodes[user].phase == graph.nodes[index].phase
            ]
            level[index] = min(of_users, default=level[index])
    return level


def _groups(
    graph: JointGraph, roles: Sequence[str], slots: Sequence[tuple[int, ...]], sources: _Sources, *, across_calls: bool
) -> list[int]:
    """Group of each node, named by its first member; nodes that do not fuse are alone."""
    level = _levels(graph, roles, slots)
    calls = ["" if across_calls else f"{node.module} {node.source}" for node in graph.nodes]
    place = [(node.phase, at, call) for node, at, call in zip(graph.nodes, level, calls, strict=True)]
    parent = list(range(len(graph.nodes)))

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def merge(one: int, other: int) -> None:
        first, second = sorted((find(one), find(other)))
        parent[second] = first

    readers: dict[tuple[object, ...], int] = {}
    for index, node in enumerate(graph.nodes):
        if roles[index] != "fused":
            continue
        for slot in slots[index]:
            if TABLE_OPERAND.get(node.op) == slot:  # a table looked up by index is there in full before
                continue
            ref = node.operands[slot]
            producer = sources.root(ref).node
            if roles[producer] == "fused" and place[producer] == place[index]:
                merge(producer, index)
            shape = next((meta.shape for meta in node.outputs if meta is not None), ())
            merge(readers.setdefault((place[index], sources.identity(ref), shape), index), index)
    return [find(index) for index in range(len(graph.nodes))]


def _read_outside(
    graph: JointGraph, roles: Sequence[str], slots: Sequence[tuple[int, ...]], groups: Sequence[int], sources: _Sources
) -> set[TensorRef]:
    """Tensors that somebody outside their group reads, through views too: they must be written."""
    outside = {sources.root(ref) for ref, _ in graph.stored.values()}
    for index, node in enumerate(graph.nodes):
        if roles[index] == "view":
            continue
        for slot in slots[index]:
            root = sources.root(node.operands[slot])
            if roles[index] != "fused" or groups[root.node] != groups[index]:
                outside.add(root)
    return outside
