"""User-controlled regions: the rows are the user's contract, different from one mesh axis to the next.

`rows` lists all of them; `rows_of_axes` says which ones a given mesh axis may take.
"""

from __future__ import annotations

from planner.enumerating.registry import OpSignature, Row, rule
from planner.errors import InputError
from planner.mesh import Mesh
from planner.region import REGION, REGION_BACKWARD, Region, RegionRow

REGION_OPS = frozenset({REGION, REGION_BACKWARD})


@rule(REGION, REGION_BACKWARD)
def rows(signature: OpSignature) -> list[Row]:
    region = contract(signature)
    return [row_of(signature, row) for row in (region.copies, *region.rows, *region.elsewhere)]


def contract(signature: OpSignature) -> Region:
    return Region.loads(signature.args[0])


def row_of(signature: OpSignature, row: RegionRow) -> Row:
    return contract(signature).ports(row, None if signature.op == REGION else signature.args[3])


def rows_of_axes(signature: OpSignature, mesh: Mesh) -> list[list[Row]]:
    """Per mesh axis the rows that the contract allows there. Raises InputError if the contract does not fit the mesh."""
    return [[row_of(signature, row) for row in choices] for choices in contract(signature).choices(mesh)]


def no_strategy(signature: OpSignature, mesh: Mesh, reasons: list[str]) -> InputError:
    """The contract splits something that this mesh does not divide."""
    region = contract(signature)
    return InputError(
        f"the region {region.module}.{region.function} cannot run on the mesh {mesh} as its contract says: {'; '.join(reasons)}",
        hint="Choose axis sizes that divide, or change the placements of its local_map.",
    )
