"""A plan in the words of FSDP2 and tensor parallelism, and the reasons why a plan has no such words: plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph import without_layer


@dataclass(frozen=True)
class Reason:
    """Why a plan cannot be a recipe: `where` is an op, a parameter or a mesh axis."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class ModuleRecipe:
    """A plan in terms of modules. Module paths of repeated layers have `*` for the number of the layer.

    Attributes:
        replicate, shard, tensor: mesh axes, ascending; size-1 axes are in none, an axis on which all is replicated neither.
        sequence_dim: the dim of the residual stream that the tensor axes split, None if it is whole.
        blocks: the repeated layers.
        column, row: modules whose products are split by output and by input features.
        embeddings: module of a table -> "rows" or "columns", what of it is split.
        norms: modules with whole parameters that compute on the split residual stream.
        sources: modules whose result column-wise products read: it is gathered once, or its gradients are summed there.
        shard_dims: parameter -> the dim that is split over the `shard` axes, where that is not dim 0.
        reshard: parameters are gathered again in backward.
        checkpointed: repeated layers whose forward runs again in backward.
        notes: where the recipe is known to differ from the plan.
    """

    replicate: tuple[int, ...] = ()
    shard: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()
    sequence_dim: int | None = None
    blocks: tuple[str, ...] = ()
    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    embeddings: tuple[tuple[str, str], ...] = ()
    norms: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    shard_dims: tuple[tuple[str, int], ...] = ()
    reshard: bool = True
    checkpointed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def told(reasons: Sequence[Reason]) -> tuple[str, ...]:
    """One line per reason; what is the same in several layers is said once, with their number."""
    alike = Counter((without_layer(r.where), without_layer(r.why)) for r in reasons)
    first = {(without_layer(r.where), without_layer(r.why)): r for r in reversed(reasons)}
    lines = []
    for reason in reasons:
        key = (without_layer(reason.where), without_layer(reason.why))
        if first[key] is reason:
            others = alike[key] - 1
            lines.append(str(reason) + (f" (and so in {others} other layer{'s' * (others > 1)})" if others else ""))
    return tuple(lines)
