"""Slower truth for op rules: cut the operands as a strategy says, run the op on every device's pieces alone, put the results
together as its output placement says, and compare with the op on the whole tensors. No process group.

The local program of an op differs from the plain call only in size arguments, masked look-ups and scaled means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.graph import DtypeRef, OperandRef
from planner.mesh import Mesh
from planner.placement import P_MAX, S0, P, R
from planner.region import REGION, REGION_BACKWARD
from planner.torch_compat import operator_by_name
from planner.tracing.dropout import OUTSIDE, kept, layer_key

F64 = torch.float64
Codes = Sequence[int]


@dataclass(frozen=True)
class Device:
    """One device of the mesh by its coordinates."""

    mesh: Mesh
    coordinates: tuple[int, ...]

    def shard(self, codes: Codes, dim: int) -> tuple[int, int]:
        """(which piece of `dim` this device holds, number of pieces)."""
        index, count = 0, 1
        for code, size, at in zip(codes, self.mesh.axis_sizes, self.coordinates, strict=True):
            if code == S0 + dim:
                index, count = index * size + at, count * size
        return index, count


def devices(mesh: Mesh) -> list[Device]:
    return [Device(mesh, at) for at in itertools.product(*map(range, mesh.axis_sizes))]


def split(x: torch.Tensor, codes: Codes, mesh: Mesh, generator: torch.Generator) -> dict[tuple[int, ...], torch.Tensor]:
    """coordinates -> piece; pending sums get random parts that add up."""
    pieces: dict[tuple[int, ...], torch.Tensor] = {(): x}
    for code, size in zip(codes, mesh.axis_sizes, strict=True):
        pieces = {
            (*at, i): part for at, whole in pieces.items() for i, part in enumerate(_cut(whole, int(code), size, generator))
        }
    return pieces


def _cut(x: torch.Tensor, code: int, size: int, generator: torch.Generator) -> list[torch.Tensor]:
    if code == R:
        return [x] * size
    if code == P:
        parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(size - 1)]
        return [*parts, x - sum(parts)]
    assert code >= S0 and x.shape[code - S0] % size == 0
    return [part.clone() for part in x.chunk(size, code - S0)]


def join(pieces: dict[tuple[int, ...], torch.Tensor], codes: Codes, mesh: Mesh) -> torch.Tensor | None:
    """The whole tensor, None if replicas differ."""
    for axis in reversed(range(mesh.num_axes)):
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for at, part in pieces.items():
            groups.setdefault(at[:axis], []).append(part)
        joined = {at: _merge(parts, int(codes[axis])) for at, parts in groups.items()}
        if any(part is None for part in joined.values()):
            return None
        pieces = {at: part for at, part in joined.items() if part is not None}
    return pieces[()]


def _merge(parts: list[torch.Tensor], code: int) -> torch.Tensor | None:
    if code == P:
        return torch.stack(parts).sum(0)
    if code == P_MAX:
        return torch.stack(parts).amax(0)
    if code == R:
        return parts[0] if all(same_numbers(parts[0], part, nan_is_nan=True) for part in parts) else None
    return torch.cat(parts, code - S0)


def same_numbers(a: torch.Tensor, b: torch.Tensor, *, nan_is_nan: bool = False) -> bool:
    """Equal shapes, and equal up to rounding in double precision."""
    wide = torch.complex128 if a.is_complex() or b.is_complex() else F64
    return a.shape == b.shape and torch.allclose(a.to(wide), b.to(wide), atol=1e-8, equal_nan=nan_is_nan)


def bind(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Arguments of a node with real tensors in place; floating dtypes become float64."""
    if isinstance(value, OperandRef):
        return tensors[value.index]
    if isinstance(value, DtypeRef):
        dtype = getattr(torch, value.name)
        return torch.complex128 if dtype.is_complex else F64 if dtype.is_floating_point else dtype
    if isinstance(value, tuple):
        return [bind(item, tensors) for item in value]
    return value


SIZED = {
    "aten.view.default": 1,
    "aten._unsafe_view.default": 1,
    "aten.expand.default": 1,
    "aten.new_zeros.default": 1,
    "aten.new_empty_strided.default": 1,
    "aten.full.default": 0,
    "aten.zeros.default": 0,
    "aten.ones.default": 0,
}
"""Ops whose argument at this position is the output's shape, which must become local."""


def run_local(op: str, args: list[Any], kwargs: dict[str, Any], out: Codes, operands: Sequence[Codes], device: Device) -> Any:
    """The op on one device's pieces."""
    call = operator_by_name(op) if not op.startswith("planner.") else None

    def local(shape: Sequence[int], codes: Codes) -> list[int]:
        return [size // device.shard(codes, dim)[1] for dim, size in enumerate(shape)]

    if op in SIZED:
        position = SIZED[op]
        args[position] = local(args[position], out)
    if op in ("aten.new_empty_strided.default", "aten.empty.memory_format"):
        return args[0].new_zeros(args[1]) if op != "aten.empty.memory_format" else torch.zeros(args[0])
    if op == "aten.convolution.default":
        args[8] //= device.shard(operands[1], 0)[1] if args[8] > 1 else 1
    if op == "aten.convolution_backward.default":
        pieces = device.shard(operands[2], 0)[1]
        args[9] //= pieces if args[9] > 1 else 1
        args[3] = [args[3][0] // pieces] if args[3] else args[3]
    if op in (REGION, REGION_BACKWARD):
        return operator_by_name(op)(*args, **kwargs)
    if op == "planner.dropout.default":
        return _dropped(*args, [device.shard(out, dim) for dim in range(args[0].dim())])
    if op == "planner.einsum.default":
        return torch.einsum(*args)
    if op == "planner.expert_product.default":
        x, weight, index, transposed = args
        own, inside = _own(index, weight.shape[0], device.shard(operands[1], 0)[0], _is_sharded(operands[1], 0))
        chosen = weight[own] if transposed else weight[own].transpose(-1, -2)
        return (x.unsqueeze(-2) @ chosen).squeeze(-2) * inside[..., None]
    if op == "planner.expert_weight_grad.default":
        a, b, index, experts = args
        piece, count = device.shard(out, 0)
        own, inside = _own(index, experts // count, piece, count > 1)
        sent = torch.nn.functional.one_hot(own, experts // count).to(a.dtype) * inside[..., None]
        return torch.einsum("tce,tcn,tck->enk", sent, a, b)
    if op.startswith("aten.arange"):
        assert call is not None
        whole = call(*args, **kwargs)
        index, count = device.shard(out, 0)
        return whole.chunk(count)[index]
    if op in ("aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default"):
        assert call is not None
        whole = call(*args, **kwargs)
        for dim in range(whole.dim()):
            index, count = device.shard(out, dim)
            whole = whole.chunk(count, dim)[index]
        return whole
    if op == "aten.embedding.default":
        index, inside = _own(args[1], args[0].shape[0], device.shard(operands[0], 0)[0], _is_sharded(operands[0], 0))
        return torch.nn.functional.embedding(index, args[0]) * inside[..., None]
    if op == "aten.embedding_dense_backward.default":
        grad, ids, rows, padding, scale = args
        piece, count = device.shard(out, 0)
        index, inside = _own(ids, rows // count, piece, count > 1)
        inside, padding = inside & (ids != padding), -1
        assert call is not None
        return call(grad * inside[..., None], index, rows // count, padding, scale)
    if op in ("aten.gather.default", "aten.scatter.value", "aten.scatter_add.default", "aten.scatter.src"):
        return _indexed(op, args, operands, device)
    if op.startswith("aten.mean"):
        assert call is not None
        scale = math.prod(
            size for code, size, given in zip(out, device.mesh.axis_sizes, operands[0], strict=True) if code == P and given >= S0
        )
        return call(*args, **kwargs) / scale
    assert call is not None
    return call(*args, **kwargs)


def _dropped(x: torch.Tensor, p: float, ordinal: int, shards: Sequence[tuple[int, int]]) -> torch.Tensor:
    """`shards`: (number of the piece, pieces) of each dim."""
    places = [index * size + torch.arange(size) for size, (index, _) in zip(x.shape, shards, strict=True)]
    shape = [size * count for size, (_, count) in zip(x.shape, shards, strict=True)]
    return torch.where(kept(p, layer_key(0, 0, OUTSIDE), ordinal, places, shape), x / (1 - p), 0.0)


def _is_sharded(codes: Codes, dim: int) -> bool:
    return any(code == S0 + dim for code in codes)


def _own(ids: torch.Tensor, rows: int, piece: int, sharded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Global ids -> ids of this piece, and which of them are in it."""
    if not sharded:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    local = ids - piece * rows
    inside = (local >= 0) & (local < rows)
    return torch.where(inside, local, 0), inside


def _indexed(op: str, args: list[Any], operands: Sequence[Codes], device: Device) -> torch.Tensor:
    x, ids = args[0], args[2]
    dim = args[1] % x.dim()
    piece, count = device.shard(operands[0], dim)
    index, inside = _own(ids, x.shape[dim], piece, count > 1)
    if op == "aten.gather.default":
        return x.gather(dim, index) * inside
    if op == "aten.scatter_add.default":
        return x.scatter_add(dim, index, args[3] * inside)
    spare = torch.cat((x, x.narrow(dim, 0, 1)), dim)  # foreign positions write into one more row, which is cut off again
    return spare.scatter(dim, torch.where(inside, index, x.shape[dim]), args[3]).narrow(dim, 0, x.shape[dim])
