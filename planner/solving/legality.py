"""Why a tensor cannot have a placement, whatever the user demands: sizes, the op's rule, or what its neighbours can serve."""

from __future__ import annotations

from collections.abc import Collection

from planner.graph import TensorRef
from planner.mesh import Mesh
from planner.placement import S0, Placements, R, num_shards, text, to_codes
from planner.reasons import Reason
from planner.strategy import Lattice, StrategySpace


def why_unavailable(space: StrategySpace, ref: TensorRef, placements: Placements, legal: Collection[int]) -> tuple[Reason, ...]:
    """Reasons in the user's words; empty if the placement is among the numbers that are legal."""
    lattice, strategies, key = space.lattice(ref), space.strategies[ref.node], space.graph.nodes[ref.node].key
    number = lattice.find(placements)
    if number < 0:
        return tuple(outside_lattice(lattice, placements, sample_dim(ref, space)))
    if number in legal:
        return ()
    wanted = text(placements)
    if not (strategies.output(ref.output) == number).any():
        source = f"the rule of {space.graph.nodes[ref.node].op}" if strategies.rule != "none" else f"{key} has no rule and"
        reasons = [Reason("rule", f"{source} never gives {wanted}")]
        for row in strategies.banned:
            reasons.append(Reason("divisibility", f"{row.row} on {space.mesh.axis_names[row.axis]}: {row.reason}"))
        return tuple(reasons)
    return (Reason("neighbours", f"{key} could give {wanted}, but an op around it can neither make nor take what that needs"),)


def sample_dim(ref: TensorRef, space: StrategySpace) -> int | None:
    """The dim of an input that counts samples."""
    return next((entry.batch_dim for entry in space.graph.inputs if entry.node == ref.node), None)


def outside_lattice(lattice: Lattice, placements: Placements, batch_dim: int | None) -> list[Reason]:
    """Why a placement is not among the even and useful ones; at least one reason."""
    mesh, shape = lattice.mesh, lattice.meta.shape
    codes = [code if size > 1 else R for code, size in zip(to_codes(placements), mesh.axis_sizes, strict=True)]
    offered = {int(code) for code in lattice.codes.ravel()}
    reasons: list[Reason] = []
    for dim in sorted({code - S0 for code in codes if code >= S0}):
        if dim >= len(shape):
            reasons.append(Reason("rule", f"it has {len(shape)} dims, so dim {dim} does not exist"))
            continue
        pieces = num_shards(codes, dim, mesh)
        if shape[dim] % pieces:
            reasons.append(Reason("divisibility", _uneven(dim, shape[dim], pieces, codes, mesh, is_batch=dim == batch_dim)))
        elif S0 + dim not in offered:
            reasons.append(
                Reason("rule", f"dim {dim} is never sharded here, since it reaches no matmul, attention, parameter or input")
            )
    if {code for code in codes if 0 < code < S0} - offered:
        reasons.append(Reason("rule", "the op never leaves that pending reduction (P is not produced)"))
    return reasons or [Reason("rule", "this combination is not among the placements of the tensor")]


def _uneven(dim: int, size: int, pieces: int, codes: list[int], mesh: Mesh, *, is_batch: bool) -> str:
    axes = [f"{name}={n}" for name, n, code in zip(mesh.axis_names, mesh.axis_sizes, codes, strict=True) if code == S0 + dim]
    over = axes[0] if len(axes) == 1 else f"{' x '.join(axes)} = {pieces}"
    below = size // pieces * pieces
    sizes = f"{below}, {below + pieces}" if below else str(pieces)
    axis = f"; sizes of the axis that work: {_divisors(size, pieces)}" if len(axes) == 1 else ""
    what = f"batch {size}" if is_batch else f"dim {dim} of size {size}"
    return f"{what} does not divide over {over}; nearest sizes that work: {sizes}{axis}"


def _divisors(size: int, near: int) -> str:
    """The divisors of `size` next to `near`, from below and above."""
    below = max(d for d in range(1, near) if size % d == 0)
    above = next((d for d in range(near + 1, min(size, 8 * near) + 1) if size % d == 0), None)
    return f"{below}" if above is None else f"{below}, {above}"
