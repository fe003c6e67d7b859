"""Small graphs and strategy spaces made by hand from the nouns, for tests of prices: no tracing, no rules."""

from __future__ import annotations

import numpy as np

from planner.graph import (
    BACKWARD,
    FORWARD,
    VIEW_OPS,
    InitRule,
    JointGraph,
    ModelRequest,
    Node,
    OperandRef,
    Parameter,
    TensorMeta,
    TensorRef,
)
from planner.mesh import Mesh
from planner.placement import P, Replicate
from planner.strategy import KernelShapes, Lattice, Strategies, StrategySpace

EINSUM = "planner.einsum.default"
CAST = "aten._to_copy.default"


class GraphMaker:
    """Collects nodes; each method returns the tensor it makes."""

    def __init__(self, precision: str = "as-traced") -> None:
        self.nodes: list[Node] = []
        self.gradients: dict[int, TensorRef] = {}
        self.request = ModelRequest(model="hand-made", precision=precision)

    def leaf(self, kind: str, name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorRef:
        meta = (TensorMeta(shape, dtype),)
        phase = BACKWARD if kind == "tangent" else FORWARD
        self.nodes.append(Node(key=f"{kind}:{name}", op=kind, name=kind, kind=kind, phase=phase, outputs=meta))
        return TensorRef(len(self.nodes) - 1, 0)

    def op(
        self, op: str, operands: tuple[TensorRef, ...], shape: tuple[int, ...], dtype: str = "float32", phase: str = FORWARD
    ) -> TensorRef:
        index = len(self.nodes)
        self.nodes.append(
            Node(
                key=f"m/{op}/{phase}#{index}", op=op, name=op, kind="op", phase=phase, operands=operands,
                args=tuple(map(OperandRef, range(len(operands)))), outputs=(TensorMeta(shape, dtype),),
            )
        )  # fmt: skip
        return TensorRef(index, 0)

    def output(self, tensor: TensorRef) -> TensorRef:
        meta = self.nodes[tensor.node].outputs
        key = f"output:{len(self.nodes)}"
        self.nodes.append(
            Node(key=key, op="output", name="output", kind="output", phase=FORWARD, operands=(tensor,), outputs=meta)
        )
        return TensorRef(len(self.nodes) - 1, 0)

    def graph(self) -> JointGraph:
        parameters = tuple(
            Parameter(node=i, names=(node.key,), gradient=self.gradients.get(i), init=InitRule("unknown"))
            for i, node in enumerate(self.nodes)
            if node.kind == "param"
        )
        graph = JointGraph(request=self.request, nodes=tuple(self.nodes), parameters=parameters, inputs=(), loss=TensorRef(0, 0))
        graph.check()
        return graph


def kernel_of(node: Node, operand_bytes: np.ndarray, output_bytes: np.ndarray, factory: bool) -> KernelShapes:
    """What enumeration would give; every matmul is 2 x 3 x 5 x 7, since its size plays no part in fusion."""
    count = len(output_bytes)
    if node.kind != "op":
        return KernelShapes("leaf", {})
    if node.op in VIEW_OPS:
        return KernelShapes("view", {})
    if factory:
        return KernelShapes("factory", {"output_bytes": output_bytes})
    if node.op == EINSUM:
        dims = {name: np.full(count, size) for name, size in zip(("batch", "m", "n", "k"), (2, 3, 5, 7), strict=True)}
        return KernelShapes("gemm", dims, dtype="bfloat16", out_dtype="bfloat16")
    return KernelShapes("pointwise", {"operand_bytes": operand_bytes, "output_bytes": output_bytes})


def space_of(graph: JointGraph, mesh: Mesh, *, dims: tuple[int, ...] = (0,)) -> StrategySpace:
    """Every placement of the output that R, P and S(d) over `dims` allow is a strategy; operands are replicated.

    Good enough for prices: which strategies are numerically right plays no part.
    """
    lattices: dict[object, Lattice] = {}
    lattice_of, strategies = {}, []
    for index in range(len(graph.nodes)):
        meta = graph.meta(TensorRef(index, 0))
        if meta not in lattices:
            fitting = tuple(d for d in dims if d < len(meta.shape))
            lattices[meta] = Lattice.build(meta, mesh, dims=fitting, partial_code=P if meta.is_floating else None)
        lattice_of[TensorRef(index, 0)] = list(lattices).index(meta)
    ordered = tuple(lattices.values())
    shared: dict[object, Strategies] = {}
    for index, node in enumerate(graph.nodes):
        lattice = ordered[lattice_of[TensorRef(index, 0)]]
        factory = node.op == "aten.full.default"
        operands = () if factory else node.operands
        key = (node.op, node.kind, lattice.meta, tuple(graph.meta(ref) for ref in operands))
        if key not in shared:
            rows = np.arange(len(lattice))
            replicated = [np.full(len(rows), ordered[lattice_of[ref]].find((Replicate(),) * mesh.num_axes)) for ref in operands]
            read = [np.full(len(rows), float(graph.meta(ref).num_bytes)) for ref in operands]
            operand_bytes = np.stack(read, 1) if read else np.zeros((len(rows), 0))
            columns = np.stack([rows, *replicated], 1).astype(np.int32)
            kernel = kernel_of(node, operand_bytes, lattice.local_bytes[rows][:, None], factory)
            shared[key] = Strategies(columns, 1, tuple(range(len(operands))), kernel, "own:test")
        strategies.append(shared[key])
    return StrategySpace(
        graph=graph, mesh=mesh, lattices=ordered, lattice_of=lattice_of, strategies=tuple(strategies),
        replicated_for_lack_of_a_rule=(),
    )  # fmt: skip
