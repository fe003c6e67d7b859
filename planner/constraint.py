"""What a user demands of a plan. Every constraint says itself in one sentence, can be checked on a plan, and travels in plan
files.

WHERE, in this order: a parameter or buffer name (`layers.3.attention.wq.weight`: its stored placement; gradient and tied
names follow) · a module path (`layers.*.attention.wq`: its last forward output) · a full op key
(`layers.3.attention.wq/linear/fwd#0`) · `input:NAME`, `output:NAME`. `*` is one dotted component, `**` any number.

Written constraints may end in ` # a note`, which travels along.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.address import resolve
from planner.dims import DimRoles
from planner.errors import InvalidConstraintError
from planner.graph import TensorRef
from planner.mesh import Mesh
from planner.placement import Placements, parse, text
from planner.recipes import Expansion, Recipe
from planner.redistribution import Collective, CollectiveKind
from planner.strategy import StrategySpace
from planner.units import format_gib

ANY = "*"


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """A plan as constraints look at it: strategy numbers per node, the collectives it carries out, bytes on a device."""

    space: StrategySpace
    strategy: Sequence[int] | np.ndarray
    collectives: Sequence[Collective]
    peak_bytes: int

    def number(self, ref: TensorRef) -> int:
        """Placement number of a tensor as its op makes it."""
        return int(self.space.strategies[ref.node].output(ref.output)[self.strategy[ref.node]])


def _numbers(where: str, facts: Facts) -> Iterable[tuple[TensorRef, int]]:
    return ((ref, facts.number(ref)) for ref in resolve(where, facts.space.graph))


@dataclass(frozen=True, kw_only=True)
class Pin:
    """The tensors at `where` have exactly these placements."""

    where: str
    placements: Placements
    note: str = ""

    def describe(self) -> str:
        return f"pin {self.where} = {text(self.placements)}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "pin", "where": self.where, "placements": text(self.placements), "note": self.note}

    def holds(self, facts: Facts) -> bool:
        return all(number == facts.space.lattice(ref).find(self.placements) for ref, number in _numbers(self.where, facts))

    @classmethod
    def parse(cls, written: str, mesh: Mesh) -> Pin:
        """`layers.*.attention.wq=S(0)R`"""
        asked, note = split_note(written)
        where, options = _where_and_options(asked, mesh, "pin")
        if len(options) != 1:
            raise InvalidConstraintError(f"pin {written!r} names several placements", hint="Use --allow to leave a choice.")
        return cls(where=where, placements=options[0], note=note)


@dataclass(frozen=True, kw_only=True)
class Allow:
    """The tensors at `where` have one of these placements (each its own)."""

    where: str
    options: tuple[Placements, ...]
    note: str = ""

    def describe(self) -> str:
        return f"allow {self.where} = {'|'.join(map(text, self.options))}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "allow", "where": self.where, "options": [text(p) for p in self.options], "note": self.note}

    def holds(self, facts: Facts) -> bool:
        return all(number in _found(self.options, ref, facts) for ref, number in _numbers(self.where, facts))

    @classmethod
    def parse(cls, written: str, mesh: Mesh) -> Allow:
        """`layers.*.attention.wq=S(0)R|RR`"""
        asked, note = split_note(written)
        where, options = _where_and_options(asked, mesh, "allow")
        return cls(where=where, options=options, note=note)


@dataclass(frozen=True, kw_only=True)
class Forbid:
    """The tensors at `where` have none of these placements."""

    where: str
    options: tuple[Placements, ...]
    note: str = ""

    def describe(self) -> str:
        return f"forbid {self.where} = {'|'.join(map(text, self.options))}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "forbid", "where": self.where, "options": [text(p) for p in self.options], "note": self.note}

    def holds(self, facts: Facts) -> bool:
        return not any(number in _found(self.options, ref, facts) for ref, number in _numbers(self.where, facts))


@dataclass(frozen=True, kw_only=True)
class ForbidCollective:
    """No collective of this kind in a group that includes this mesh axis (`dp+tp`: all of these); `*` is every kind or axis."""

    collective: str
    axis: str
    note: str = ""

    def describe(self) -> str:
        return f"forbid {self.collective}@{self.axis}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "forbid_collective", "collective": self.collective, "axis": self.axis, "note": self.note}

    def forbids(self, kind: str | None, axes: Sequence[int], mesh: Mesh) -> bool:
        """`kind` None is a local move, never forbidden."""
        if kind is None or self.collective not in (ANY, kind):
            return False
        return self.axis == ANY or all(mesh.axis(name) in axes for name in self.axis.split("+"))

    def holds(self, facts: Facts) -> bool:
        return not any(self.forbids(str(c.kind), c.axes, facts.space.mesh) for c in facts.collectives)


@dataclass(frozen=True, kw_only=True)
class SamePlacement:
    """All tensors at `where` (several, by `*`) have the same placement, whichever."""

    where: str
    note: str = ""

    def describe(self) -> str:
        return f"tie {self.where}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "tie", "where": self.where, "note": self.note}

    def holds(self, facts: Facts) -> bool:
        return len({tuple(facts.space.lattice(ref).codes[number]) for ref, number in _numbers(self.where, facts)}) <= 1

    @classmethod
    def parse(cls, written: str) -> SamePlacement:
        """`layers.*.attention.wq`"""
        where, note = split_note(written)
        if not where or "=" in where:
            raise InvalidConstraintError(f"tie {written!r} is not a WHERE", hint="For example --tie 'layers.*.attention.wq'.")
        return cls(where=where, note=note)


@dataclass(frozen=True, kw_only=True)
class ReshardAfterForward:
    """What becomes of parameters as the forward pass reads them (cast, gathered). `always`: backward casts and gathers them
    again; `never`: all are kept for it. Left free, the planner keeps what pays and fits."""

    when: str
    note: str = ""

    def describe(self) -> str:
        return f"reshard after forward: {self.when}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "reshard_after_forward", "when": self.when, "note": self.note}

    def masks(self, space: StrategySpace) -> dict[int, np.ndarray]:
        """graph node -> bool over its strategies."""
        if self.when not in RESHARD:
            raise InvalidConstraintError(
                f"{self.when!r} does not say when parameters are resharded", hint=f"It is one of {', '.join(RESHARD)}."
            )
        found = {node: kept for node in space.graph.kept_from if (kept := space.strategies[node].kept) is not None}
        return {node: kept if self.when == "never" else ~kept for node, kept in found.items()}

    def holds(self, facts: Facts) -> bool:
        return all(mask[facts.strategy[node]] for node, mask in self.masks(facts.space).items())


RESHARD = ("always", "never")


@dataclass(frozen=True, kw_only=True)
class BoundaryPlacement:
    """What the data loader delivers or how an output leaves: like a pin, but stated by the model rather than the user."""

    where: str
    placements: Placements

    def describe(self) -> str:
        return f"boundary {self.where} = {text(self.placements)}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "boundary", "where": self.where, "placements": text(self.placements)}

    def holds(self, facts: Facts) -> bool:
        return all(number == facts.space.lattice(ref).find(self.placements) for ref, number in _numbers(self.where, facts))


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Parameters + gradients + optimizer state + saved activations + kept parameters of a device stay within `num_bytes`."""

    num_bytes: int

    def describe(self) -> str:
        return f"memory budget {format_gib(self.num_bytes)}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "memory", "num_bytes": self.num_bytes}

    def holds(self, facts: Facts) -> bool:
        return facts.peak_bytes <= self.num_bytes


Constraint = (
    Pin | Allow | Forbid | ForbidCollective | SamePlacement | Recipe | ReshardAfterForward | BoundaryPlacement | MemoryBudget
)


def holds(constraint: Constraint, facts: Facts) -> bool:
    """Whether a plan satisfies a constraint: the definition that both solvers are tested against."""
    if isinstance(constraint, Recipe):
        masks = Expansion(constraint, DimRoles.of(facts.space)).masks()
        return all(mask[facts.strategy[node]] for node, mask in masks.items())
    return constraint.holds(facts)


def from_json(data: Mapping[str, Any], mesh: Mesh) -> Constraint:
    kind, note = data.get("kind"), data.get("note", "")
    if kind == "pin":
        return Pin(where=data["where"], placements=parse(data["placements"], mesh), note=note)
    if kind in ("allow", "forbid"):
        options = tuple(parse(option, mesh) for option in data["options"])
        return (Allow if kind == "allow" else Forbid)(where=data["where"], options=options, note=note)
    if kind == "forbid_collective":
        return ForbidCollective(collective=data["collective"], axis=data["axis"], note=note)
    if kind == "tie":
        return SamePlacement(where=data["where"], note=note)
    if kind == "recipe":
        return Recipe(name=data["name"], axes=tuple(data["axes"]), note=note, may_keep=bool(data.get("may_keep", False)))
    if kind == "reshard_after_forward":
        return ReshardAfterForward(when=data["when"], note=note)
    if kind == "boundary":
        return BoundaryPlacement(where=data["where"], placements=parse(data["placements"], mesh))
    if kind == "memory":
        return MemoryBudget(num_bytes=int(data["num_bytes"]))
    raise InvalidConstraintError(
        f"unknown constraint kind {kind!r}",
        hint="Kinds are pin, allow, forbid, forbid_collective, tie, recipe, reshard_after_forward, boundary, memory.",
    )


# ---- as users write them ------------------------------------------------------------------------------------------
def split_note(written: str) -> tuple[str, str]:
    """`WHERE=PLACEMENTS # note` -> the constraint, the note. Keys hold a `#` too, but no blank before it."""
    asked, _, note = (part.strip() for part in re.sub(r"\s+#\s*", "\n", written.strip(), count=1).partition("\n"))
    return asked, note


def parse_forbid(written: str, mesh: Mesh) -> Forbid | ForbidCollective:
    """`all_to_all@dp` (kind or axis may be `*`, `dp+tp` is any group with both) or `WHERE=PLACEMENTS`"""
    asked, note = split_note(written)
    collective, at, axis = (part.strip() for part in asked.partition("@"))
    if not at or "=" in asked:
        where, options = _where_and_options(asked, mesh, "forbid")
        return Forbid(where=where, options=options, note=note)
    kinds = [str(kind) for kind in CollectiveKind]
    if collective not in (ANY, *kinds):
        raise InvalidConstraintError(
            f"forbid {written!r}: there is no collective {collective!r}", hint=f"Kinds are {', '.join(kinds)}, or * for all."
        )
    for name in () if axis == ANY else axis.split("+"):
        mesh.axis(name)
    return ForbidCollective(collective=collective, axis=axis, note=note)


def parse_recipe(written: str, mesh: Mesh) -> Recipe:
    """`fsdp_tp_sp:dp,tp`; without axes all those of the mesh, in order"""
    asked, note = split_note(written)
    return Recipe.parse(asked, mesh, note)


def _where_and_options(asked: str, mesh: Mesh, flag: str) -> tuple[str, tuple[Placements, ...]]:
    where, equals, written = asked.rpartition("=")
    if not equals or not where.strip():
        example = f"--{flag} 'layers.*.attention.wq=S(0)R" + ("'" if flag == "pin" else "|RR'")
        raise InvalidConstraintError(f"{flag} {asked!r} is not WHERE=PLACEMENTS", hint=f"For example {example}.")
    return where.strip(), tuple(parse(option, mesh) for option in written.split("|"))


def _found(options: Iterable[Placements], ref: TensorRef, facts: Facts) -> set[int]:
    """Placement numbers of the options that the tensor can have at all."""
    return {facts.space.lattice(ref).find(option) for option in options} - {-1}
