"""What one device computes under each strategy: kernel kind and local dims, read off the placements of an op's ports."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.enumerating.registry import FACTORY_OPS, OpSignature
from planner.graph import VIEW_OPS
from planner.placement import S0
from planner.region import REGION, REGION_BACKWARD, Region
from planner.strategy import KernelShapes, Lattice

Ports = list[tuple[Lattice, np.ndarray] | None]
"""Per port (outputs, then edge operands) its lattice and int32 [strategies] placement numbers; None for an unused output."""


def kernel_shapes(signature: OpSignature, ports: Ports) -> KernelShapes:
    """Every strategy's local work. Ops that are no product, attention, region, view or factory move bytes: `pointwise`."""
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


def _expert_product(signature: OpSignature, ports: Ports) -> KernelShapes:
    """One product per expert. Assumed: every expert gets the same number of rows."""
    x, weight = _local(ports, 1), _local(ports, 2)
    k, n = (1, 2) if signature.args[3] else (2, 1)
    rows = x[:, 0] * x[:, 1] // signature.operands[1].shape[0]
    # a dim sharded in one operand only (P beside R) has the smaller size in both
    dims = {"batch": weight[:, 0], "m": np.maximum(rows, 1), "n": weight[:, n], "k": np.minimum(x[:, 2], weight[:, k])}
    return KernelShapes("gemm", dims, dtype=signature.operands[0].dtype, out_dtype=signature.output.dtype)


def _expert_weight_grad(signature: OpSignature, ports: Ports) -> KernelShapes:
    out, a = _local(ports, 0), _local(ports, 1)
    rows = a[:, 0] * a[:, 1] // signature.output.shape[0]
    dims = {"batch": out[:, 0], "m": out[:, 1], "n": out[:, 2], "k": np.maximum(rows, 1)}
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


def _convolution(signature: OpSignature, ports: Ports) -> KernelShapes:
    dims = _window_product(_local(ports, 0), _local(ports, 1), _local(ports, 2), signature, weight_slot=1, flags=6)
    return KernelShapes("gemm", dims, dtype=signature.operands[0].dtype, out_dtype=signature.output.dtype)


def _convolution_backward(signature: OpSignature, ports: Ports) -> KernelShapes:
    """One product of the forward's size for each gradient asked for: that of x, that of the weight."""
    dims = _window_product(_local(ports, 3), _local(ports, 4), _local(ports, 5), signature, weight_slot=2, flags=7)
    products = sum(meta is not None for meta in signature.outputs[:2])
    dtype = signature.operands[0].dtype
    return KernelShapes("gemm", {**dims, "batch": dims["batch"] * products}, dtype=dtype, out_dtype=dtype)


def _window_product(
    out: np.ndarray, x: np.ndarray, weight: np.ndarray, signature: OpSignature, *, weight_slot: int, flags: int
) -> dict[str, np.ndarray]:
    """A convolution as an implicit product per group: pixels of the batch by channels out, over channels in times window.

    out, x [strategies, batch, channels, *pixels], weight [strategies, out, in / groups, *window] are local shapes; a transposed
    convolution has [in, out / groups, *window] and one product per pixel of x. Where channels of a grouped convolution are split,
    it is by whole groups.
    """
    transposed, groups = bool(signature.args[flags]), int(signature.args[flags + 2])
    here = np.full(len(weight), 1, np.int64)
    if groups > 1:
        here = groups * weight[:, 0] // signature.operands[weight_slot].shape[0]
    pixels = x if transposed else out
    channels_out, channels_in = (weight[:, 1], weight[:, 0] // here) if transposed else (weight[:, 0] // here, weight[:, 1])
    m = pixels[:, 0] * pixels[:, 2:].prod(1)
    return {"batch": here, "m": m, "n": channels_out, "k": channels_in * weight[:, 2:].prod(1)}


def _region(signature: OpSignature, ports: Ports) -> KernelShapes:
    """Counted FLOPs and stated communication of a user's region, shared by the devices along the axes that split it."""
    region = Region.loads(signature.args[0])
    backward = signature.op == REGION_BACKWARD
    used = [port for port in ports if port is not None]
    mesh, count = used[0][0].mesh, len(used[0][1])
    shares = np.ones(count)
    for axis, size in enumerate(mesh.axis_sizes):
        split = np.any([lattice.codes[numbers][:, axis] >= S0 for lattice, numbers in used], axis=0)
        shares *= np.where(split, size, 1)
    stated = [c for c in region.stated(backward=backward) if all(name in mesh.axis_names for name in c.axes)]
    outputs = len(signature.outputs)
    dims = {
        "flops": (region.backward_flops if backward else region.flops) / shares,
        "operand_bytes": _bytes(ports[outputs:]),
        "output_bytes": _bytes(ports[:outputs]),
        "sent_bytes": np.array([c.whole_bytes for c in stated]) / shares[:, None],
    }
    sent = tuple((c.kind, tuple(sorted(mesh.axis(name) for name in c.axes))) for c in stated)
    return KernelShapes("region", dims, dtype=_dtype(signature), fields={"sent": sent})


_PRODUCTS: dict[str, Callable[[OpSignature, Ports], KernelShapes]] = {
    "planner.einsum.default": lambda signature, ports: _einsum_shapes(signature.args[0], signature, ports),
    "planner.expert_product.default": _expert_product,
    "planner.expert_weight_grad.default": _expert_weight_grad,
    "aten.mm.default": _gemm("mk,kn->mn"),
    "aten.bmm.default": _gemm("bmk,bkn->bmn"),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    REGION: _region,
    REGION_BACKWARD: _region,
}
