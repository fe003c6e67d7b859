"""Recipes: what experts write by hand, as constraints on any traced model. Baselines that the free optimum is measured against.

A recipe gives each of its mesh axes one *use*, and a use says which dims are split over the axis, by what they are
(`planner.dims`), not by the names of modules:

    DATA       samples split, parameters whole: one all-reduce per gradient
    FSDP       samples split, parameters split too: gathered before use, gradients reduce-scattered
    TENSOR     heads, feed-forward widths and vocabulary split: column- then row-parallel products, all-reduces
    SEQUENCE   as TENSOR, and between those products the residual stream is split over the sequence: all-gather, reduce-scatter
    EXPERT     samples split, expert dims split: tokens go to their experts and back in all-to-alls

Within that the planner is free (when to cast, what to share, which single-axis group to use), so a recipe is its own best
version. An op that cannot follow the use of an axis (no row of its rule does) is left free on that axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from planner.dims import PENDING, DimRoles, codes_of_ports
from planner.errors import InvalidConstraintError
from planner.graph import TensorRef
from planner.mesh import Mesh
from planner.placement import P_MAX, S0, P, R
from planner.redistribution import CollectiveKind as KIND
from planner.strategy import StrategySpace


class Use(StrEnum):
    DATA = "data"
    FSDP = "fsdp"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
    EXPERT = "expert"


RECIPES: Mapping[str, tuple[Use, ...]] = {
    "ddp": (Use.DATA,),
    "fsdp": (Use.FSDP,),
    "hsdp": (Use.DATA, Use.FSDP),
    "tp": (Use.DATA, Use.TENSOR),
    "tp_sp": (Use.DATA, Use.SEQUENCE),
    "fsdp_tp_sp": (Use.FSDP, Use.SEQUENCE),
    "ep": (Use.DATA, Use.EXPERT),
}
"""Uses of a recipe's axes: the last use is that of its last axis, the first that of all axes before it."""

NEEDS_TWO_AXES = frozenset({"hsdp", "fsdp_tp_sp"})
"""Recipes that mean nothing on one axis; the others leave out their first use then."""

_SPLITS_SAMPLES = frozenset({Use.DATA, Use.FSDP, Use.EXPERT})
_ANY = frozenset({R, P, P_MAX})
_WITHOUT_PENDING = frozenset(range(128)) - PENDING


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """`name` is a key of `RECIPES`, `axes` the mesh axes it speaks about, outermost first. Other axes are left to the planner.

    `may_keep`: parameters as forward read them may be kept for backward. Without it backward casts and gathers them again, as
    recipes are published (FSDP with `reshard_after_forward=True`).
    """

    name: str
    axes: tuple[str, ...]
    note: str = ""
    may_keep: bool = False

    def describe(self) -> str:
        kept = ", parameters may be kept for backward" if self.may_keep else ""
        return f"recipe {self.name} on {', '.join(self.axes)}{kept}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "recipe", "name": self.name, "axes": list(self.axes), "note": self.note,
            **({"may_keep": True} if self.may_keep else {}),
        }  # fmt: skip

    @classmethod
    def parse(cls, written: str, mesh: Mesh, note: str = "") -> Recipe:
        """`fsdp_tp_sp:dp,tp`; without axes all those of the mesh, in order."""
        name, colon, rest = (part.strip() for part in written.partition(":"))
        axes = tuple(part.strip() for part in rest.split(",")) if colon else mesh.axis_names
        found = cls(name=name, axes=axes, note=note)
        found.uses(mesh)
        return found

    def uses(self, mesh: Mesh) -> dict[int, Use]:
        """Mesh axis -> its use.

        Raises:
            InvalidConstraintError: unknown recipe, or axes that it cannot have.
        """
        if self.name not in RECIPES:
            raise InvalidConstraintError(f"there is no recipe {self.name!r}", hint=f"Recipes are {', '.join(RECIPES)}.")
        if len(set(self.axes)) != len(self.axes):
            raise InvalidConstraintError(f"{self.describe()}: an axis is named twice", hint="Name each axis once.")
        least = 2 if self.name in NEEDS_TWO_AXES else 1
        if len(self.axes) < least:
            raise InvalidConstraintError(
                f"{self.describe()}: {self.name} needs at least {least} mesh axes ({_uses_text(self.name)})",
                hint=f"Give a mesh with {least} axes, for example --mesh a=8,b=8 --recipe {self.name}:a,b.",
            )
        first, last = RECIPES[self.name][0], RECIPES[self.name][-1]
        numbers = [mesh.axis(name) for name in self.axes]
        return {axis: last if axis == numbers[-1] else first for axis in numbers}

    def unused_collectives(self, mesh: Mesh) -> tuple[tuple[str, str], ...]:
        """(collective, axes of a group) that the recipe does without, where other ways could be cheaper: experts exchange tokens
        and never gather them, sequences are gathered and scattered and never exchanged, and gradients are scattered within the
        FSDP group before they are reduced between groups."""
        uses = self.uses(mesh)
        names: dict[Use, list[str]] = {use: [mesh.axis_names[a] for a in uses if uses[a] is use] for use in Use}
        found = [(str(kind), axis) for axis in names[Use.EXPERT] for kind in (KIND.ALL_GATHER, KIND.REDUCE_SCATTER)]
        found += [(str(KIND.ALL_TO_ALL), axis) for axis in (*names[Use.TENSOR], *names[Use.SEQUENCE])]
        if names[Use.DATA] and names[Use.FSDP]:
            found += [(str(KIND.ALL_REDUCE), f"{a}+{b}") for a in names[Use.DATA] for b in names[Use.FSDP]]
            found += [(str(KIND.ALL_GATHER), axis) for axis in names[Use.DATA]]
            found += [(str(KIND.ALL_TO_ALL), axis) for axis in names[Use.FSDP]]
        return tuple(found)


def _uses_text(name: str) -> str:
    return ", then ".join(f"{use} on one" for use in RECIPES[name])


Allowed = frozenset[int] | None
"""Placement codes that a tensor may have on one axis; None = any."""


class Expansion:
    """A recipe on one strategy space: which strategies of which nodes it allows.

    Raises:
        InvalidConstraintError: the model or mesh cannot have this recipe; says what is missing.
    """

    def __init__(self, recipe: Recipe, roles: DimRoles) -> None:
        self.recipe = recipe
        self.roles = roles
        self.space: StrategySpace = roles.space
        mesh = self.space.mesh
        self.uses = {axis: use for axis, use in recipe.uses(mesh).items() if mesh.axis_sizes[axis] > 1}
        self.left_free: list[tuple[int, int]] = []
        self._known: dict[object, np.ndarray | None] = {}
        self._check()

    # ---- can the model and mesh have it? --------------------------------------------------------------------------
    def _check(self) -> None:
        roles, graph, uses = self.roles, self.space.graph, self.uses
        splitting = [axis for axis, use in uses.items() if use in _SPLITS_SAMPLES]
        if splitting:
            if not roles.samples:
                self._refuse("no input of the model has a dim that counts samples", "State it in plan_inputs() of the module.")
            inputs = (TensorRef(entry.node, 0) for entry in graph.inputs)
            self._check_even(((ref, dim) for ref in inputs for dim in roles.dims(ref, roles.samples)), splitting, "batch")
        for axis, use in uses.items():
            if use in (Use.TENSOR, Use.SEQUENCE):
                if not roles.inner:
                    self._refuse(
                        "the model has no pair of products with parameters of which one makes a dim and another contracts it "
                        "(column- then row-parallel)", "Take ddp, fsdp or hsdp.",
                    )  # fmt: skip
                self._check_even(self._dims_of(roles.inner), [axis], "heads or width")
            if use is Use.SEQUENCE:
                if not roles.sequence:
                    self._refuse("the residual stream has no dim besides samples and features", "Take tp instead of tp_sp.")
                self._check_even(self._residual_sequence(), [axis], "sequence")
            if use is Use.EXPERT:
                if not roles.experts:
                    self._refuse("the model has no experts: no product with parameters has an expert dim", "Take another recipe.")
                self._check_even(self._dims_of(roles.experts), [axis], "experts", parameters_only=True)

    def _refuse(self, why: str, hint: str) -> None:
        raise InvalidConstraintError(f"{self.recipe.describe()}: {why}", hint=hint)

    def _dims_of(self, wanted: frozenset[int]) -> Iterable[tuple[TensorRef, int]]:
        return ((ref, dim) for ref in self.roles.colours for dim in self.roles.dims(ref, wanted))

    def _residual_sequence(self) -> Iterable[tuple[TensorRef, int]]:
        """Sequence dims of the results of row-parallel products."""
        for product in self.roles.products:
            if product.contracted & self.roles.inner and not product.common:
                ref = TensorRef(product.node, 0)
                yield from ((ref, dim) for dim in self.roles.dims(ref, self.roles.sequence))

    def _check_even(
        self, dims: Iterable[tuple[TensorRef, int]], axes: list[int], what: str, *, parameters_only: bool = False
    ) -> None:
        graph, mesh = self.space.graph, self.space.mesh
        pieces = int(np.prod([mesh.axis_sizes[axis] for axis in axes]))
        over = " x ".join(f"{mesh.axis_names[axis]}={mesh.axis_sizes[axis]}" for axis in axes)
        for ref, dim in dims:
            size = graph.meta(ref).shape[dim]
            if size % pieces and size > 1 and not (parameters_only and graph.nodes[ref.node].kind != "param"):
                near = [n for n in (size // pieces * pieces, (size // pieces + 1) * pieces) if n]
                self._refuse(
                    f"{what}: dim {dim} of size {size} of {graph.nodes[ref.node].key} does not divide over {over}; "
                    f"nearest sizes that work: {', '.join(map(str, near))}",
                    "Take other axis sizes, or another recipe.",
                )  # fmt: skip

    # ---- what it allows -------------------------------------------------------------------------------------------
    @cached_property
    def vocabulary(self) -> frozenset[int]:
        """Vocabulary colours whose size divides: others stay whole."""
        roles, graph, mesh = self.roles, self.space.graph, self.space.mesh
        sizes = [mesh.axis_sizes[axis] for axis, use in self.uses.items() if use in (Use.TENSOR, Use.SEQUENCE)]
        uneven = {
            roles.colours[ref][dim]
            for ref, dim in self._dims_of(roles.vocabulary)
            if graph.meta(ref).shape[dim] > 1 and any(graph.meta(ref).shape[dim] % size for size in sizes)
        }
        return roles.vocabulary - uneven

    @cached_property
    def _gradients(self) -> frozenset[TensorRef]:
        """Of parameters: sums over samples, reduced where they are stored."""
        return frozenset(p.gradient for p in self.space.graph.parameters if p.gradient is not None)

    @cached_property
    def split_features(self) -> frozenset[int]:
        return self.roles.inner | self.vocabulary

    def masks(self) -> dict[int, np.ndarray]:
        """graph node -> bool over its strategies, only nodes of which some are ruled out."""
        found = {}
        for node in range(len(self.space.graph.nodes)):
            mask, kept = self._mask(node), self.space.strategies[node].kept
            if kept is not None and not self.recipe.may_keep:
                mask = ~kept if mask is None else mask & ~kept
            if mask is not None:
                found[node] = mask
        return found

    def _mask(self, node: int) -> np.ndarray | None:
        """All axes together; a stored parameter that is too small to be split over all of them may stay whole on some."""
        mask = None
        for axis, use in self.uses.items():
            one = self._mask_on(node, axis, use, may_stay_whole=False)
            if one is not None:
                mask = one if mask is None else mask & one
        if mask is not None and self.space.graph.nodes[node].kind == "param":
            mask = self._in_one_group(node, mask)
        if mask is None or mask.any():
            return None if mask is None or mask.all() else mask
        if self.space.graph.nodes[node].kind == "param":
            loose = [self._mask_on(node, axis, use, may_stay_whole=True) for axis, use in self.uses.items()]
            mask = np.logical_and.reduce([m for m in loose if m is not None])
            if mask.any():
                return mask
        self._refuse(
            f"{self.space.graph.nodes[node].key} has no strategy that follows it on all axes", "Take fewer or smaller axes."
        )
        return None

    def _in_one_group(self, node: int, mask: np.ndarray) -> np.ndarray:
        """Where it can be, a parameter is split on one dim over all FSDP axes, so that it is gathered in one group."""
        axes = [axis for axis, use in self.uses.items() if use is Use.FSDP]
        codes = codes_of_ports(self.space, node)[:, 0][:, axes]
        same = mask & (codes == codes[:, :1]).all(1)
        return same if same.any() else mask

    def _mask_on(self, node: int, axis: int, use: Use, *, may_stay_whole: bool) -> np.ndarray | None:
        """On one axis: outputs and operands as the use wants them; if no row of the op does that, outputs only; else free."""
        entry, strategies = self.space.graph.nodes[node], self.space.strategies[node]
        outputs = [
            self._allowed(TensorRef(node, output), axis, use, may_stay_whole=may_stay_whole) if meta is not None else None
            for output, meta in enumerate(entry.outputs)
        ]
        refs = [entry.operands[slot] for slot in strategies.operand_slots]
        operands = [self._taken(ref, use) or self._served(ref, axis) for ref in refs]
        key = (id(strategies), axis, tuple(outputs), tuple(operands))
        if key not in self._known:
            codes = codes_of_ports(self.space, node)[:, :, axis]
            whole = _matching(codes, [*outputs, *operands])
            if not whole.any():
                whole = _matching(codes, [*outputs, *(self._served(ref, axis) for ref in refs)])
            self._known[key] = whole if whole.any() else None
        if self._known[key] is None:
            self.left_free.append((node, axis))
        return self._known[key]

    def _allowed(self, ref: TensorRef, axis: int, use: Use, *, may_stay_whole: bool) -> Allowed:
        """Codes that a tensor may be produced or stored in on an axis of this use."""
        roles = self.roles
        if roles.is_constant(ref):
            return None
        if use in (Use.TENSOR, Use.SEQUENCE):
            return self._allowed_features(ref, use)
        kind = self.space.graph.nodes[ref.node].kind
        if roles.is_weight(ref):
            if use is Use.EXPERT and (expert := self._split(ref, roles.experts)):
                return expert
            if use is not Use.FSDP:
                return frozenset({R})
            if kind != "param":
                return None
            return self._stored(ref, may_stay_whole=may_stay_whole)
        samples = self._split(ref, roles.samples)
        experts = self._split(ref, roles.experts) if use is Use.EXPERT else frozenset()
        if ref in self._gradients and ref in roles.pending[axis] and not experts:
            return PENDING
        if samples:
            return samples | experts | ({R} if kind == "input" else frozenset())
        return experts or _ANY

    def _stored(self, ref: TensorRef, *, may_stay_whole: bool) -> Allowed:
        """A parameter is split on a dim that features do not split (a piece of a piece would be strided); one that has no such
        dim may stay whole: it is a bias."""
        every = frozenset(S0 + dim for dim in range(len(self.space.graph.meta(ref).shape)))
        possible = every & frozenset(np.unique(self.space.lattice(ref).codes).tolist())
        features = {Use.TENSOR, Use.SEQUENCE} & set(self.uses.values())
        apart = possible - (self._split(ref, self.split_features) if features else frozenset())
        return apart if apart and not may_stay_whole else possible | {R}

    def _allowed_features(self, ref: TensorRef, use: Use) -> Allowed:
        roles = self.roles
        if split := self._split(ref, self.split_features):
            return split
        if roles.is_weight(ref):
            return frozenset({R})
        if use is Use.SEQUENCE and (sequence := self._split(ref, roles.sequence)):
            if roles.dims(ref, roles.outer):
                return sequence | {P}
            return sequence | _ANY
        return _ANY

    def _taken(self, ref: TensorRef, use: Use) -> Allowed:
        """Codes in which an op may read a tensor: what is split by the use is never gathered to be read."""
        roles = self.roles
        if roles.is_constant(ref):
            return None
        if use in (Use.TENSOR, Use.SEQUENCE):
            return self._split(ref, self.split_features) or None
        if roles.is_weight(ref):
            return (self._split(ref, roles.experts) or None) if use is Use.EXPERT else None
        samples = self._split(ref, roles.samples)
        experts = self._split(ref, roles.experts) if use is Use.EXPERT else frozenset()
        return (samples | experts) or None

    def _served(self, ref: TensorRef, axis: int) -> Allowed:
        """An op cannot wait for a pending sum that nobody makes."""
        return None if ref in self.roles.pending[axis] else _WITHOUT_PENDING

    def _split(self, ref: TensorRef, wanted: frozenset[int]) -> frozenset[int]:
        shape = self.space.graph.meta(ref).shape
        return frozenset(S0 + dim for dim in self.roles.dims(ref, wanted) if shape[dim] > 1)


def _matching(codes: np.ndarray, allowed: list[Allowed]) -> np.ndarray:
    """bool [strategies]; `codes` [strategies, ports] on one axis."""
    mask = np.ones(len(codes), np.bool_)
    for column, wanted in enumerate(allowed):
        if wanted is not None:
            mask &= np.isin(codes[:, column], sorted(wanted))
    return mask
