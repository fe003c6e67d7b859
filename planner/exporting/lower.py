"""A plan as a program: blocks of calls and placement changes, in execution order, each change exactly once.

Blocks are: what runs before the repeated layers, each layer, what runs after them; once for the forward and once for the
backward pass. A placement change belongs to the block of the use that reads its result; if blocks differ, to the block that
makes the tensor, or to the first block of the phase when the tensor comes from outside it. So it is carried out exactly once,
as planned and priced, and layers stay alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from planner.errors import ExportError
from planner.exporting.parts import split
from planner.exporting.program import (
    GRADIENT_SLOT,
    Block,
    Call,
    Move,
    Program,
    Statement,
    Value,
    made_by,
    placements_of,
    read_by,
)
from planner.exporting.segments import assign_blocks, position
from planner.graph import BACKWARD, FORWARD, JointGraph, Node, TensorRef
from planner.placement import Placements, text
from planner.plan import Choice, Plan, Redistribution
from planner.schedule import BlockKey
from planner.wiring import Wiring


def lower(plan: Plan, graph: JointGraph) -> Program:
    """Raises ExportError if the plan does not fit the graph, or its layouts do not meet."""
    if plan.structure_fingerprint != graph.structure_fingerprint:
        raise ExportError(
            "the plan belongs to another model than the graph it is exported with",
            hint="Trace the model that the plan names, with the same number of layers.",
        )
    return _Lowering(plan, graph).program()


@dataclass
class _Lowering:
    """Builds one program; thrown away afterwards."""

    plan: Plan
    graph: JointGraph
    num_layers: int = 0
    home: dict[int, BlockKey] = field(default_factory=dict)
    """op or output node -> block"""
    uses: dict[tuple[int, int], Value] = field(default_factory=dict)
    """(consumer node, operand slot) -> the value it reads; gradients are stored under (parameter node, -1)"""
    moves: dict[int, Move] = field(default_factory=dict)
    move_home: dict[int, BlockKey] = field(default_factory=dict)

    def program(self) -> Program:
        self.num_layers = 1 + max((layer for layer in self.graph.layers), default=-1)
        self.home = assign_blocks(self.graph, self.num_layers)
        self._read_redistributions()
        self._check_layouts()
        self._check_kept()
        self._place_moves()
        order = self._ordered_nodes()
        drafts = {key: self._statements(key, nodes) for key, nodes in order.items()}
        reads = {key: read_by(statements) for key, statements in drafts.items()}
        blocks = tuple(self._block(key, statements, reads) for key, statements in drafts.items())
        return Program(
            plan=self.plan, graph=self.graph, num_layers=self.num_layers, blocks=blocks, loss=self._operand(self._loss_node(), 0)
        )  # fmt: skip

    # ---- uses and moves ---------------------------------------------------------------------------------------------
    def _read_redistributions(self) -> None:
        """Who reads what: shared redistributions first, private ones start from them."""
        shared: dict[tuple[TensorRef, str], int] = {}
        numbered = list(enumerate(self.plan.redistributions))
        for number, r in sorted(numbered, key=lambda pair: not pair[1].shared):
            ref = self._tensor(r)
            if r.shared:
                if (ref, r.phase) in shared:
                    raise ExportError(f"the plan shares two layouts of {r.tensor[0]} in {r.phase}", hint="Plan again.")
                shared[ref, r.phase] = number
                source = Value(ref)
            else:
                source = Value(ref, shared.get((ref, r.phase)))
            self.moves[number] = Move(number, source)
            if placements_of(self.plan, self.graph, source) != r.source:
                raise ExportError(
                    f"a redistribution of {r.tensor[0]} starts from {text(r.source)}, but the tensor is "
                    f"{text(placements_of(self.plan, self.graph, source))} there",
                    hint="The plan file is inconsistent; plan again.",
                )
            for consumer in r.consumers:
                self.uses[self._use(*consumer)] = Value(ref, number)

    def _tensor(self, r: Redistribution) -> TensorRef:
        return TensorRef(self._node(r.tensor[0]), r.tensor[1])

    def _node(self, key: str) -> int:
        if key not in self.graph.node_by_key:
            raise ExportError(f"the plan names {key!r}, which the model does not have", hint="Plan the model again.")
        return self.graph.node_by_key[key]

    def _use(self, key: str, slot: int) -> tuple[int, int]:
        return self._node(key), slot

    def _operand(self, node: int, slot: int) -> Value:
        """The value read by a use: what a redistribution brings there, or the tensor as produced."""
        if slot == GRADIENT_SLOT:
            return self.uses.get((node, slot), Value(self.graph.stored[node][0]))
        return self.uses.get((node, slot), Value(self.graph.nodes[node].operands[slot]))

    def _check_layouts(self) -> None:
        """Every use reads the layout that its consumer's strategy requires."""
        for node, slot, wanted in self._all_uses():
            value = self._operand(node, slot)
            got = placements_of(self.plan, self.graph, value)
            if got != wanted:
                raise ExportError(
                    f"{self.graph.nodes[node].key} needs operand {slot} as {text(wanted)}, the plan brings it as {text(got)}",
                    hint="The plan file is inconsistent; plan again.",
                )

    @cached_property
    def _kept(self) -> dict[int, Value]:
        """Node that is kept from forward -> the forward value that it takes."""
        return {node: Value(*source) for node, source in Wiring(self.plan, self.graph).kept.items()}

    def _check_kept(self) -> None:
        for node, value in self._kept.items():
            made, got = self._choice(self.graph.nodes[node]).outputs[0], placements_of(self.plan, self.graph, value)
            if made != got:
                raise ExportError(
                    f"{self.graph.nodes[node].key} is kept as {text(made or ())}, but the forward pass reads {text(got)}",
                    hint="The plan file is inconsistent; plan again.",
                )

    def _all_uses(self) -> Iterator[tuple[int, int, Placements]]:
        """(consumer, slot, required placements) of every use that reads data."""
        for index, node in enumerate(self.graph.nodes):
            if node.kind in ("op", "output"):
                for slot, wanted in enumerate(self._choice(node).operands):
                    if wanted is not None:
                        yield index, slot, wanted
        for leaf in self.graph.stored:
            stored = self._choice(self.graph.nodes[leaf]).outputs[0]
            assert stored is not None
            yield leaf, GRADIENT_SLOT, stored

    def _choice(self, node: Node) -> Choice:
        if node.key not in self.plan.choices:
            raise ExportError(f"the plan makes no choice for {node.key}", hint="Plan the model again.")
        return self.plan.choices[node.key]

    def _use_home(self, node: int, slot: int) -> BlockKey:
        """Block in which a use happens. A gradient, or the update of a buffer, is stored where it is made."""
        return self.home[node if slot != GRADIENT_SLOT else self.graph.stored[node][0].node]

    def _place_moves(self) -> None:
        readers: dict[int, set[BlockKey]] = {number: set() for number in self.moves}
        for number, r in enumerate(self.plan.redistributions):
            homes = {self._use_home(*self._use(*consumer)) for consumer in r.consumers}
            readers[number] |= homes
            source = self.moves[number].source.moved
            if source is not None:
                readers[source] |= homes
        for number, homes in readers.items():
            phase = self.plan.redistributions[number].phase
            producer = self.home.get(self.moves[number].source.ref.node)
            if not homes or any(home.phase != phase for home in homes):
                key = self.plan.redistributions[number].tensor[0]
                raise ExportError(f"a redistribution of {key} is read in another phase than its own", hint="Plan again.")
            if len(homes) == 1:
                (self.move_home[number],) = homes
            elif producer is not None and producer.phase == phase:
                self.move_home[number] = producer
            else:
                first = min(self._rank(key) for key in self.home.values() if key.phase == phase)
                self.move_home[number] = first[1]

    def _rank(self, key: BlockKey) -> tuple[int, BlockKey]:
        return position(key), key

    # ---- statements -------------------------------------------------------------------------------------------------
    def _ordered_nodes(self) -> dict[BlockKey, list[int]]:
        """Blocks in execution order, each with its nodes in topological order."""
        nodes = sorted(self.home, key=lambda n: (self.home[n].phase == BACKWARD, position(self.home[n]), n))
        order: dict[BlockKey, list[int]] = {}
        for node in nodes:
            order.setdefault(self.home[node], []).append(node)
        return order

    def _statements(self, key: BlockKey, nodes: list[int]) -> tuple[Statement, ...]:
        statements: list[Statement] = []
        done: set[int] = set()
        inside = set(nodes)
        eager: dict[int | None, list[int]] = {}
        for number, home in self.move_home.items():
            if home == key and self._is_eager(number):
                producer = self.moves[number].source.ref.node
                eager.setdefault(producer if producer in inside else None, []).append(number)

        def bring(value: Value) -> None:
            """Emit the move that makes `value`, if it belongs to this block and is not there yet."""
            number = value.moved
            if number is None or number in done or self.move_home[number] != key:
                return
            done.add(number)
            bring(self.moves[number].source)
            statements.append(self.moves[number])

        for number in eager.get(None, []):
            bring(self.moves[number].result)
        for node in nodes:
            operands = self._call_operands(node)
            for operand in operands:
                if operand is not None:
                    bring(operand)
            if self.graph.nodes[node].is_op:
                statements.append(Call(node, operands))
            for number in eager.get(node, []):
                bring(self.moves[number].result)
        return tuple(statements)

    def _is_eager(self, number: int) -> bool:
        """Moves for other blocks, and gradients on their way to be stored: right where the tensor is made."""
        consumers = self.plan.redistributions[number].consumers
        stored = bool(consumers) and all(slot == GRADIENT_SLOT for _, slot in consumers)
        elsewhere = any(self._use_home(*self._use(*c)) != self.move_home[number] for c in consumers)
        return stored or elsewhere or (not consumers)

    def _call_operands(self, node: int) -> tuple[Value | None, ...]:
        if node in self._kept:
            return (self._kept[node],)
        wanted = self._choice(self.graph.nodes[node]).operands
        return tuple(None if want is None else self._operand(node, slot) for slot, want in enumerate(wanted))

    # ---- borders ----------------------------------------------------------------------------------------------------
    def _block(self, key: BlockKey, statements: tuple[Statement, ...], reads: dict[BlockKey, dict[Value, None]]) -> Block:
        made = made_by(self.graph, statements)
        kept = tuple(
            (leaf, self._operand(leaf, GRADIENT_SLOT)) for leaf in self.graph.stored if self._use_home(leaf, GRADIENT_SLOT) == key
        )
        gradients, updates = (kept, ()) if key.phase == BACKWARD else ((), kept)
        later: set[Value] = {value for _, value in updates}
        saved: set[Value] = set()
        for other, values in reads.items():
            if other != key:
                (later if other.phase == key.phase else saved).update(v for v in values if v in made)
        loss = self._operand(self._loss_node(), 0)
        if loss in made:
            later.add(loss)
        stored = dict.fromkeys(value for _, value in gradients)
        parts = split(self.plan, self.graph, statements, stored=set(stored), elsewhere=later | saved)
        reads_inside = (*read_by(parts.statements), *(value for value in stored if value not in made))
        inputs = dict.fromkeys(value for value in reads_inside if value not in made)
        others = {value for other, values in reads.items() if other != key and other.phase == key.phase for value in values}
        private = frozenset(value for value in inputs if value not in others and not self._is_own(value, key))
        assert key.phase == FORWARD or not saved, "a backward tensor is read in forward"
        return Block(
            key=key,
            statements=parts.statements,
            inputs=tuple(sorted(inputs, key=lambda value: self._input_rank(value, key))),
            live=tuple(v for v in made if v in later),
            saved=tuple(v for v in made if v in saved),
            gradients=gradients,
            updates=updates,
            private=private,
            unshard=parts.unshard,
            unshard_inputs=tuple(value for value in read_by(parts.unshard) if value not in made),
            weights=parts.weights,
            reduce=parts.reduce,
        )

    def _is_own(self, value: Value, key: BlockKey) -> bool:
        """Made in the forward pass of the same layer."""
        return self.home.get(value.ref.node) == BlockKey(FORWARD, key.number)

    def _input_rank(self, value: Value, key: BlockKey) -> tuple[int, int, int]:
        """What earlier blocks of the phase pass on, batch inputs, parameters, what forward saved: other layers', this one's."""
        node = self.graph.nodes[value.ref.node]
        if node.kind in ("param", "buffer"):
            return 2, 0, 0
        if not node.is_op:
            return 1, 0, 0
        if node.phase == key.phase or (value.moved is not None and self._moved_in(value.moved) == key.phase):
            return 0, 0, 0
        return (4, value.ref.node, value.ref.output) if self._is_own(value, key) else (3, 0, 0)

    def _moved_in(self, number: int) -> str:
        return self.plan.redistributions[number].phase

    def _loss_node(self) -> int:
        return self._node("output:loss")
