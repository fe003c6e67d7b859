"""Where a whole tensor may be made a pending sum of itself (R -> P) because it is added to a pending sum.

The result of the addition is then pending too, so one reduction further down takes the place of one before the addition. That
can save time only if the reduction further down is cheaper, or is due for another sum as well. A use is offered the move if its
operand is smaller than the result or made from parameters alone (a bias; writing zeros costs next to nothing), and

- the op makes a pending sum of its other operands anyway (the bias of a convolution over split channels), or
- it adds the operand, which no op before can make pending, to one that can be, and *waiting pays* for its result: whoever reads
  the result can take it pending and makes fewer bytes of it, or adds it to another sum that is pending for this reader alone, or
  hands it on to readers for which waiting pays. A single reader that needs the finished sum is enough to make waiting worthless:
  it pays the reduction.

Residual streams are so left out, and with them many equally cheap plans: they are full-size, and every norm reads them finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.graph import JointGraph, TensorRef
from planner.placement import P, R
from planner.strategy import Strategies, StrategySpace

Use = tuple[int, int]
"""(consumer node, operand slot)"""


def uses_made_pending(space: StrategySpace) -> frozenset[Use]:
    """The uses that get the move R -> P."""
    return frozenset(_Waiting(space).offered())


class _Waiting:
    def __init__(self, space: StrategySpace) -> None:
        self.space = space
        self.graph: JointGraph = space.graph
        self._rows: dict[tuple[int, tuple[int, ...]], Mapping[int, _Row]] = {}
        self._made: dict[tuple[object, ...], bool] = {}
        self.stored = {ref for ref, _ in self.graph.stored.values()}
        self.pays: dict[int, bool] = {}

    def offered(self) -> list[Use]:
        found = []
        for node in range(len(self.graph.nodes) - 1, -1, -1):
            self.pays[node] = self._pays(node)
            for slot, row in self.rows(node).items():
                added = row.beside_pending and self.pays[node] and self._is_whole(node, slot)
                if self._is_small(node, slot) and (row.beside_split or added):
                    found.append((node, slot))
        return found

    def _is_small(self, node: int, slot: int) -> bool:
        """The result repeats it, or it is made from parameters alone."""
        operand = self.graph.nodes[node].operands[slot]
        of = self.graph.meta(operand).num_elements, self.graph.meta(TensorRef(node, 0)).num_elements
        return of[0] < of[1] or operand.node in self._from_parameters

    @cached_property
    def _from_parameters(self) -> frozenset[int]:
        found = {parameter.node for parameter in self.graph.parameters}
        for number, node in enumerate(self.graph.nodes):
            if node.is_op and node.operands and all(ref.node in found for ref in node.operands):
                found.add(number)
        return frozenset(found)

    def _is_whole(self, node: int, slot: int) -> bool:
        """No op makes this operand a pending sum, and some op makes another one so."""
        pending = [ref.node in self._may_be_pending for ref in self.graph.nodes[node].operands]
        return not pending[slot] and any(pending)

    def rows(self, node: int) -> Mapping[int, _Row]:
        """Operand slot -> how the op takes it pending; slots that it cannot take so are missing."""
        strategies = self.space.strategies[node]
        if not self.graph.nodes[node].is_op or len(self.graph.nodes[node].outputs) != 1 or not strategies.operand_slots:
            return {}
        lattices = [self.space.lattice_of[ref] for ref in self._ports(node, strategies)]
        key = (id(strategies), tuple(lattices))
        if key not in self._rows:
            codes = [self.space.lattices[n].codes[strategies.columns[:, at]] for at, n in enumerate(lattices)]
            self._rows[key] = _linear_rows(codes, strategies.operand_slots)
        return self._rows[key]

    def _ports(self, node: int, strategies: Strategies) -> list[TensorRef]:
        return [TensorRef(node, 0), *(self.graph.nodes[node].operands[slot] for slot in strategies.operand_slots)]

    def _pays(self, node: int) -> bool:
        """Waiting pays for the node's result. Readers come later in the graph, so they are known."""
        ref = TensorRef(node, 0)
        users = self.graph.users.get(ref, ())
        if ref in self.stored or not users or len(self.graph.nodes[node].outputs) != 1:
            return False
        return all(self._pays_at(ref, *use) for use in users)

    def _pays_at(self, ref: TensorRef, consumer: int, slot: int) -> bool:
        row = self.rows(consumer).get(slot)
        if row is None:
            return False
        others = [other for at, other in enumerate(self.graph.nodes[consumer].operands) if at != slot]
        if ref in others:  # `x * x` needs the finished sum, `x + x` is no second sum
            return False
        before, after = self.graph.meta(ref), self.graph.meta(TensorRef(consumer, 0))
        if after.num_bytes < before.num_bytes or self.pays[consumer]:
            return True
        return row.beside_pending and any(self._pending_for(other, consumer) for other in others)

    def _pending_for(self, ref: TensorRef, reader: int) -> bool:
        """It may be made as a pending sum, and nobody but the reader needs it."""
        return {user for user, _ in self.graph.users.get(ref, ())} == {reader} and ref.node in self._may_be_pending

    @cached_property
    def _may_be_pending(self) -> frozenset[int]:
        """Nodes whose result can be a pending sum that they make themselves or get from before, small operands added."""
        found: set[int] = set()
        for number, node in enumerate(self.graph.nodes):
            if node.is_op and len(node.outputs) == 1 and node.outputs[0] is not None and self._makes_pending(number, found):
                found.add(number)
        return frozenset(found)

    def _makes_pending(self, node: int, before: set[int]) -> bool:
        strategies, refs = self.space.strategies[node], self.graph.nodes[node].operands
        if not strategies.operand_slots:
            return False  # zeros: a pending sum of nothing
        carried = tuple(refs[slot].node in before for slot in strategies.operand_slots)
        added = tuple(self._is_small(node, slot) for slot in strategies.operand_slots)
        lattices = tuple(self.space.lattice_of[ref] for ref in self._ports(node, strategies))
        key = (id(strategies), lattices, carried, added)
        if key not in self._made:
            pending = [(self.space.lattices[n].codes[strategies.columns[:, at]] == P).any(1) for at, n in enumerate(lattices)]
            self._made[key] = _some_row_is_pending(pending, carried, added)
        return self._made[key]


@dataclass(frozen=True)
class _Row:
    """How an op takes one operand as a pending sum, the result being pending on the same axis.

    beside_pending: another operand is pending too. beside_split: another one is split, so that the op sums over the axis.
    """

    beside_pending: bool
    beside_split: bool


def _some_row_is_pending(pending: list[np.ndarray], carried: tuple[bool, ...], added: tuple[bool, ...]) -> bool:
    """`pending`: bool [strategies] of the result and of each operand. An operand that nothing makes pending must not be required
    so, unless it is small and stands beside one that is carried here pending."""
    fits, *operands = pending
    beside = np.zeros(len(fits), np.bool_)
    for needed, comes in zip(operands, carried, strict=True):
        beside |= needed & comes
    for needed, comes, small in zip(operands, carried, added, strict=True):
        if not comes:
            fits = fits & (~needed | (beside & small))
    return bool(fits.any())


def _linear_rows(codes: list[np.ndarray], slots: tuple[int, ...]) -> dict[int, _Row]:
    """`codes`: int8 [strategies, axes] of the result and of each operand."""
    out, *operands = codes
    found = {}
    for at, slot in enumerate(slots):
        both = (operands[at] == P) & (out == P)
        if both.any():
            others = [other for number, other in enumerate(operands) if number != at]
            pending = any(bool((both & (other == P)).any()) for other in others)
            split = any(bool((both & (other != P) & (other != R)).any()) for other in others)
            found[slot] = _Row(pending, split)
    return found
