"""A small made-up decoder as a joint graph, and made-up plans for any graph. The prices are invented, the data looks real."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from planner.constraint import BoundaryPlacement, Constraint, MemoryBudget, Pin, resolve
from planner.graph import InitRule, Input, JointGraph, ModelRequest, Node, OperandRef, Parameter, TensorMeta, TensorRef
from planner.memory import MemoryBreakdown, MemoryPolicy
from planner.mesh import Mesh
from planner.placement import Placements, Replicate, Shard, parse
from planner.plan import Choice, Plan, Redistribution, SolveReport, Step
from planner.redistribution import Collective, CollectiveKind

MESH = Mesh(axis_names=("dp", "tp"), axis_sizes=(8, 8))
WQ = "layers.0.attention.wq/linear/fwd#0"
EINSUM = "planner.einsum.default"


class _Builder:
    """Collects nodes while the model is written down in program order."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.parameters: list[Parameter] = []
        self._ordinals: Counter[tuple[str, str, str]] = Counter()

    def leaf(self, kind: str, name: str, shape: tuple[int, ...], dtype: str = "float32", module: str = "") -> int:
        self.nodes.append(
            Node(
                key=f"{kind}:{name}",
                op=kind,
                name=kind,
                kind=kind,
                phase="forward",
                outputs=(TensorMeta(shape, dtype),),
                module=module,
            )
        )
        return len(self.nodes) - 1

    def op(self, module: str, name: str, shape: tuple[int, ...], *operands: int, phase: str = "fwd", op: str = "") -> int:
        ordinal = self._ordinals[module, name, phase]
        self._ordinals[module, name, phase] += 1
        prefix = f"{module}/" if module else ""
        self.nodes.append(
            Node(
                key=f"{prefix}{name}/{phase}#{ordinal}", op=op or f"aten.{name}.default", name=name, kind="op",
                phase="forward" if phase == "fwd" else "backward", operands=tuple(TensorRef(i, 0) for i in operands),
                args=tuple(OperandRef(i) for i in range(len(operands))), outputs=(TensorMeta(shape, "bfloat16"),), module=module,
                source="model.py:42",
            )
        )  # fmt: skip
        return len(self.nodes) - 1

    def linear(self, module: str, x: int, shape: tuple[int, ...], width: int) -> tuple[int, int]:
        weight = self.leaf("param", f"{module}.weight", (width, shape[-1]), module=module)
        low = self.op(module, "cast", (width, shape[-1]), weight, op="aten._to_copy.default")
        return self.op(module, "linear", (*shape[:-1], width), x, low, op=EINSUM), weight

    def gradient(self, weight: int, module: str, *operands: int) -> None:
        shape = self.nodes[weight].outputs[0].shape  # type: ignore[union-attr]
        product = self.op(module, "linear_weight_grad", shape, *operands, phase="bwd", op=EINSUM)
        cast = self.op(module, "cast", shape, product, phase="bwd", op="aten._to_copy.default")
        name = self.nodes[weight].key.partition(":")[2]
        self.parameters.append(
            Parameter(node=weight, names=(name,), gradient=TensorRef(cast, 0), init=InitRule("normal", (0.0, 0.02)))
        )


def small_graph(layers: int = 4, *, batch: int = 64, seq: int = 128, width: int = 64) -> JointGraph:
    """Attention and MLP reduced to their linears, with a backward for each."""
    b = _Builder()
    shape = (batch, seq, width)
    tokens = b.leaf("input", "tokens", (batch, seq), "int64")
    table = b.leaf("param", "tok_embeddings.weight", (256, width), module="tok_embeddings")
    x = b.op("tok_embeddings", "embedding", shape, table, tokens)
    kept: list[tuple[str, int, int]] = []
    for layer in range(layers):
        p = f"layers.{layer}"
        normed = b.op(f"{p}.attention_norm", "mul", shape, x)
        q, wq = b.linear(f"{p}.attention.wq", normed, shape, width)
        viewed = b.op(f"{p}.attention", "view", (batch, seq, 8, width // 8), q, op="aten.view.default")
        attended = b.op(f"{p}.attention", "attention", shape, viewed)
        out, wo = b.linear(f"{p}.attention.wo", attended, shape, width)
        x = b.op(p, "add", shape, x, out)
        kept += [(f"{p}.attention.wq", wq, normed), (f"{p}.attention.wo", wo, attended)]
    loss = b.op("", "cross_entropy", (), x, tokens)
    scalar = (TensorMeta((), "bfloat16"),)
    leaving = {"operands": (TensorRef(loss, 0),), "args": (OperandRef(0),), "outputs": scalar}
    b.nodes.append(Node(key="output:loss", op="output", name="output", kind="output", phase="forward", **leaving))
    b.nodes.append(Node(key="tangent:loss", op="tangent", name="tangent", kind="tangent", phase="backward", outputs=scalar))
    grad = b.op("", "cross_entropy_backward", shape, len(b.nodes) - 1, x, phase="bwd")
    for module, weight, saved in reversed(kept):
        b.gradient(weight, module, grad, saved)
        grad = b.op(module, "linear_input_grad", shape, grad, weight, phase="bwd", op=EINSUM)
    graph = JointGraph(
        request=ModelRequest(model="llama3-tiny", batch=batch, seq=seq, layers=layers), nodes=tuple(b.nodes),
        parameters=tuple(b.parameters), inputs=(Input(node=0, name="tokens", high=256),), loss=TensorRef(loss, 0),
    )  # fmt: skip
    graph.check()
    return graph


def legal(graph: JointGraph, key: str, mesh: Mesh = MESH) -> tuple[Placements, ...]:
    """Everything that shards the first two dims evenly, the made-up choice first."""
    node = graph.nodes[graph.node_by_key[key]]
    shape = next(m for m in node.outputs if m is not None).shape
    written = ["RR", "S(0)R", "RS(0)", "S(0)S(1)", "S(1)S(0)", "RS(1)", "S(1)R"]
    found = dict.fromkeys(fitted(text, mesh) for text in written)
    return tuple(p for p in found if all(not isinstance(s, Shard) or _even(shape, s.dim, mesh) for s in p))


def fitted(text: str, mesh: Mesh) -> Placements:
    """A placement written for two axes, on a mesh of any number: further axes replicate."""
    axes = re.findall(r"S\(\d+\)|R|P", text)
    return parse("".join([*axes, *["R"] * mesh.num_axes][: mesh.num_axes]), mesh)


def _even(shape: tuple[int, ...], dim: int, mesh: Mesh) -> bool:
    return dim < len(shape) and shape[dim] % max(mesh.axis_sizes) == 0


def made_up(graph: JointGraph, key: str, mesh: Mesh) -> Placements:
    node = graph.nodes[graph.node_by_key[key]]
    meta = next((m for m in node.outputs if m is not None), None)
    if meta is None or not meta.shape:
        return (Replicate(),) * mesh.num_axes
    wanted = fitted("S(0)S(1)" if node.kind == "param" or node.name == "linear" else "S(0)R", mesh)
    options = legal(graph, key, mesh)
    return wanted if wanted in options else options[0]


def make_plan(
    graph: JointGraph, mesh: Mesh = MESH, pins: tuple[Constraint, ...] = (), *, memory_bytes: int | None = None
) -> Plan:
    """Pinned tensors lie as pinned, the rest as `made_up`; every use that reads another placement is redistributed."""
    placed = {node.key: made_up(graph, node.key, mesh) for node in graph.nodes}
    for pin in (pin for pin in pins if isinstance(pin, Pin)):
        for ref in resolve(pin.where, graph):
            placed[graph.nodes[ref.node].key] = pin.placements
    choices = {
        node.key: Choice(
            operands=tuple(placed[graph.nodes[ref.node].key] for ref in node.operands),
            outputs=tuple(placed[node.key] if m is not None else None for m in node.outputs),
            compute_us=100.0 if node.name == "linear" else 5.0 if node.is_op else 0.0,
        )
        for node in graph.nodes
    }  # fmt: skip
    moves = tuple(_redistributions(graph, placed, mesh))
    compute = sum(choice.compute_us for choice in choices.values())
    total = compute + sum(r.us for r in moves) + 250.0 * len(pins)
    constraints: tuple[Constraint, ...] = (
        BoundaryPlacement(where="input:tokens", placements=fitted("S(0)R", mesh)),
        MemoryBudget(num_bytes=memory_bytes or 80 * 2**30), *pins,
    )  # fmt: skip
    return Plan(
        request=graph.request, structure_fingerprint=graph.structure_fingerprint, fingerprint=graph.fingerprint, mesh=mesh,
        hardware_name="h100_sxm", hardware_hash="0" * 16, memory_policy=MemoryPolicy(), constraints=constraints, choices=choices,
        redistributions=moves,
        memory=MemoryBreakdown(parameter_bytes=2**30, gradient_bytes=2**30, optimizer_bytes=2**31, activation_bytes=2**32),
        report=SolveReport(status="optimal", objective_us=total, bound_us=total, method="made up", seconds=0.1),
        num_ops=graph.num_ops, replicated_for_lack_of_a_rule=(), checkpointed=graph.checkpointed,
    )  # fmt: skip


def _redistributions(graph: JointGraph, placed: dict[str, Placements], mesh: Mesh) -> list[Redistribution]:
    found = []
    for node in graph.nodes:
        if node.name not in ("linear", "attention", "linear_weight_grad"):
            continue
        ref = node.operands[-1]
        producer = graph.nodes[ref.node]
        num_bytes = graph.meta(ref).num_bytes
        axis = 0 if node.name == "linear" else mesh.num_axes - 1
        step = Step(
            target=(Replicate(),) * mesh.num_axes, us=20.0 + num_bytes / 1e6,
            collective=Collective(kind=CollectiveKind.ALL_GATHER, axes=(axis,), full_bytes=num_bytes, dtype="bfloat16"),
        )  # fmt: skip
        found.append(
            Redistribution(
                tensor=(producer.key, ref.output), phase=node.phase, source=placed[producer.key], shared=False,
                consumers=((node.key, len(node.operands) - 1),), steps=(step,),
            )
        )  # fmt: skip
    for parameter in graph.parameters:
        if parameter.gradient is not None:
            found.append(_stored(graph, parameter, placed, mesh))
    return found


def _stored(graph: JointGraph, parameter: Parameter, placed: dict[str, Placements], mesh: Mesh) -> Redistribution:
    assert parameter.gradient is not None
    num_bytes = graph.meta(parameter.gradient).num_bytes
    collective = Collective(kind=CollectiveKind.REDUCE_SCATTER, axes=(0,), full_bytes=num_bytes, dtype="float32", reduce_op="sum")
    weight = graph.nodes[parameter.node].key
    return Redistribution(
        tensor=(graph.nodes[parameter.gradient.node].key, 0), phase="backward", source=fitted("PR", mesh), shared=False,
        consumers=((weight, -1),), steps=(Step(target=placed[weight], collective=collective, us=30.0),),
    )  # fmt: skip


def renamed(graph: JointGraph, name: str) -> JointGraph:
    """The same graph under another model name (a hostile one, say)."""
    return replace(graph, request=replace(graph.request, model=name))
