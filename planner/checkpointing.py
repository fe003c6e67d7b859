"""Activation checkpointing as a change of the graph: the forward pass of chosen layers runs again in the backward pass.

Of a checkpointed layer only the tensors that cross its border are kept. What its backward pass reads of the inside is computed
again from them and from the parameters, by nodes of the backward phase that stand just before their first reader. The result is
an ordinary graph: placements of the repeated ops are chosen like all others, their time and their redistributions are paid,
and memory counts what is still kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from planner.errors import InputError
from planner.graph import BACKWARD, FORWARD, JointGraph, Node, TensorRef, layer_path, without_layer

POLICIES = ("auto", "none", "full")
FLOPS_PER_BYTE = 300.0
"""Work that takes as long as moving one byte of memory: datasheet of the H100 SXM, 989 TFLOP/s over 3.35 TB/s. Only used to put
unlike layers in order."""


@dataclass(frozen=True)
class Checkpoint:
    """Which layers are checkpointed: `auto` (as few as the memory budget makes worthwhile), `none`, `full`, or `full:16` (16)."""

    policy: str = "auto"
    count: int | None = None

    @classmethod
    def parse(cls, written: str) -> Checkpoint:
        """Raises InputError if the text is none of the forms above."""
        match = re.fullmatch(r"(auto|none|full)|full:(\d{1,6})", written.strip())
        if match is None:
            raise InputError(f"{written!r} is no way of checkpointing", hint="Use auto, none, full, or full:16 for 16 layers.")
        return cls("full", int(match[2])) if match[2] else cls(match[1])

    def __str__(self) -> str:
        return self.policy if self.count is None else f"{self.policy}:{self.count}"

    def layers(self, graph: JointGraph) -> tuple[str, ...]:
        """The layers that a fixed policy names, in model order.

        Raises:
            InputError: the model has no repeated layers, or fewer than asked for.
        """
        assert self.policy != "auto", "the solver decides"
        if self.policy == "none" or self.count == 0:
            return ()
        order = tuple(dict.fromkeys((*checkpoint_order(graph), *layer_names(graph))))
        if not order:
            raise InputError(
                f"{graph.request.model} has no repeated layers to checkpoint",
                hint="Layers are modules in a list (`layers.0`, `layers.1`, ...). Use --checkpoint none.",
            )
        if self.count is not None and self.count > len(order):
            raise InputError(
                f"--checkpoint {self} names more layers than the model has",
                hint=f"It has {len(order)}: use full:{len(order)} or less.",
            )
        return first_layers(graph, order, len(order) if self.count is None else self.count)


def layer_names(graph: JointGraph) -> tuple[str, ...]:
    """Paths of the repeated layers that run in forward (`layers.0`, ...), in the order in which they run."""
    found = (layer_path(node.module) for node in graph.nodes if node.is_op and node.phase == FORWARD)
    return tuple(dict.fromkeys(path for path in found if path is not None))


def checkpoint_order(graph: JointGraph) -> tuple[str, ...]:
    """The order in which layers are worth checkpointing: kinds of layers with the most bytes saved per work repeated first. Kinds
    that keep no more than what crosses their border are left out.

    Of alike layers the earlier come first: what they keep is held longest, and later layers have given theirs back by the time
    an early layer is repeated.
    """
    names = layer_names(graph)
    full = checkpointed(graph, names)
    kept, least, work = _kept_bytes(graph), _kept_bytes(full), _repeated_work(graph, full)
    kinds = _kinds_of_layers(graph)
    worth: dict[object, float] = {}
    for name in names:
        saved = kept.get(name, 0) - least.get(name, 0)
        worth[kinds[name]] = max(worth.get(kinds[name], 0.0), saved / max(work[name], 1.0))
    order = sorted(names, key=lambda name: -worth[kinds[name]])
    return tuple(name for name in order if worth[kinds[name]] > 0)


def _kept_bytes(graph: JointGraph) -> Counter[str]:
    """Bytes that each layer keeps for backward."""
    found: Counter[str] = Counter()
    for ref in graph.saved_for_backward:
        found[layer_path(graph.nodes[ref.node].module) or ""] += graph.meta(ref).num_bytes
    return found


def _repeated_work(graph: JointGraph, full: JointGraph) -> Counter[str]:
    """What each layer does again, in FLOPs and bytes written."""
    found: Counter[str] = Counter()
    for node in full.nodes:
        if node.key not in graph.node_by_key:
            written = sum(meta.num_bytes for meta in node.outputs if meta is not None)
            found[layer_path(node.module) or ""] += round(node.flops + FLOPS_PER_BYTE * written)
    return found


def _kinds_of_layers(graph: JointGraph) -> dict[str, object]:
    """Equal for layers with the same forward ops of the same shapes."""
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.phase == FORWARD and (path := layer_path(node.module)) is not None:
            found.setdefault(path, []).append(f"{without_layer(node.key)} {' '.join(map(str, node.outputs))}")
    return {path: tuple(content) for path, content in found.items()}


def first_layers(graph: JointGraph, order: Sequence[str], count: int) -> tuple[str, ...]:
    """The first `count` layers of the order, in model order."""
    chosen = set(order[:count])
    return tuple(name for name in layer_names(graph) if name in chosen)


def checkpointed(graph: JointGraph, layers: Iterable[str], keeps: Callable[[Node], bool] | None = None) -> JointGraph:
    """The graph with these layers repeated in the backward pass. Keys of the ops it had before stay; a repeated op is called
    `.../recompute#0` after its forward `.../fwd#0`, unless the graph repeats it already. Results of forward ops for which
    `keeps` holds are kept all the same.

    Raises:
        InputError: a layer that the model does not have.
    """
    chosen = frozenset(layers)
    if chosen == frozenset(graph.checkpointed):
        return graph
    assert not graph.checkpointed, "the graph is checkpointed differently already"
    unknown = sorted(chosen - set(layer_names(graph)))
    if unknown:
        raise InputError(f"the model has no layer {unknown[0]}", hint="Layers are named like layers.0.")
    return _Repetition(graph, chosen, keeps or (lambda node: False)).graph()


@dataclass
class _Repetition:
    """One change of a graph; thrown away afterwards. Nodes are named by their number in the old graph, new ones by numbers
    beyond it."""

    old: JointGraph
    layers: frozenset[str]
    keeps: Callable[[Node], bool]
    order: list[int] = field(default_factory=list)
    """numbers of all nodes in their new order"""
    nodes: dict[int, Node] = field(default_factory=dict)
    """nodes that are new or read something else than before"""
    twins: dict[int, int] = field(default_factory=dict)
    """forward op -> its repetition"""

    def graph(self) -> JointGraph:
        for index, node in enumerate(self.old.nodes):
            if node.phase != BACKWARD or not node.is_op:
                self.order.append(index)
            elif index not in self.repeats:
                self._make_twins(node.operands)
                self.nodes[index] = replace(node, operands=tuple(self._read(ref) for ref in node.operands))
                self.order.append(index)
        return self._renumbered()

    # ---- what is repeated -----------------------------------------------------------------------------------------
    @cached_property
    def inside(self) -> frozenset[int]:
        """Forward ops of the checkpointed layers."""
        return frozenset(
            index
            for index, node in enumerate(self.old.nodes)
            if node.is_op and node.phase == FORWARD and layer_path(node.module) in self.layers
        )

    @cached_property
    def from_parameters(self) -> frozenset[int]:
        """Forward ops computed from parameters and constant buffers alone: nothing of that kind is held for backward."""
        nodes, updated = self.old.nodes, self._updated_buffers
        found: set[int] = set()
        for index, node in enumerate(nodes):
            if node.is_op and node.phase == FORWARD and node.operands:
                stored = (nodes[r.node].kind in ("param", "buffer") and r.node not in updated for r in node.operands)
                if all(is_stored or r.node in found for is_stored, r in zip(stored, node.operands, strict=True)):
                    found.add(index)
        return frozenset(found)

    @cached_property
    def _updated_buffers(self) -> frozenset[int]:
        """Buffers that hold another value by the time of the backward pass."""
        return frozenset(buffer.node for buffer in self.old.buffers if buffer.update is not None)

    @cached_property
    def border(self) -> frozenset[TensorRef]:
        """Tensors made in a checkpointed layer that the forward pass reads outside of it."""
        found: set[TensorRef] = set()
        for index, node in enumerate(self.old.nodes):
            if node.phase == BACKWARD:
                continue
            home = layer_path(node.module) if index in self.inside else None
            found.update(r for r in node.operands if r.node in self.inside and layer_path(self.old.nodes[r.node].module) != home)
        found.update(buffer.update for buffer in self.old.buffers if buffer.update is not None)
        return frozenset(found)

    @cached_property
    def repeats(self) -> dict[int, int]:
        """Ops that the old graph repeats in backward already -> the forward op that each repeats."""
        forward = {
            (node.op, node.args, node.kwargs, node.module, node.operands): index
            for index, node in enumerate(self.old.nodes)
            if node.is_op and node.phase == FORWARD
        }
        found: dict[int, int] = {}
        for index, node in enumerate(self.old.nodes):
            if node.rematerialised:
                operands = tuple(TensorRef(found.get(r.node, r.node), r.output) for r in node.operands)
                twin = forward.get((node.op, node.args, node.kwargs, node.module, operands))
                if twin is not None:
                    found[index] = twin
        return found

    def _is_repeated(self, ref: TensorRef) -> bool:
        """Whether a backward reader of this forward tensor gets it computed again. Outside the checkpointed layers that is as
        it was; a tensor that crosses the border is kept."""
        if ref.node in self.from_parameters:
            return True
        if ref.node not in self.inside:
            return ref.node in self._earlier_keys
        reads_updated = any(r.node in self._updated_buffers for r in self.old.nodes[ref.node].operands)
        return ref not in self.border and not reads_updated and not self.keeps(self.old.nodes[ref.node])

    # ---- repetition -----------------------------------------------------------------------------------------------
    def _original(self, ref: TensorRef) -> TensorRef:
        return TensorRef(self.repeats.get(ref.node, ref.node), ref.output)

    def _read(self, ref: TensorRef) -> TensorRef:
        """What a backward op reads in place of `ref`."""
        original = self._original(ref)
        if original.node in self.twins and self._is_repeated(original):
            return TensorRef(self.twins[original.node], ref.output)
        return original

    def _make_twins(self, wanted: Sequence[TensorRef]) -> None:
        """Append what these tensors are computed from, in forward order, as far as it is not there yet."""
        missing: set[int] = set()
        stack = list(wanted)
        while stack:
            ref = self._original(stack.pop())
            if ref.node not in self.twins and ref.node not in missing and self._is_repeated(ref):
                missing.add(ref.node)
                stack.extend(self.old.nodes[ref.node].operands)
        for index in sorted(missing):
            self._append_twin(index)

    def _append_twin(self, index: int) -> None:
        node = self.old.nodes[index]
        number = len(self.old.nodes) + len(self.twins)
        self.nodes[number] = replace(
            node,
            key=self._earlier_keys.get(index) or _recompute_key(node.key),
            phase=BACKWARD,
            operands=tuple(self._read(ref) for ref in node.operands),
            rematerialised=True,
        )
        self.twins[index] = number
        self.order.append(number)

    @cached_property
    def _earlier_keys(self) -> Mapping[int, str]:
        """Forward op -> key of its repetition in the old graph."""
        return {twin: self.old.nodes[index].key for index, twin in reversed(self.repeats.items())}

    # ---- result ---------------------------------------------------------------------------------------------------
    def _renumbered(self) -> JointGraph:
        position = {number: at for at, number in enumerate(self.order)}

        def moved(ref: TensorRef) -> TensorRef:
            return TensorRef(position[ref.node], ref.output)

        nodes = [self.nodes.get(number) or self.old.nodes[number] for number in self.order]
        found = replace(
            self.old,
            nodes=tuple(replace(node, operands=tuple(map(moved, node.operands))) for node in nodes),
            parameters=tuple(
                replace(p, gradient=None if p.gradient is None else moved(self._read(p.gradient))) for p in self.old.parameters
            ),
            checkpointed=tuple(name for name in layer_names(self.old) if name in self.layers),
        )
        found.check()
        return found


def _recompute_key(key: str) -> str:
    stem, _, ordinal = key.rpartition("/fwd#") if "/fwd#" in key else ("", "", "")
    assert ordinal, f"{key} is no key of a forward op"
    return f"{stem}/recompute#{ordinal}"
