"""One-axis rules: for one op and ONE mesh axis, which placements go in and which come out.

A row is a tuple of placement codes, outputs first, then the operands that are edges. Rules speak about one axis;
`planner.enumerating.expand` combines rows to whole meshes and drops what does not divide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.graph import JointGraph, Node, TensorMeta

Row = tuple[int, ...]


@dataclass(frozen=True)
class OpSignature:
    """All that a rule may look at. Equal signatures have equal strategies, so they are enumerated once."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta | None, ...]

    @classmethod
    def of(cls, node: Node, graph: JointGraph) -> OpSignature:
        return cls(node.op, node.args, node.kwargs, tuple(graph.meta(ref) for ref in node.operands), node.outputs)

    @property
    def output(self) -> TensorMeta:
        assert self.outputs[0] is not None
        return self.outputs[0]

    def arg(self, position: int, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else default


Rule = Callable[[OpSignature], list[Row]]

RULES: dict[str, tuple[Rule, str]] = {}
"""op -> (rule, family); filled by the modules in `rules/` when they are imported, never afterwards."""


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a one-axis rule of our own for some ops. It takes precedence over DTensor's rows."""

    def register(function: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, f"two rules for {op}"
            RULES[op] = (function, function.__module__.rsplit(".", 1)[-1])
        return function

    return register


FACTORY_OPS = frozenset({
    "aten.new_zeros.default", "aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default", "aten.full.default",
    "aten.new_full.default", "aten.scalar_tensor.default", "aten.zeros.default", "aten.ones.default", "aten.new_ones.default",
    "aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.empty_like.default", "aten.new_empty.default",
    "aten.new_empty_strided.default", "aten.empty.memory_format",
})  # fmt: skip
"""Ops that make a tensor without reading data: their operands (shape templates) are no edges."""
