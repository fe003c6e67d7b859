"""A hand-made training step and plan, small enough to read: two layers of a linear without activation, loss = sum of squares / B.

One mesh axis of 2 devices: the batch and the stored weights are sharded, weights are gathered once a phase, gradients are pending
sums that are reduced into the stored shards. No tracer, no solver, no torch.
"""

from __future__ import annotations

from planner.graph import (
    BACKWARD,
    FORWARD,
    InitRule,
    Input,
    JointGraph,
    ModelRequest,
    Node,
    OperandRef,
    Parameter,
    TensorMeta,
    TensorRef,
)  # fmt: skip
from planner.memory import MemoryBreakdown, MemoryPolicy
from planner.mesh import Mesh
from planner.placement import Placements, parse
from planner.plan import Choice, Plan, Redistribution, SolveReport, Step
from planner.redistribution import Collective, CollectiveKind

MESH = Mesh(axis_names=("dp",), axis_sizes=(2,))
S0, R, P = (parse(mark, MESH) for mark in ("S(0)", "R", "P"))


class _Builder:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def leaf(self, key: str, shape: tuple[int, ...], phase: str = FORWARD) -> TensorRef:
        kind, _, name = key.partition(":")
        module = name.rpartition(".")[0] if kind == "param" else ""
        meta = TensorMeta(shape, "float32")
        self.nodes.append(Node(key=key, op=kind, name=kind, kind=kind, phase=phase, outputs=(meta,), module=module))
        return TensorRef(len(self.nodes) - 1, 0)

    def op(
        self, key: str, op: str, operands: tuple[TensorRef, ...], args: tuple, shape: tuple[int, ...], module: str = ""
    ) -> TensorRef:  # fmt: skip
        phase = FORWARD if "/fwd" in key else BACKWARD
        name = key.split("/")[-2] if "/" in key else key
        meta = TensorMeta(shape, "float32")
        self.nodes.append(
            Node(
                key=key, op=op, name=name, kind="op", phase=phase, operands=operands, args=args, outputs=(meta,), module=module,
                source="toy.py:7", flops=1000.0,
            )
        )  # fmt: skip
        return TensorRef(len(self.nodes) - 1, 0)


def small_graph(*, batch: int = 64, dim: int = 48, layers: int = 2, size: str = "full") -> JointGraph:
    b = _Builder()
    x0, x1 = OperandRef(0), OperandRef(1)
    weights = [b.leaf(f"param:layers.{i}.fc.weight", (dim, dim)) for i in range(layers)]
    x = b.leaf("input:x", (batch, dim))
    hidden = [x]
    for i in range(layers):
        key = f"layers.{i}.fc/linear/fwd#0"
        operands = (hidden[-1], weights[i])
        hidden.append(b.op(key, "planner.einsum.default", operands, ("bk,nk->bn", x0, x1), (batch, dim), f"layers.{i}.fc"))
    square = b.op("mul/fwd#0", "aten.mul.Tensor", (hidden[-1], hidden[-1]), (x0, x1), (batch, dim))
    total = b.op("sum/fwd#0", "aten.sum.default", (square,), (x0,), ())
    loss = b.op("div/fwd#0", "aten.div.Scalar", (total,), (x0, batch), ())
    b.nodes.append(
        Node(key="output:loss", op="output", name="output", kind="output", phase=FORWARD, operands=(loss,),
             outputs=(TensorMeta((), "float32"),))
    )  # fmt: skip
    tangent = b.leaf("tangent:loss", (), BACKWARD)
    scaled = b.op("div/bwd#0", "aten.div.Scalar", (tangent,), (x0, batch), ())
    wide = b.op("expand/bwd#0", "aten.expand.default", (scaled,), (x0, (batch, dim)), (batch, dim))
    product = b.op("mul/bwd#0", "aten.mul.Tensor", (wide, hidden[-1]), (x0, x1), (batch, dim))
    gradient = b.op("mul/bwd#1", "aten.mul.Scalar", (product,), (x0, 2.0), (batch, dim))
    stored: dict[int, TensorRef] = {}
    for i in reversed(range(layers)):
        module = f"layers.{i}.fc"
        stored[i] = b.op(
            f"{module}/linear_weight_grad/bwd#0", "planner.einsum.default", (gradient, hidden[i]), ("bn,bk->nk", x0, x1),
            (dim, dim), module,
        )  # fmt: skip
        if i:
            gradient = b.op(
                f"{module}/linear_input_grad/bwd#0", "planner.einsum.default", (gradient, weights[i]), ("bn,nk->bk", x0, x1),
                (batch, dim), module,
            )  # fmt: skip
    parameters = tuple(
        Parameter(node=w.node, names=(f"layers.{i}.fc.weight",), gradient=stored[i], init=InitRule("normal", (0.0, 0.02)))
        for i, w in enumerate(weights)
    )
    graph = JointGraph(
        request=ModelRequest(model="toy", batch=batch, layers=layers, precision="as-traced", size=size),
        nodes=tuple(b.nodes), parameters=parameters, inputs=(Input(node=x.node, name="x"),), loss=loss,
        symbols=(("B", batch), ("D", dim)), class_name="toy.Toy",
    )  # fmt: skip
    graph.check()
    return graph


def small_plan(graph: JointGraph) -> Plan:
    layers = len(graph.parameters)
    choices = {node.key: _choice(node) for node in graph.nodes}
    moves = []
    for i in range(layers):
        weight = (f"param:layers.{i}.fc.weight", 0)
        moves.append(_move(graph, weight, FORWARD, S0, R, "all_gather", ((f"layers.{i}.fc/linear/fwd#0", 1),)))
        if i:
            moves.append(_move(graph, weight, BACKWARD, S0, R, "all_gather", ((f"layers.{i}.fc/linear_input_grad/bwd#0", 1),)))
        gradient = (f"layers.{i}.fc/linear_weight_grad/bwd#0", 0)
        moves.append(_move(graph, gradient, BACKWARD, P, S0, "reduce_scatter", ((weight[0], -1),)))
    moves.append(_move(graph, ("div/fwd#0", 0), FORWARD, P, R, "all_reduce", (("output:loss", 0),)))
    us = sum(move.us for move in moves) + len(choices)
    return Plan(
        request=graph.request, structure_fingerprint=graph.structure_fingerprint, fingerprint=graph.fingerprint, mesh=MESH,
        hardware_name="h100_sxm", hardware_hash="0" * 16, memory_policy=MemoryPolicy(), constraints=(), choices=choices,
        redistributions=tuple(moves), memory=MemoryBreakdown(parameter_bytes=1024),
        report=SolveReport(status="feasible", objective_us=us, bound_us=0.0, method="by hand", seconds=0.0),
        num_ops=graph.num_ops, replicated_for_lack_of_a_rule=(),
    )  # fmt: skip


def _choice(node: Node) -> Choice:
    outputs: tuple[Placements, ...] = (S0,)
    operands: tuple[Placements, ...] = (S0,) * len(node.operands)
    if node.kind == "tangent" or node.key in ("output:loss", "div/bwd#0"):
        outputs, operands = (R,), (R,) * len(node.operands)
    elif node.key in ("sum/fwd#0", "div/fwd#0"):
        outputs, operands = (P,), (S0,) if "sum" in node.key else (P,)
    elif node.key == "expand/bwd#0":
        operands = (R,)
    elif node.op == "planner.einsum.default":
        operands = (S0, S0) if "weight" in node.key else (S0, R)
        outputs = (P,) if "weight" in node.key else (S0,)
    return Choice(operands=operands, outputs=outputs, compute_us=1.0)


def _move(
    graph: JointGraph, tensor: tuple[str, int], phase: str, source: Placements, target: Placements, kind: str,
    consumers: tuple[tuple[str, int], ...],
) -> Redistribution:  # fmt: skip
    meta = graph.meta(TensorRef(graph.node_by_key[tensor[0]], tensor[1]))
    reduce_op = "sum" if source == P else ""
    collective = Collective(
        kind=CollectiveKind(kind), axes=(0,), full_bytes=meta.num_bytes, dtype=meta.dtype, reduce_op=reduce_op
    )
    return Redistribution(
        tensor=tensor, phase=phase, source=source, shared=False, consumers=consumers,
        steps=(Step(target=target, collective=collective, us=2.0),),
    )  # fmt: skip
