"""What the user demands of a plan, of every kind: which part of a plan's constraints that is, how each is said, which replaces
which.

A budget is asked for on Setup and kept apart; boundaries are the model's own, and the worker states them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import date

from app.view_models.placements import placements_text
from planner import (
    RECIPES,
    Allow,
    BoundaryPlacement,
    Forbid,
    ForbidCollective,
    InvalidConstraintError,
    MemoryBudget,
    Mesh,
    Pin,
    Plan,
    Recipe,
    ReshardAfterForward,
    SamePlacement,
)  # fmt: skip
from planner.constraint import Constraint
from planner.placement import parse

Demands = tuple[Constraint, ...]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "*")
RECIPE_NAMES = {
    "ddp": "DDP", "fsdp": "FSDP", "hsdp": "HSDP", "tp": "TP", "tp_sp": "TP+SP", "fsdp_tp_sp": "FSDP+TP+SP",
    "ep": "EP",
}  # fmt: skip
"""As the design reviews say them; keys are those of the planner's recipes."""

RESHARD = {"always": "always: backward gathers again", "never": "never: all are kept for backward"}
KEEPING = (
    "Parameters that forward gathers can be gathered again in backward (ZeRO-3, FSDP's reshard_after_forward=True) or kept until "
    "then (ZeRO-2), which takes memory. Without a demand the planner keeps what pays and fits; recipes gather again."
)


def of_plan(plan: Plan) -> Demands:
    """All constraints of a plan but its budget and the model's boundaries."""
    return tuple(c for c in plan.constraints if not isinstance(c, MemoryBudget | BoundaryPlacement))


def where_of(demand: Constraint) -> str:
    """WHERE it speaks about, "" for the whole plan."""
    return str(getattr(demand, "where", ""))


def note_of(demand: Constraint) -> str:
    return str(getattr(demand, "note", ""))


def bare(demand: Constraint) -> Constraint:
    """Without its note, which changes no plan."""
    if isinstance(demand, Pin | Allow | Forbid):
        return replace(demand, note="")
    if isinstance(demand, ForbidCollective | SamePlacement | Recipe | ReshardAfterForward):
        return replace(demand, note="")
    return demand


def slot(demand: Constraint) -> tuple[object, ...]:
    """Of two demands with the same slot the later one replaces the earlier: what may be at a WHERE is said once, and so is the
    recipe of some axes. Things forbidden add up."""
    if isinstance(demand, Pin | Allow):
        return ("placements", demand.where)
    if isinstance(demand, Recipe):
        return ("recipe", demand.axes)
    if isinstance(demand, ReshardAfterForward):
        return ("reshard after forward",)
    return ("one", bare(demand))


def added(demands: Demands, demand: Constraint) -> Demands:
    """`demand` at the end; it replaces those with its slot."""
    return (*(d for d in demands if slot(d) != slot(demand)), demand)


def without(demands: Demands, *gone: Constraint) -> Demands:
    return tuple(d for d in demands if d not in gone)


def num_changed(demands: Demands, plan: Plan) -> int:
    """How many demands were added, removed or altered since the plan was solved."""
    now, then = set(map(bare, demands)), set(map(bare, of_plan(plan)))
    return len({slot(demand) for demand in now ^ then})


# ---- in words -----------------------------------------------------------------------------------------------------------


def headline(demand: Constraint) -> str:
    """What its chip says before WHERE: `pin`, `forbid all_gather on dp`, `recipe FSDP on dp, tp`."""
    if isinstance(demand, ForbidCollective):
        kind = "collectives" if demand.collective == "*" else demand.collective
        return f"forbid {kind} on {'any axis' if demand.axis == '*' else demand.axis}"
    if isinstance(demand, Recipe):
        kept = ", parameters may be kept" if demand.may_keep else ""
        return f"recipe {RECIPE_NAMES.get(demand.name, demand.name)} on {', '.join(demand.axes)}{kept}"
    if isinstance(demand, ReshardAfterForward):
        return demand.describe()
    return demand.describe().partition(" ")[0]


def options_of(demand: Constraint) -> tuple[str, ...]:
    """Placements that it names."""
    if isinstance(demand, Pin | BoundaryPlacement):
        return (placements_text(demand.placements),)
    if isinstance(demand, Allow | Forbid):
        return tuple(map(placements_text, demand.options))
    return ()


def mark(demand: Constraint) -> str:
    """What a box in the graph says of it."""
    options = " or ".join(options_of(demand))
    if isinstance(demand, Pin):
        return f"pinned to {options}"
    if isinstance(demand, Allow):
        return f"allowed {options}"
    if isinstance(demand, Forbid):
        return f"not {options}"
    return "tied: the same placement in all of them"


def by_description(demands: Iterable[Constraint], text: str) -> Constraint | None:
    """The demand that an error names."""
    return next((demand for demand in demands if demand.describe() == text), None)


def stamped(reason: str, author: str, today: date) -> str:
    """The note of a demand: why, who and when. "" if neither reason nor author is known."""
    reason, author = reason.strip(), author.strip()
    if not reason and not author:
        return ""
    signed = f"({author}, {today:%Y-%m-%d})" if author else f"({today:%Y-%m-%d})"
    return f"{reason} {signed}".strip()


def placed(kind: str, where: str, options: tuple[str, ...], note: str, mesh: Mesh) -> Constraint:
    """A demand about placements as the form says it: `Pin`, `Allow` or `Forbid` and the options picked, or `Tie` without any."""
    found = tuple(parse(option, mesh) for option in options)
    if kind == "Tie":
        return SamePlacement(where=where, note=note.strip())
    if kind == "Pin":
        return Pin(where=where, placements=found[0], note=note.strip())
    return (Allow if kind == "Allow" else Forbid)(where=where, options=found, note=note.strip())


# ---- recipes ------------------------------------------------------------------------------------------------------------


def recipe_problem(name: str, axes: tuple[str, ...], mesh: Mesh) -> str:
    """Why this mesh cannot have the recipe, "" if it can."""
    try:
        Recipe(name=name, axes=axes).uses(mesh)
    except InvalidConstraintError as error:
        return f"{error.message}. {error.hint}"
    return ""


def recipe_text(name: str, axes: tuple[str, ...], mesh: Mesh) -> str:
    """`dp: fsdp, tp: sequence`: what each axis is used for; other axes are left to the planner."""
    uses = Recipe(name=name, axes=axes).uses(mesh)
    free = [axis for axis in mesh.axis_names if axis not in axes]
    said = ", ".join(f"{mesh.axis_names[axis]} for {use}" for axis, use in sorted(uses.items()))
    return f"Uses {said}" + (f"; {', '.join(free)} stays free." if free else ".")


def recipe_names() -> tuple[str, ...]:
    return tuple(RECIPES)
