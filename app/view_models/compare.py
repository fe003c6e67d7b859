"""Two plans side by side: what differs in time by module, in placements by group of layers, in inputs and constraints.

Everything is B - A. Computation counts for the op that computes, a redistribution for the first op that reads its result, so
that the parts of a plan add up to its step time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.view_models.demands import Demands, added, of_plan
from app.view_models.pins import count_matches
from app.view_models.placements import placement_of, placements_text
from app.view_models.setup_form import budget_text
from app.view_models.status import Quantity, strip, verdict
from planner import BoundaryPlacement, JointGraph, MemoryBudget, Pin, Plan, PlannerError, diff, without_layer

NOWHERE = "outside modules"
SMALL_US = 0.05
"""A module whose time differs by less is not listed by itself."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """µs."""

    compute_us: float = 0.0
    comm_us: float = 0.0

    @property
    def us(self) -> float:
        return self.compute_us + self.comm_us


@dataclass(frozen=True, kw_only=True)
class ModuleDelta:
    """B - A of a module, all layers together, in µs."""

    name: str
    compute_us: float
    comm_us: float

    @property
    def us(self) -> float:
        return self.compute_us + self.comm_us


@dataclass(frozen=True, kw_only=True)
class ChangeGroup:
    """The same change in one or more layers. `us` is B - A of the ops themselves and of moving what they read."""

    name: str
    before: str
    after: str
    keys: tuple[str, ...]
    us: float

    @property
    def times(self) -> str:
        return f"×{len(self.keys)}"


@dataclass(frozen=True, kw_only=True)
class SideRow:
    """One input or constraint of both plans."""

    what: str
    a: str
    b: str

    @property
    def differs(self) -> bool:
        return self.a != self.b


# ---- may they be compared? ----------------------------------------------------------------------------------------------


def refusal(a: Plan, b: Plan) -> str:
    """Why the plans cannot be compared, "" if they can: only plans of the same model at the same sizes say something together."""
    if a.request.model != b.request.model:
        return f"A is a plan of {a.request.model}, B one of {b.request.model}. Compare plans of one model."
    if a.request != b.request:
        return f"The plans are of {a.request.model} at different sizes: {sizes_text(a)}; {sizes_text(b)}. Plan one of them anew."
    if a.checkpointed == b.checkpointed and a.fingerprint != b.fingerprint:
        return (
            f"{a.request.model} has changed between the plans: fingerprint {a.fingerprint[:12]} and {b.fingerprint[:12]}. "
            "Plan the older one anew."
        )
    return ""


def cautions(a: Plan, b: Plan) -> tuple[str, ...]:
    """What besides decisions differs, so that nobody takes it for the merit of a plan."""
    found = []
    if a.mesh != b.mesh:
        found.append(f"The meshes differ: {a.mesh} and {b.mesh}. Placements are written in the axes of each.")
    if a.hardware_name != b.hardware_name:
        found.append(f"The plans are priced on different hardware: {a.hardware_name} and {b.hardware_name}.")
    elif a.hardware_hash != b.hardware_hash:
        found.append(
            f"The profile {a.hardware_name} has changed since one of the plans was priced. Solve again to compare fairly."
        )
    if a.memory_policy != b.memory_policy:
        found.append(f"The optimizers differ: {a.memory_policy.optimizer} and {b.memory_policy.optimizer}.")
    for name, plan in (("A", a), ("B", b)):
        if plan.report.status != "optimal":
            found.append(f"{name} is not proven optimal: within {100 * plan.report.gap:.2g} %.")
    return tuple(found)


def sizes(plan: Plan) -> tuple[tuple[str, str], ...]:
    request = plan.request
    parts = (("batch", request.batch), ("sequence", request.seq), ("layers", request.layers))
    return (*((name, "default" if value is None else str(value)) for name, value in parts), ("precision", request.precision))


def sizes_text(plan: Plan) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes(plan))


def layers_text(layers: tuple[str, ...]) -> str:
    """`12: layers.0 … layers.11`"""
    if not layers:
        return "none"
    return f"{len(layers)}: {layers[0]}" + (f" … {layers[-1]}" if len(layers) > 1 else "")


# ---- numbers ------------------------------------------------------------------------------------------------------------


def quantities(a: Plan, b: Plan) -> tuple[Quantity, ...]:
    """The numbers of B with their difference from A."""
    return strip(b, a, of_plan(b)).quantities


def costs(plan: Plan) -> dict[str, Cost]:
    """Key -> its time; together the step time."""
    comm: dict[str, list[float]] = {}
    for r in plan.redistributions:
        comm.setdefault(r.consumers[0][0] if r.consumers else r.tensor[0], []).append(r.us)
    keys = dict.fromkeys((*plan.choices, *comm))
    return {
        key: Cost(
            compute_us=plan.choices[key].compute_us if key in plan.choices else 0.0, comm_us=math.fsum(comm.get(key, ())),
        )
        for key in keys
    }  # fmt: skip


def module_of(key: str) -> str:
    """`layers.3.attention.wq/linear/fwd#0` -> `layers.*.attention.wq`; a parameter belongs to the module that holds it."""
    if "/" not in key and ":" in key:
        kind, _, name = key.partition(":")
        path = name.rpartition(".")[0] if kind in ("param", "buffer") else ""
    else:
        path = key.partition("/")[0] if key.count("/") >= 2 else ""
    return without_layer(path) or NOWHERE


def by_module(a: Plan, b: Plan, depth: int = 4, most: int = 14) -> tuple[ModuleDelta, ...]:
    """Largest differences first, the small ones as one row at the end. The rows add up to the difference of step times.

    `depth` cuts module paths; no more than `most` rows.
    """
    parts: dict[str, tuple[list[float], list[float]]] = {}
    for plan, sign in ((b, 1.0), (a, -1.0)):
        for key, cost in costs(plan).items():
            name = ".".join(module_of(key).split(".")[:depth])
            compute, comm = parts.setdefault(name, ([], []))
            compute.append(sign * cost.compute_us)
            comm.append(sign * cost.comm_us)
    rows = [ModuleDelta(name=name, compute_us=math.fsum(c), comm_us=math.fsum(m)) for name, (c, m) in parts.items()]
    rows = sorted((row for row in rows if abs(row.us) >= SMALL_US), key=lambda row: -abs(row.us))
    shown, rest = rows[: most - 1], rows[most - 1 :]
    if len(rest) == 1:
        shown, rest = rows, []
    return _closed(a, b, shown, len(rest))


def _closed(a: Plan, b: Plan, shown: list[ModuleDelta], count: int) -> tuple[ModuleDelta, ...]:
    """With what is left to the difference of the totals: smaller modules, and the rounding of saved plans."""
    compute = math.fsum([b.compute_us, -a.compute_us, *(-row.compute_us for row in shown)])
    left = math.fsum([b.objective_us, -a.objective_us, *(-row.us for row in shown)])
    if count or abs(left) >= SMALL_US:
        name = f"{count} other modules" if count else "differences too small to list"
        return (*shown, ModuleDelta(name=name, compute_us=compute, comm_us=left - compute))
    if not shown:
        return ()
    last = shown[-1]
    return (*shown[:-1], ModuleDelta(name=last.name, compute_us=last.compute_us, comm_us=last.comm_us + left))


# ---- decisions ----------------------------------------------------------------------------------------------------------


def changed(a: Plan, b: Plan) -> tuple[ChangeGroup, ...]:
    """Placements that differ, grouped by the key without its layer number; what weighs most in time first."""
    before, after = costs(a), costs(b)
    found: dict[tuple[str, str, str], list[str]] = {}
    for change in diff(a, b):
        name = without_layer(change.key.removeprefix("param:"))
        found.setdefault((name, change.before or "absent", change.after or "absent"), []).append(change.key)
    none = Cost()
    groups = [
        ChangeGroup(
            name=name, before=x, after=y, keys=tuple(keys),
            us=math.fsum(after.get(key, none).us - before.get(key, none).us for key in keys),
        )
        for (name, x, y), keys in found.items()
    ]  # fmt: skip
    return tuple(sorted(groups, key=lambda group: (-abs(group.us), -len(group.keys), group.name)))


def pins_for(group: ChangeGroup, side: str, graph: JointGraph, plan: Plan, pins: Demands) -> Demands:
    """The pins with those added that hold the group to its placement in A or B: one glob if it means just these tensors."""
    placement = group.before if side == "A" else group.after
    wheres = [key.removeprefix("param:").removeprefix("buffer:") for key in group.keys]
    everywhere = without_layer(wheres[0])
    try:
        if everywhere != wheres[0] and count_matches(graph, everywhere) == len(wheres):
            wheres = [everywhere]
    except PlannerError:  # a name with a * of its own: pin the tensors one by one
        pass
    for where in wheres:
        parsed = Pin.parse(f"{where}={placement}", plan.mesh)
        note = f"as in plan {plan.plan_id[:7]}"
        pins = added(pins, Pin(where=parsed.where, placements=parsed.placements, note=note))
    return pins


def parameters(a: Plan, b: Plan) -> dict[str, list[str]]:
    """Column -> values: every parameter once for all layers that lie alike in both plans, differences first."""
    found: dict[tuple[str, str, str], int] = {}
    for key in dict.fromkeys((*b.choices, *a.choices)):
        if key.startswith("param:"):
            texts = (placements_text(placement_of(plan, key)) or "absent" for plan in (a, b))
            row = (without_layer(key.removeprefix("param:")), *texts)
            found[row] = found.get(row, 0) + 1  # type: ignore[index, arg-type]
    rows = sorted(found.items(), key=lambda item: item[0][1] == item[0][2])
    return {
        "": ["differs" if row[1] != row[2] else "" for row, _ in rows],
        "×": [f"×{count}" for _, count in rows], "parameter": [row[0] for row, _ in rows],
        "A": [row[1] for row, _ in rows], "B": [row[2] for row, _ in rows],
    }  # fmt: skip


def sides(a: Plan, b: Plan) -> tuple[SideRow, ...]:
    """Inputs, then constraints; what differs comes first."""
    rows = [SideRow(what=what, a=one, b=two) for (what, one), (_, two) in zip(inputs(a), inputs(b), strict=True)]
    one, two = constraint_texts(a), constraint_texts(b)
    for text in dict.fromkeys((*one, *two)):
        rows.append(
            SideRow(what=text, a="yes" + one[text] if text in one else "no", b="yes" + two[text] if text in two else "no")
        )
    return tuple(sorted(rows, key=lambda row: not row.differs))


def constraint_texts(plan: Plan) -> Mapping[str, str]:
    """Constraint in a sentence -> its note. Memory is among the inputs; boundaries are stated by the model."""
    found = {}
    for constraint in plan.constraints:
        if not isinstance(constraint, MemoryBudget):
            note = "" if isinstance(constraint, BoundaryPlacement) else constraint.note
            found[constraint.describe()] = f" ({note})" if note else ""
    return found


def inputs(plan: Plan) -> Iterable[tuple[str, str]]:
    """What a plan was asked for and how the answer was found."""
    return (
        ("model", plan.request.model),
        *((name, value) for name, value in sizes(plan)),
        ("mesh", str(plan.mesh)),
        ("hardware", plan.hardware_name),
        ("devices per node", str(plan.gpus_per_node)),
        ("hardware profile", plan.hardware_hash[:12]),
        ("optimizer", plan.memory_policy.optimizer),
        ("memory limit", budget_text(plan)),
        ("memory verdict", verdict(plan)[0]),
        ("checkpointing", plan.checkpoint),
        ("checkpointed layers", layers_text(plan.checkpointed)),
        ("proof", "optimal" if plan.report.status == "optimal" else f"within {100 * plan.report.gap:.2g} %"),
        ("solver", plan.report.method),
    )
