"""Which forward tensors are kept for backward, and which cheap ones are computed again there.

Saving everything that backward reads would keep each intermediate of a norm or an activation, in fp32 where the model computes
so: more than twice what training frameworks keep. Pointwise ops cost next to nothing to repeat (they fuse with the backward
kernel that reads them), so the tensors kept are those of a minimum cut, in bytes, between what must be kept if read (products,
attention, look-ups, reductions) and what backward reads. Parameters and inputs are there anyway and cost nothing.
Same idea as the min-cut partitioner of AOTAutograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import networkx as nx

from planner.graph import BACKWARD, VIEW_OPS
from planner.tracing.convert import Draft, JointDraft, Use

CHEAP_OPS = VIEW_OPS | {
    "planner.dropout.default",
    "aten._to_copy.default", "aten.clone.default", "aten.cat.default", "aten.stack.default", "aten.add.Tensor",
    "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Scalar", "aten.mul.Tensor", "aten.mul.Scalar",
    "aten.div.Tensor", "aten.div.Scalar", "aten.neg.default", "aten.abs.default", "aten.pow.Tensor_Scalar", "aten.pow.Scalar",
    "aten.sqrt.default", "aten.rsqrt.default", "aten.reciprocal.default", "aten.exp.default", "aten.log.default",
    "aten.sin.default", "aten.cos.default", "aten.tanh.default", "aten.erf.default", "aten.sigmoid.default",
    "aten.silu.default", "aten.gelu.default", "aten.relu.default", "aten.where.self", "aten.maximum.default",
    "aten.minimum.default", "aten.clamp.default", "aten.clamp_min.default", "aten.eq.Scalar", "aten.ne.Scalar",
    "aten.lt.Scalar", "aten.le.Scalar", "aten.gt.Scalar", "aten.ge.Scalar",
}  # fmt: skip
"""Pointwise ops, casts, views and copies: one pass over memory at most, no communication of their own."""


def recompute_cheap_activations(draft: JointDraft, known: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Repeat cheap forward ops in backward wherever that keeps fewer bytes. Changes only the draft given.

    Returns the places in `draft.forward` of the ops repeated. `known` are those of the same model at another size: they are taken
    as they are, so that a model has one structure at all sizes.
    """
    if known is None or any(place >= len(draft.forward) for place in known):
        repeated = _to_repeat(draft)
    else:
        repeated = {draft.forward[place] for place in known}
    places = tuple(place for place, node in enumerate(draft.forward) if node in repeated)
    repeat_in_backward(draft, repeated)
    return places


def repeat_in_backward(draft: JointDraft, repeated: set[Draft]) -> None:
    """Where backward reads one of these forward ops, let it read a twin that stands just before its first user there."""
    twins: dict[Draft, Draft] = {}
    backward: list[Draft] = []

    def twin_of(node: Draft) -> Draft:
        if node not in repeated:
            return node
        if node not in twins:
            operands = tuple((twin_of(producer), output) for producer, output in node.operands)
            twins[node] = replace(node, phase=BACKWARD, operands=operands, rematerialised=True)
            backward.append(twins[node])
        return twins[node]

    for node in draft.backward:
        node.operands = tuple((twin_of(producer), output) for producer, output in node.operands)
        backward.append(node)
    draft.backward = backward


def _to_repeat(draft: JointDraft) -> set[Draft]:
    """Forward ops between the cut and backward."""
    forward = set(draft.forward)
    read = {use for node in draft.backward for use in node.operands if use[0] in forward}
    if not read:
        return set()
    cheap = _cheap(draft)
    network = nx.DiGraph()
    for use in _ancestors(read, cheap):
        _add(network, use, cheap, forward)
    for use in read:
        network.add_edge((use, "out"), "backward")
    # networkx returns the cut with the smallest side of the target. With backward as the target it is, of equal cuts, the one
    # nearest to backward: no chain of recomputation reaches further back than it must.
    _, (_, near) = nx.minimum_cut(network, "sources", "backward", flow_func=nx.algorithms.flow.boykov_kolmogorov)
    return {use[0] for use in _ancestors(read, cheap) if use[0] in cheap and (use, "in") in near}


def _cheap(draft: JointDraft) -> set[Draft]:
    """Cheap ops that depend on data. A table made from nothing (positions, angles) is small and shared by all layers: kept."""
    leaves = set(draft.leaves)
    depends: set[Draft] = set()
    for node in draft.forward:
        if any(producer in depends or producer in leaves for producer, _ in node.operands):
            depends.add(node)
    return {node for node in draft.forward if node.op in CHEAP_OPS and node in depends}


def _ancestors(read: set[Use], cheap: set[Draft]) -> Iterator[Use]:
    """The tensors read and everything they can be recomputed from."""
    seen: set[Use] = set()
    stack = list(read)
    while stack:
        use = stack.pop()
        if use not in seen:
            seen.add(use)
            yield use
            if use[0] in cheap:
                stack.extend(use[0].operands)


def _add(network: nx.DiGraph, use: Use, cheap: set[Draft], forward: set[Draft]) -> None:
    """in -> out with the bytes of keeping the tensor; operands -> in if it can be recomputed, else sources -> in."""
    producer, output = use
    meta = producer.outputs[output]
    kept_bytes = meta.num_bytes if meta is not None and producer in forward else 0
    network.add_edge((use, "in"), (use, "out"), capacity=kept_bytes)
    if producer in cheap:
        for operand in producer.operands:
            network.add_edge((operand, "out"), (use, "in"))
    else:
        network.add_edge("sources", (use, "in"))
