"""Strategies of a node against its op on whole tensors: cut the operands as the strategy says, run every device's piece, join."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from planner.enumerating.registry import OpSignature
from planner.graph import JointGraph, Node, TensorMeta, TensorRef
from planner.placement import codes_text
from planner.strategy import Strategies, StrategySpace
from tests.oracles.simulated_shards import F64, bind, devices, join, run_local, same_numbers, split

MOST_PER_OP = 100
"""Strategies tried per op; more are drawn at random with a fixed seed."""

POSITIVE_OPS = ("log", "sqrt", "rsqrt", "pow", "div", "reciprocal", "log1p", "xlogy", "log2")
"""Ops whose operands must be away from zero; others get numbers of both signs."""


def wrong_strategies(space: StrategySpace, *, most_per_op: int = MOST_PER_OP) -> tuple[list[str], int]:
    """(the strategies of all distinct ops whose joined result differs from the whole op, number of strategies tried)."""
    rng, wrong, tried = np.random.default_rng(0), [], 0
    for node, strategies in distinct_ops(space):
        numbers = np.arange(len(strategies))
        chosen = numbers if len(numbers) <= most_per_op else rng.choice(numbers, most_per_op, replace=False)
        wrong += wrong_of_node(space, node, strategies, chosen)
        tried += len(chosen)
    return wrong, tried


def distinct_ops(space: StrategySpace) -> Iterator[tuple[int, Strategies]]:
    seen: set[OpSignature] = set()
    for index, node in enumerate(space.graph.nodes):
        if node.is_op and (signature := OpSignature.of(node, space.graph)) not in seen:
            seen.add(signature)
            yield index, space.strategies[index]


def wrong_of_node(space: StrategySpace, node: int, strategies: Strategies, chosen: np.ndarray) -> list[str]:
    """The strategies in `chosen` whose joined result differs from the whole op, in words."""
    generator = torch.Generator().manual_seed(node)
    graph_node, mesh = space.graph.nodes[node], space.mesh
    tensors = operands_of(space.graph, graph_node, generator)
    none = (0,) * mesh.num_axes
    kwargs = {name: bind(value, tensors) for name, value in graph_node.kwargs}
    arguments = bind(graph_node.args, tensors)
    whole = _results(run_local(graph_node.op, arguments, kwargs, none, [none] * len(tensors), devices(mesh)[0]))
    wrong = []
    for number in chosen:
        placed = [
            tuple(space.lattice(ref).codes[strategies.operand(slot)[number]]) if slot in strategies.operand_slots else none
            for slot, ref in enumerate(graph_node.operands)
        ]
        outs = [
            None if meta is None else tuple(space.lattice(TensorRef(node, o)).codes[strategies.output(o)[number]])
            for o, meta in enumerate(graph_node.outputs)
        ]
        pieces = [split(x, codes, mesh, generator) for x, codes in zip(tensors, placed, strict=True)]
        results = {}
        for device in devices(mesh):
            local = [p[device.coordinates] for p in pieces]
            local_kwargs = {name: bind(value, local) for name, value in graph_node.kwargs}
            made = run_local(graph_node.op, bind(graph_node.args, local), local_kwargs, outs[0] or (), placed, device)
            results[device.coordinates] = _results(made)
        for output, codes in enumerate(outs):
            if codes is None:
                continue
            got = join({at: r[output] for at, r in results.items()}, codes, mesh)
            want = whole[output]
            if got is None or not same_numbers(got, want, nan_is_nan=not tensors):
                text = f"{', '.join(map(codes_text, placed))} -> {codes_text(codes)}"
                wrong.append(f"{graph_node.op} {[tuple(t.shape) for t in tensors]}: {text} (output {output})")
    return wrong


def operands_of(graph: JointGraph, node: Node, generator: torch.Generator) -> list[torch.Tensor]:
    """Random operands that the op accepts."""
    metas = [graph.meta(ref) for ref in node.operands]
    positive = node.op.split(".")[1] in POSITIVE_OPS
    tensors = [_random(meta, _bound(node, metas), positive, generator) for meta in metas]
    if node.op == "aten._scaled_dot_product_flash_attention_for_cpu_backward.default":
        causal = bool(node.args[7])
        mask = tensors[6] if len(tensors) > 6 else None
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors[1:4], 0.0, causal, attn_mask=mask)
        return [*tensors[:4], out, lse, *tensors[6:]]  # an output and log-sum that belong to q, k, v
    if node.op == "aten.scatter.src":  # two values for one position: the result would be either
        dim = node.args[1] % tensors[0].dim()
        tensors[1] = torch.rand(tensors[0].shape, generator=generator).argsort(dim).narrow(dim, 0, tensors[1].shape[dim])
    return tensors


def _random(meta: TensorMeta, bound: int, positive: bool, generator: torch.Generator) -> torch.Tensor:
    if meta.dtype == "bool":
        return torch.rand(meta.shape, generator=generator) < 0.5
    if meta.dtype.startswith("complex"):
        return torch.randn(meta.shape, generator=generator, dtype=torch.complex128)
    if not meta.is_floating:
        return torch.randint(1 if positive else 0, bound, meta.shape, generator=generator)
    if positive:
        return torch.rand(meta.shape, generator=generator, dtype=F64) + 0.5
    return torch.randn(meta.shape, generator=generator, dtype=F64)


def _bound(node: Node, metas: list[TensorMeta]) -> int:
    """Exclusive upper bound of integers that are valid positions for the op."""
    if node.op == "aten.embedding.default":
        return metas[0].shape[0]
    if node.op == "aten.embedding_dense_backward.default":
        return int(node.args[2])
    if node.op == "planner.expert_product.default":
        return metas[1].shape[0]
    if node.op == "planner.expert_weight_grad.default":
        return int(node.args[3])
    if node.op.startswith(("aten.gather", "aten.scatter")):
        return metas[0].shape[node.args[1] % max(1, len(metas[0].shape))]
    if node.op.startswith(("aten.index", "aten._unsafe_index")):
        return min(size for size, item in zip(metas[0].shape, node.args[1], strict=False) if item is not None)
    return 16


def _results(made: object) -> list[torch.Tensor]:
    return list(made) if isinstance(made, (tuple, list)) else [made]  # type: ignore[list-item]
