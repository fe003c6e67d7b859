"""Strategies: the legal ways to run each op on the mesh, as index arrays; hardware-free.

A tensor's legal placements form a `Lattice`; a strategy is one placement number per output and operand. Identical ops share
one `Strategies` object, so 32 layers cost no more than one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from planner.graph import JointGraph, TensorMeta, TensorRef
from planner.mesh import Mesh
from planner.placement import P_MAX, S0, P, Placements, R, codes_text, from_codes


@dataclass(frozen=True, eq=False)
class Lattice:
    """All even placements of tensors of one (shape, dtype, kind of pending reduction, useful dims) on a mesh.

    Attributes:
        meta: global shape and dtype.
        mesh: the mesh.
        codes: int8 [placements, axes], see `planner.placement`.
    """

    meta: TensorMeta
    mesh: Mesh
    codes: np.ndarray

    @classmethod
    def build(cls, meta: TensorMeta, mesh: Mesh, *, dims: tuple[int, ...], partial_code: int | None) -> Lattice:
        """Every combination of R, S(d) for d in `dims` and `partial_code` (P, P_MAX or None) that divides evenly.

        An axis of size 1 is only ever R.
        """
        choices = [R] + ([partial_code] if partial_code is not None else []) + [S0 + d for d in dims]
        per_axis = [choices if size > 1 else [R] for size in mesh.axis_sizes]
        every = np.array(list(itertools.product(*per_axis)), np.int8).reshape(-1, mesh.num_axes)
        shards = _shards(every, len(meta.shape), mesh)
        even = (np.array(meta.shape, np.int64) % shards == 0).all(1) if meta.shape else np.ones(len(every), bool)
        codes = every[even]
        codes.setflags(write=False)
        return cls(meta, mesh, codes)

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def local_shapes(self) -> np.ndarray:
        """int64 [placements, rank]: shape of one device's piece."""
        return np.array(self.meta.shape, np.int64) // _shards(self.codes, len(self.meta.shape), self.mesh)

    @cached_property
    def local_bytes(self) -> np.ndarray:
        """float64 [placements]: bytes of one device's piece."""
        return self.local_shapes.prod(1).astype(np.float64) * self.meta.itemsize

    @cached_property
    def is_partial(self) -> np.ndarray:
        """bool [placements]: some axis holds a pending reduction."""
        return ((self.codes == P) | (self.codes == P_MAX)).any(1)

    @cached_property
    def _weights(self) -> np.ndarray:
        return (S0 + max(len(self.meta.shape), 1)) ** np.arange(self.mesh.num_axes, dtype=np.int64)[::-1]

    @cached_property
    def _numbers(self) -> np.ndarray:
        numbers = np.full((S0 + max(len(self.meta.shape), 1)) ** self.mesh.num_axes, -1, np.int32)
        numbers[self.codes.astype(np.int64) @ self._weights] = np.arange(len(self.codes))
        return numbers

    def index(self, codes: np.ndarray) -> np.ndarray:
        """codes [..., axes] -> placement numbers, -1 where a placement is not in the lattice."""
        codes = np.asarray(codes).astype(np.int64)
        inside = (codes < S0 + max(len(self.meta.shape), 1)).all(-1)
        return np.where(inside, self._numbers[np.where(inside, codes @ self._weights, 0)], -1)

    def find(self, placements: Placements) -> int:
        """Number of one placement, -1 if it is not legal for this tensor."""
        codes = [p.code if size > 1 else R for p, size in zip(placements, self.mesh.axis_sizes, strict=True)]
        return int(self.index(np.array(codes)))

    @cached_property
    def _placements(self) -> tuple[Placements, ...]:
        return tuple(from_codes(codes) for codes in self.codes.tolist())

    def placements(self, number: int) -> Placements:
        return self._placements[number]

    def text(self, number: int) -> str:
        return codes_text(self.codes[number])


def _shards(codes: np.ndarray, rank: int, mesh: Mesh) -> np.ndarray:
    """int64 [placements, rank]: over how many devices each dim is split."""
    shards = np.ones((len(codes), rank), np.int64)
    for axis, size in enumerate(mesh.axis_sizes):
        for dim in range(rank):
            shards[codes[:, axis] == S0 + dim, dim] *= size
    return shards


@dataclass(frozen=True, eq=False)
class KernelShapes:
    """What one device computes under each strategy: a kind and local dims, no time.

    kind and dims (each int64/float64 [strategies]):
        `gemm`       batch, m, n, k            (operand dtype in `dtype`, `out_dtype`)
        `attention`  batch, heads, kv_heads, seq_q, seq_k, head_dim; fields causal (bool), backward (bool), library (optional)
        `scan`       batch, heads, seq         (chunked scan of linear attention, forward)
        `conv1d`     tokens, channels          (short causal convolution)
        `pointwise`  operand_bytes [strategies, operands], output_bytes [strategies, outputs]: read + written if nothing is fused;
                     field repeated (optional): in a loop over the same tensors
        `region`     flops, operand_bytes, output_bytes, sent_bytes [strategies, collectives]; field sent ((kind, axes), ...)
        `view`, `leaf`  nothing: no time
        `factory`    output_bytes: written only
    """

    kind: str
    dims: Mapping[str, np.ndarray]
    dtype: str = ""
    out_dtype: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BannedRow:
    """A one-axis row that the op's rule allows and this mesh or shape does not: shown as the reason for a missing placement."""

    axis: int
    row: str
    reason: str


@dataclass(frozen=True, eq=False)
class Strategies:
    """The strategies of one op signature.

    Attributes:
        columns: int32 [strategies, outputs + edge operands], placement numbers in the lattices of the ports. Ports that are
            unused outputs have -1.
        operand_slots: which operand each operand column belongs to. Factory ops read no data: they have none.
        kernel: local work under each strategy.
        rule: where the rows came from: `dtensor`, `own:<family>`, `none` (no rule: replicated) or `leaf`.
        banned: rows that were dropped, with the reason.
        kept: bool [strategies], those that run nothing and read no operand: the result is what the forward pass had, kept
            (`JointGraph.kept_from`). Their operand columns mean nothing. None: there are none.
    """

    columns: np.ndarray
    num_outputs: int
    operand_slots: tuple[int, ...]
    kernel: KernelShapes
    rule: str
    banned: tuple[BannedRow, ...] = ()
    kept: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.columns)

    def output(self, output: int) -> np.ndarray:
        """int32 [strategies]: placement number of an output."""
        return self.columns[:, output]

    def operand(self, slot: int) -> np.ndarray:
        """int32 [strategies]: placement number required of an operand."""
        return self.columns[:, self.num_outputs + self.operand_slots.index(slot)]

    def keep(self, mask: np.ndarray) -> Strategies:
        """Only the strategies in `mask`."""
        dims = {name: values[mask] for name, values in self.kernel.dims.items()}
        kernel = KernelShapes(self.kernel.kind, dims, self.kernel.dtype, self.kernel.out_dtype, self.kernel.fields)
        kept = None if self.kept is None else self.kept[mask]
        return Strategies(self.columns[mask], self.num_outputs, self.operand_slots, kernel, self.rule, self.banned, kept)

    def with_kept(self, lattice: Lattice) -> Strategies:
        """These, and behind them one kept strategy per placement of the output (in `lattice`) that is no pending sum."""
        made, first = np.unique(self.output(0), return_index=True)
        again = np.concatenate([np.arange(len(self)), first[~lattice.is_partial[made]]])
        repeated = self.keep(again)
        repeated.columns.setflags(write=False)
        return replace(repeated, kept=np.arange(len(again)) >= len(self))

    def is_kept(self, strategy: int) -> bool:
        return self.kept is not None and bool(self.kept[strategy])


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategySpace:
    """All strategies of all nodes.

    Attributes:
        lattices: distinct lattices; `lattice_of[tensor]` is a number in it.
        strategies: one entry per graph node; nodes with the same signature share the same object.
        replicated_for_lack_of_a_rule: keys of nodes whose op has no rule.
    """

    graph: JointGraph
    mesh: Mesh
    lattices: tuple[Lattice, ...]
    lattice_of: Mapping[TensorRef, int]
    strategies: tuple[Strategies, ...]
    replicated_for_lack_of_a_rule: tuple[str, ...]

    def lattice(self, ref: TensorRef) -> Lattice:
        return self.lattices[self.lattice_of[ref]]

    @property
    def num_strategies(self) -> int:
        return sum(map(len, self.strategies))
