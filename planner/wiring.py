"""Who reads what under a plan: every operand as its producer made it, or as a redistribution of the plan leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planner.graph import FORWARD, JointGraph, TensorRef
from planner.plan import Plan

GRADIENT_SLOT = -1
"""Operand slot under which a plan lists `stored as the gradient of this parameter` or `stored as the update of this buffer`."""


class Source(NamedTuple):
    """A tensor in one layout: as made, or as redistribution number `moved` left it."""

    ref: TensorRef
    moved: int | None = None


@dataclass(frozen=True, eq=False)
class Wiring:
    """Reads of a plan on its graph."""

    plan: Plan
    graph: JointGraph

    @cached_property
    def brought(self) -> dict[tuple[int, int], int]:
        """(consumer node, operand slot) -> the redistribution whose result it reads."""
        keys = self.graph.node_by_key
        return {(keys[key], slot): n for n, r in enumerate(self.plan.redistributions) for key, slot in r.consumers}

    @cached_property
    def shared(self) -> dict[tuple[TensorRef, str], int]:
        """(tensor, phase) -> the redistribution that others of it start from."""
        return {(self.ref(n), r.phase): n for n, r in enumerate(self.plan.redistributions) if r.shared}

    def ref(self, number: int) -> TensorRef:
        """The tensor of a redistribution."""
        key, output = self.plan.redistributions[number].tensor
        return TensorRef(self.graph.node_by_key[key], output)

    def start(self, number: int) -> Source:
        """What a redistribution starts from."""
        r, ref = self.plan.redistributions[number], self.ref(number)
        return Source(ref, None if r.shared else self.shared.get((ref, r.phase)))

    def result(self, number: int) -> Source:
        return Source(self.ref(number), number)

    def operands(self, node: int) -> tuple[Source, ...]:
        """What a node reads; operands whose data it does not read are left out. A kept one takes what the forward pass read."""
        if node in self.kept:
            return (self.kept[node],)
        found = self.graph.nodes[node]
        wanted = self.plan.choices[found.key].operands
        return tuple(self._use(node, slot, ref) for slot, ref in enumerate(found.operands) if wanted[slot] is not None)

    def _use(self, node: int, slot: int, ref: TensorRef) -> Source:
        """A redistribution in two changes lists its reader in the last one only."""
        return Source(ref, self.brought.get((node, slot)))

    @cached_property
    def kept(self) -> dict[int, Source]:
        """Node that is kept from forward -> what it takes: the shared form of the forward tensor, or that of its only reader."""
        graph, found = self.graph, {}
        for node, ref in graph.kept_from.items():
            if self.plan.choices[graph.nodes[node].key].kept:
                readers = self._forward_readers(ref)
                found[node] = self._use(*readers[0], ref) if len(readers) == 1 else Source(ref, self.shared.get((ref, FORWARD)))
        return found

    def _forward_readers(self, ref: TensorRef) -> list[tuple[int, int]]:
        nodes, choices = self.graph.nodes, self.plan.choices
        return [
            (user, slot)
            for user, slot in self.graph.users[ref]
            if nodes[user].phase == FORWARD and choices[nodes[user].key].operands[slot] is not None
        ]

    @cached_property
    def stored(self) -> dict[int, Source]:
        """Parameter or buffer -> what is stored as its gradient or update."""
        return {leaf: self._use(leaf, GRADIENT_SLOT, ref) for leaf, (ref, _) in self.graph.stored.items()}

    @cached_property
    def from_parameters(self) -> frozenset[int]:
        """Parameters, and ops computed from parameters alone."""
        found: set[int] = set()
        for number, node in enumerate(self.graph.nodes):
            computed = node.is_op and bool(node.operands) and all(ref.node in found for ref in node.operands)
            if node.kind == "param" or computed:
                found.add(number)
        return frozenset(found)
