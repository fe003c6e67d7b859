"""User-controlled regions: a function of the user that the plan keeps whole, with placements fixed by the user's contract.

A region is one op forward and one op backward. What happens inside, communication included, is the user's; everything around it
is planned. The backward op runs the function once more and differentiates it, so nothing of its inside is kept from forward to
backward, only its operands.

The contract is stated per mesh axis. An axis that it names takes exactly its row; on every other axis the region runs on copies,
or in one of the rows that the user allows `elsewhere`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.errors import InputError
from planner.mesh import Mesh
from planner.placement import S0, P, R, codes_text

REGION, REGION_BACKWARD = "planner.region.default", "planner.region_backward.default"
Codes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RegionRow:
    """Placement codes on one mesh axis, one per tensor operand, per gradient of an operand, per output."""

    operands: Codes
    gradients: Codes
    outputs: Codes

    @property
    def splits(self) -> bool:
        """Devices along the axis share the work."""
        return any(code >= S0 for code in (*self.operands, *self.outputs))

    def __str__(self) -> str:
        """`S(0), R -> S(0); gradients S(0), P`"""
        lists = (", ".join(codes_text([code]) for code in codes) for codes in (self.operands, self.outputs, self.gradients))
        operands, outputs, gradients = lists
        return f"{operands} -> {outputs}; gradients {gradients}"


@dataclass(frozen=True, kw_only=True)
class StatedCollective:
    """Communication inside the region, as its author states it.

    Attributes:
        kind: `all_to_all`, `all_gather`, `reduce_scatter` or `all_reduce`.
        axes: names of mesh axes.
        whole_bytes: of the tensor that is exchanged, over all devices together; one device moves its share.
    """

    kind: str
    axes: tuple[str, ...]
    whole_bytes: float
    backward: bool

    def __str__(self) -> str:
        return f"{self.kind}@{'+'.join(self.axes)} of {self.whole_bytes / 1e9:.3g} GB"


@dataclass(frozen=True, kw_only=True)
class Region:
    """A function of the user's and its contract.

    Attributes:
        module, function: what the exported file imports.
        axes: mesh axes that `rows` speak about; None if they are stated by position, one for every axis of the mesh.
        constants: ((position, value), ...) of the positional arguments that are no tensors.
        keywords: keyword arguments, all of them constants.
        takes_mesh: the function has a parameter `mesh` and gets the device mesh of the exported file.
        without_gradient: numbers of the outputs that hold integers.
        flops, backward_flops: of the whole (unsharded) function, counted while it was traced; backward includes the forward run
            again.
        collectives: what the user states about communication inside; None: nothing is stated, so its time is unknown.
    """

    module: str
    function: str
    axes: tuple[str, ...] | None
    rows: tuple[RegionRow, ...]
    elsewhere: tuple[RegionRow, ...] = ()
    constants: tuple[tuple[int, Any], ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    takes_mesh: bool = False
    without_gradient: tuple[int, ...] = ()
    flops: float = 0.0
    backward_flops: float = 0.0
    collectives: tuple[StatedCollective, ...] | None = None

    @property
    def num_operands(self) -> int:
        return len(self.rows[0].operands)

    def choices(self, mesh: Mesh) -> tuple[tuple[RegionRow, ...], ...]:
        """Per mesh axis the rows in which the region may run there.

        Raises:
            InputError: the contract names an axis that the mesh lacks, or states another number of rows than the mesh has axes.
        """
        where = f"the contract of the region {self.module}.{self.function}"
        if self.axes is None and len(self.rows) != mesh.num_axes:
            raise InputError(
                f"{where} states placements for {len(self.rows)} mesh axes by position, the mesh {mesh} has {mesh.num_axes}",
                hint=f"Plan on a mesh of {len(self.rows)} axes, or name the axes of the contract in plan_regions().",
            )
        names = mesh.axis_names if self.axes is None else self.axes
        lacking = [name for name in names if name not in mesh.axis_names]
        if lacking:
            raise InputError(
                f"{where} names the mesh axis {', '.join(lacking)}, which the mesh {mesh} does not have",
                hint=f"Give a mesh with the axes {', '.join(names)}, for example --mesh "
                + ",".join(f"{name}=2" for name in dict.fromkeys((*mesh.axis_names, *lacking))),
            )
        named = dict(zip(names, self.rows, strict=True))
        free = (self.copies, *self.elsewhere)
        return tuple((named[name],) if name in named else free for name in mesh.axis_names)

    @property
    def copies(self) -> RegionRow:
        row = self.rows[0]
        return RegionRow(operands=(R,) * len(row.operands), gradients=(R,) * len(row.gradients), outputs=(R,) * len(row.outputs))

    def output_gradients(self, row: RegionRow) -> Codes:
        """How the gradients of the outputs arrive: as the outputs, and whole where an output is a pending sum."""
        given = [code for number, code in enumerate(row.outputs) if number not in self.without_gradient]
        return tuple(R if code == P else code for code in given)

    def ports(self, row: RegionRow, wanted: Sequence[int] | None) -> Codes:
        """The row as codes of the op's outputs, then operands. Forward (`wanted` None): outputs, operands. Backward: gradients of
        the wanted operands, then gradients of the outputs that have one, then operands."""
        if wanted is None:
            return (*row.outputs, *row.operands)
        return (*(row.gradients[number] for number in wanted), *self.output_gradients(row), *row.operands)

    @property
    def alike(self) -> tuple[RegionRow, ...]:
        """Rows whose splits mean one thing: those allowed on any axis. The row of a named axis may split tokens and experts at
        once, and speaks for itself only where there is no other."""
        return self.elsewhere or self.rows

    def stated(self, *, backward: bool) -> tuple[StatedCollective, ...]:
        """Communication of the op in one phase: backward runs forward once more."""
        return tuple(c for c in self.collectives or () if backward or not c.backward)

    def describe(self) -> str:
        """One line: `sample_models.x.exchange, ep: S(0), R -> S(0); ...; inside all_to_all@ep of 0.5 GB (stated)`."""
        names = self.axes or tuple(f"axis {number}" for number in range(len(self.rows)))
        fixed = "; ".join(f"{name}: {row}" for name, row in zip(names, self.rows, strict=True))
        if self.collectives is None:
            inside = "communication inside unknown"
        elif not self.collectives:
            inside = "no communication inside (stated)"
        else:
            inside = f"inside {', '.join(dict.fromkeys(map(str, self.collectives)))} (stated)"
        return f"{self.module}.{self.function}, {fixed}; {inside}"

    # ---- text: the first argument of the region's two ops ---------------------------------------------------------------
    def dumps(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def loads(cls, written: str) -> Region:
        data: dict[str, Any] = json.loads(written)
        stated = data.pop("collectives")
        return cls(
            axes=None if (axes := data.pop("axes")) is None else tuple(axes),
            rows=_rows(data.pop("rows")),
            elsewhere=_rows(data.pop("elsewhere")),
            without_gradient=tuple(data.pop("without_gradient")),
            constants=tuple((position, value) for position, value in data.pop("constants")),
            keywords=tuple((name, value) for name, value in data.pop("keywords")),
            collectives=None if stated is None else tuple(StatedCollective(**{**c, "axes": tuple(c["axes"])}) for c in stated),
            **data,
        )


def _rows(data: list[Mapping[str, list[int]]]) -> tuple[RegionRow, ...]:
    return tuple(RegionRow(**{name: tuple(codes) for name, codes in row.items()}) for row in data)
