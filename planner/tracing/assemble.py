"""Arranged drafts -> `JointGraph`: short names, stable keys, node numbers, parameters with their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner import torch_compat
from planner.graph import (
    BACKWARD,
    Buffer,
    FirstValue,
    InitRule,
    Input,
    JointGraph,
    ModelRequest,
    Node,
    Parameter,
    TensorMeta,
    TensorRef,
)
from planner.region import REGION, REGION_BACKWARD, Region
from planner.tracing.convert import Draft, JointDraft, Use
from planner.tracing.flops import ATTENTION, ATTENTION_BACKWARD, EINSUM, flops
from planner.tracing.region import published_module

_NAMES = {
    ATTENTION: "attention",
    ATTENTION_BACKWARD: "attention_backward",
    "aten._to_copy.default": "cast",
    "aten._unsafe_view.default": "view",
    "aten.embedding_dense_backward.default": "embedding_backward",
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A parameter of the model as the module knows it: all its names, how it starts, whether it is trained."""

    names: tuple[str, ...]
    meta: TensorMeta
    init: InitRule
    trainable: bool


@dataclass(frozen=True, kw_only=True)
class StoredBuffer:
    """A buffer of the model as the module knows it; `first_value` and `unknown` as in `planner.graph.Buffer`."""

    names: tuple[str, ...]
    first_value: FirstValue | None
    unknown: str
    persistent: bool


def assemble(
    draft: JointDraft,
    request: ModelRequest,
    *,
    parameters: Sequence[StoredTensor],
    buffers: Sequence[StoredBuffer],
    inputs: Sequence[tuple[int, str, int | None, int | None]],
    symbols: Mapping[str, int],
    class_name: str,
    stand_in_loss: bool = False,
    dropouts: Sequence[tuple[int, int]] = (),
    repeated: tuple[int, ...] | None = None,
) -> JointGraph:
    """`inputs`: (position in the flattened call, name, batch dim, bound of values) in the order to list them."""
    leaves, found = _leaves(draft, parameters, inputs)
    assert draft.loss is not None and draft.tangent is not None
    output = Draft(
        op="output", kind="output", phase="forward", operands=(draft.loss,), outputs=(_meta(draft.loss),), label="loss"
    )
    order = [*leaves, *draft.forward, output, draft.tangent, *draft.backward]
    index = {node: number for number, node in enumerate(order)}
    nodes = tuple(_node(node, key, index) for node, key in zip(order, _keys(order), strict=True))

    def ref(use: Use) -> TensorRef:
        return TensorRef(index[use[0]], use[1])

    gradients = {found[name]: use for name, use in draft.gradients.items()}
    return JointGraph(
        request=request,
        nodes=nodes,
        parameters=tuple(
            Parameter(
                node=index[found[p.names[0]]], names=p.names, init=p.init,
                gradient=ref(gradients[found[p.names[0]]]) if found[p.names[0]] in gradients else None,
            )
            for p in parameters
        ),
        inputs=tuple(
            Input(node=index[draft.inputs[position]], name=name, batch_dim=batch_dim, high=high)
            for position, name, batch_dim, high in inputs
            if position in draft.inputs
        ),
        loss=ref(draft.loss),
        symbols=tuple(symbols.items()),
        class_name=class_name,
        stand_in_loss=stand_in_loss,
        repeated=repeated,
        buffers=tuple(_buffers(draft, buffers, index)),
        dropouts=tuple(dropouts),
        operators=tuple(_operators(order)),
    )  # fmt: skip


def _operators(order: Sequence[Draft]) -> Iterator[tuple[str, str]]:
    """Operators that are neither PyTorch's nor the planner's, with the module whose import registers them."""
    for op in dict.fromkeys(node.op for node in order if node.kind == "op"):
        if op.partition(".")[0] not in ("aten", "prims", "planner"):
            yield op, published_module(torch_compat.registering_module(op))


def _buffers(draft: JointDraft, buffers: Sequence[StoredBuffer], index: Mapping[Draft, int]) -> Iterator[Buffer]:
    """Those that the graph has: a buffer that is neither read nor written is no part of a step."""
    for stored in buffers:
        name = next((name for name in stored.names if name in draft.buffers), None)
        if name is None:
            continue
        update = draft.updates.get(name)
        yield Buffer(
            node=index[draft.buffers[name]],
            names=(name, *(other for other in stored.names if other != name)),
            first_value=stored.first_value,
            unknown=stored.unknown,
            persistent=stored.persistent,
            update=None if update is None else TensorRef(index[update[0]], update[1]),
        )


def _leaves(
    draft: JointDraft, parameters: Sequence[StoredTensor], inputs: Sequence[tuple[int, str, int | None, int | None]]
) -> tuple[list[Draft], dict[str, Draft]]:
    """Parameters in the module's order (unused ones too), then buffers, then inputs; and the leaf of every parameter name."""
    found: dict[str, Draft] = {}
    ordered: list[Draft] = []
    for stored in parameters:
        leaf = next((draft.parameters[name] for name in stored.names if name in draft.parameters), None)
        if leaf is None:
            leaf = Draft(op="param", kind="param", phase="forward", outputs=(stored.meta,))
        leaf.label, leaf.module = stored.names[0], stored.names[0].rpartition(".")[0]
        ordered.append(leaf)
        found.update(dict.fromkeys(stored.names, leaf))
    ordered += draft.buffers.values()
    for position, name, _, _ in inputs:
        if position in draft.inputs:
            draft.inputs[position].label = name
            ordered.append(draft.inputs[position])
    assert set(draft.leaves) <= set(ordered), "a graph input is neither parameter, buffer nor input"
    return ordered, found


def _keys(order: Sequence[Draft]) -> list[str]:
    """`module/name/fwd#0`: ordinals count per module, name and phase in graph order; `gather/fwd#0` at top level."""
    seen: Counter[str] = Counter()
    keys = []
    for node in order:
        if node.kind != "op":
            keys.append(f"{node.kind}:{node.label}")
            continue
        stem = "/".join(part for part in (node.module, short_name(node), "bwd" if node.phase == BACKWARD else "fwd") if part)
        keys.append(f"{stem}#{seen[stem]}")
        seen[stem] += 1
    return keys


def short_name(node: Draft) -> str:
    """`linear`, `attention`, `cast`, else the operator's own name without namespace and overload."""
    if node.op == EINSUM:
        return _product_name(node)
    if node.op in (REGION, REGION_BACKWARD):
        return f"region_{Region.loads(node.args[0]).function}" + ("_backward" if node.op == REGION_BACKWARD else "")
    return _NAMES.get(node.op) or node.op.split(".")[1].lstrip("_")


def _product_name(node: Draft) -> str:
    """Products by the letters that `einsum.linear` uses: `bsk,nk->bsn`, its input gradient and its weight gradient."""
    equation = node.args[0]
    left, out = equation.split("->")
    a, b = left.split(",")
    if node.phase != BACKWARD:
        return "linear" if b == "nk" and a.endswith("k") and out == f"{a[:-1]}n" else "matmul"
    if out == "nk" and a.endswith("n") and b == f"{a[:-1]}k":
        return "linear_weight_grad"
    if b == "nk" and a.endswith("n") and out == f"{a[:-1]}k":
        return "linear_input_grad"
    return "matmul_grad"


def _meta(use: Use) -> TensorMeta:
    meta = use[0].outputs[use[1]]
    assert meta is not None
    return meta


def _node(draft: Draft, key: str, index: Mapping[Draft, int]) -> Node:
    operands = tuple(TensorRef(index[producer], output) for producer, output in draft.operands)
    work = flops(draft.op, draft.args, [_meta(use) for use in draft.operands], draft.outputs) if draft.kind == "op" else 0.0
    return Node(
        key=key, op=draft.op, name=short_name(draft) if draft.kind == "op" else draft.kind, kind=draft.kind, phase=draft.phase,
        operands=operands, args=draft.args, kwargs=draft.kwargs, outputs=draft.outputs, module=draft.module, source=draft.source,
        flops=work, rematerialised=draft.rematerialised,
    )  # fmt: skip
