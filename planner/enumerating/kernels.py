"""What one device computes under each strategy: kernel kind and local dims, read off the placements of an op's ports."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.enumerating.registry import FACTORY_OPS, OpSignature
from planner.graph import VIEW_OPS
from planner.strategy import KernelShapes, Lattice

Ports = list[tuple[Lattice, np.ndarray] | None]
"""Per port (outputs, then edge operands) its lattice and int32 [strategies] placement numbers; None for an unused output."""


def kernel_shapes(signature: OpSignature, ports: Ports) -> KernelShapes:
    """Every strategy's local work. Ops that are no product, attention, view or factory move bytes: `pointwise`."""
    if signature.op in VIEW_OPS:
        return KernelShapes("view", {})
    if signature.op in FACTORY_OPS:
        return KernelShapes("factory", {"output_bytes": _bytes(ports[:1])})
    maker = _PRODUCTS.get(signature.op)
    if maker is not None:
        return maker(signature, ports)
    outputs = len(signature.outputs)
    dims = {"operand_bytes": _bytes(ports[outputs:]), "output_bytes": _bytes(ports[:outputs])}
    return KernelShapes("pointwise", dims, dtype=_dtype(signature))


def _dtype(signature: OpSignature) -> str:
    return signature.operands[0].dtype if signature.operands else signature.output.dtype


def _bytes(ports: Ports) -> np.ndarray:
    """float64 [strategies, ports]"""
    count = max((len(port[1]) for port in ports if port is not None), default=0)
    columns = [np.zeros(count) if port is None else port[0].local_bytes[port[1]] for port in ports]
    return np.stack(columns, 1) if columns else np.zeros((count, 0))


def _local(ports: Ports, port: int) -> np.ndarray:
    """int64 [strategies, rank]: local shape at a port."""
    found = ports[port]
    assert found is not None
    return found[0].local_shapes[found[1]]


def _gemm(equation: str) -> Callable[[OpSignature, Ports], KernelShapes]:
    def shapes(signature: OpSignature, ports: Ports) -> KernelShapes:
        return _einsum_shapes(equation, signature, ports)

    return shapes


def _einsum_shapes(equation: str, signature: OpSignature, ports: Ports) -> KernelShapes:
    """Letters of both operands and the output are the batch; of the left (right) and output m (n); of both operands only k."""
    terms, out = equation.split("->")
    left, right = terms.split(",")
    sizes: dict[str, np.ndarray] = {}
    for term, port in ((left, 1), (right, 2)):
        shape = _local(ports, port)
        for position, letter in enumerate(term):
            # a letter sharded in one operand only (P beside R) has the smaller size in both
            sizes[letter] = np.minimum(sizes.get(letter, shape[:, position]), shape[:, position])
    count = len(_local(ports, 1))

    def product(letters: set[str]) -> np.ndarray:
        total = np.ones(count, np.int64)
        for letter in letters:
            total = total * sizes[letter]
        return total

    a, b, o = set(left), set(right), set(out)
    dims = {"batch": product(a & b & o), "m": product((a - b) & o), "n": product((b - a) & o), "k": product((a | b) - o)}
    return KernelShapes("gemm", dims, dtype=signature.operands[0].dtype, out_dtype=signature.output.dtype)


def _attention(signature: OpSignature, ports: Ports) -> KernelShapes:
    """q, k, v are [batch, heads, seq, head_dim]; in backward they follow the gradient of the output."""
    backward = signature.op.endswith("_backward.default")
    first = len(signature.outputs) + (1 if backward else 0)
    q, k = _local(ports, first), _local(ports, first + 1)
    dims = {"batch": q[:, 0], "heads": q[:, 1], "kv_heads": k[:, 1], "seq_q": q[:, 2], "seq_k": k[:, 2], "head_dim": q[:, 3]}
    flags = [arg for arg in signature.args if isinstance(arg, bool)]
    causal = bool(flags[0]) if flags else False
    return KernelShapes("attention", dims, dtype=signature.operands[0].dtype, fields={"causal": causal, "backward": backward})


_PRODUCTS: dict[str, Callable[[OpSignature, Ports], KernelShapes]] = {
    "planner.einsum.default": lambda signature, ports: _einsum_shapes(signature.args[0], signature, ports),
    "aten.mm.default": _gemm("mk,kn->mn"),
    "aten.bmm.default": _gemm("bmk,bkn->bmn"),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention,
}
