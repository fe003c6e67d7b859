"""One-axis rows -> strategies on the whole mesh: one row per axis, looked up in the lattices of the ports.

Arrays throughout, no Python per strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from planner.enumerating.kernels import kernel_shapes
from planner.enumerating.registry import OpSignature, Row
from planner.mesh import Mesh
from planner.placement import S0, R, from_code
from planner.strategy import BannedRow, KernelShapes, Lattice, Strategies


def expand(
    signature: OpSignature,
    rows: Sequence[Row],
    rule: str,
    ports: Sequence[Lattice | None],
    operand_slots: tuple[int, ...],
    mesh: Mesh,
    rows_of_axes: Sequence[Sequence[Row]] | None = None,
) -> Strategies:
    """Every combination of one row per axis that is even on all ports, once.

    Args:
        rows: outputs, then the operands in `operand_slots`.
        ports: a lattice per column of the rows, None for unused outputs.
        rows_of_axes: per mesh axis those of `rows` that may be taken there; None: all of them on every axis.
    """
    codes = np.array(rows, np.int8)
    # An axis of size 1 changes nothing: only the all-replicate row is taken there.
    replicate = [int(np.flatnonzero((codes == R).all(1))[0])]
    allowed = (
        [range(len(rows))] * mesh.num_axes if rows_of_axes is None else [[rows.index(row) for row in rs] for rs in rows_of_axes]
    )
    per_axis = [allowed[axis] if size > 1 else replicate for axis, size in enumerate(mesh.axis_sizes)]
    picks = np.array(list(itertools.product(*per_axis)), np.int32).reshape(-1, mesh.num_axes)
    chosen = codes[picks]
    columns = np.stack(
        [
            np.full(len(picks), -1, np.int32) if lattice is None else lattice.index(chosen[:, :, port]).astype(np.int32)
            for port, lattice in enumerate(ports)
        ],
        axis=1,
    )
    used = np.array([lattice is not None for lattice in ports])
    columns = np.unique(columns[(columns[:, used] >= 0).all(1)], axis=0)
    pairs = [None if lattice is None else (lattice, columns[:, port]) for port, lattice in enumerate(ports)]
    kernel = kernel_shapes(signature, pairs)
    columns.setflags(write=False)
    return Strategies(
        columns,
        len(signature.outputs),
        operand_slots,
        kernel,
        rule,
        tuple(_banned(rows_of_axes or [rows] * mesh.num_axes, ports, mesh)),
    )


def leaf_strategies(lattice: Lattice, *, replicated_only: bool = False, operand: bool = False) -> Strategies:
    """Stored tensors (parameters, buffers, inputs) and outputs: any placement without a pending sum, one strategy each."""
    stored = np.flatnonzero((lattice.codes == R).all(1) if replicated_only else ~lattice.is_partial).astype(np.int32)
    columns = np.stack([stored] * (2 if operand else 1), axis=1)
    columns.setflags(write=False)
    return Strategies(columns, 1, (0,) if operand else (), KernelShapes("leaf", {}), "leaf")


def _banned(rows_of_axes: Sequence[Sequence[Row]], ports: Sequence[Lattice | None], mesh: Mesh) -> Iterable[BannedRow]:
    for axis, size in enumerate(mesh.axis_sizes):
        for row in rows_of_axes[axis]:
            for port, code in enumerate(row):
                lattice = ports[port]
                if code < S0 or lattice is None or size == 1:
                    continue
                length = lattice.meta.shape[code - S0]
                if length % size:
                    uneven = f"dim {code - S0} of size {length} does not divide by {mesh.axis_names[axis]}={size}"
                    yield BannedRow(axis, row_text(row), f"{uneven}; {nearest_sizes(length, size)}")
                    break


def nearest_sizes(length: int, divisor: int) -> str:
    """`nearest sizes that work: 24, 32`"""
    below, above = length // divisor * divisor, -(-length // divisor) * divisor
    sizes = [str(s) for s in (below, above) if s > 0]
    return f"nearest sizes that work: {', '.join(sizes)}"


def row_text(row: Row) -> str:
    return ", ".join(str(from_code(code)) for code in row)
