"""Pins, and demands of every other kind, as the user edits them: scopes, history with undo and redo, and the log that brings
both back after a restart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from app.view_models.demands import Demands, added, mark, where_of
from app.view_models.placements import placements_text
from planner import InvalidConstraintError, JointGraph, Mesh, Plan, resolve, without_layer
from planner.constraint import Constraint, from_json

Pins = Demands


@dataclass(frozen=True, kw_only=True)
class PinHistory:
    """The pins now, and those before and after. Every change returns a new history."""

    pins: Pins = ()
    past: tuple[Pins, ...] = ()
    future: tuple[Pins, ...] = ()

    def change(self, pins: Pins) -> PinHistory:
        return self if pins == self.pins else PinHistory(pins=pins, past=(*self.past, self.pins))

    def undo(self) -> PinHistory:
        if not self.past:
            return self
        return PinHistory(pins=self.past[-1], past=self.past[:-1], future=(self.pins, *self.future))

    def redo(self) -> PinHistory:
        if not self.future:
            return self
        return PinHistory(pins=self.future[0], past=(*self.past, self.pins), future=self.future[1:])


def with_pin(pins: Pins, pin: Constraint) -> Pins:
    """`pin` added; it replaces what was said before about the same placements."""
    return added(pins, pin)


# ---- where a pin applies ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PinTarget:
    """Something of the selected box that can be pinned.

    Attributes:
        label: what the user reads (`output of wq`, `weight`).
        where: WHERE of this one, `everywhere` of the same in all layers (equal outside layers).
        key: the node whose legal placements are offered.
    """

    label: str
    where: str
    everywhere: str
    key: str


def targets(graph: JointGraph, key: str) -> tuple[PinTarget, ...]:
    """What can be pinned at a box: its own tensor first; for an op that reads a parameter, that parameter too."""
    if key.startswith("grad:"):
        key = f"param:{key[5:]}"
    index = graph.node_by_key.get(key)
    if index is None:
        return ()
    node = graph.nodes[index]
    if node.kind in ("param", "buffer"):
        return (_parameter_target(graph, index),)
    found = [_own_target(graph, index)]
    for slot in range(len(node.operands)):
        parameter = _parameter_behind(graph, index, slot)
        if parameter is not None:
            found.append(_parameter_target(graph, parameter))
    return tuple(found)


def _own_target(graph: JointGraph, index: int) -> PinTarget:
    """A module path if the op is what the module returns, the op key otherwise."""
    node = graph.nodes[index]
    if node.is_op and node.module and node.phase != "backward":
        try:
            matches = resolve(node.module, graph)
        except InvalidConstraintError:
            matches = ()
        if [ref.node for ref in matches] == [index]:
            short = node.module.rpartition(".")[2]
            return PinTarget(label=f"output of {short}", where=node.module, everywhere=without_layer(node.module), key=node.key)
    return PinTarget(label=f"output of {node.name}", where=node.key, everywhere=without_layer(node.key), key=node.key)


def _parameter_target(graph: JointGraph, index: int) -> PinTarget:
    key = graph.nodes[index].key
    name = key.partition(":")[2]
    return PinTarget(label=name.rpartition(".")[2], where=name, everywhere=without_layer(name), key=key)


def _parameter_behind(graph: JointGraph, index: int, slot: int) -> int | None:
    """The parameter that an operand is made from by casts and transposes alone."""
    at = graph.nodes[index].operands[slot].node
    while graph.nodes[at].is_op and len(graph.nodes[at].operands) == 1:
        at = graph.nodes[at].operands[0].node
    return at if graph.nodes[at].kind == "param" else None


def same_of_group(graph: JointGraph, target: PinTarget, selected: str | None, group: Iterable[str]) -> tuple[str, ...]:
    """WHERE of the same thing (result, or first parameter, ...) at each selected box; those that have none are left out."""
    own = targets(graph, selected) if selected else ()
    if target not in own:
        return (target.where,)
    number = own.index(target)
    found = [target.where]
    for key in group:
        others = targets(graph, key)
        found += [others[number].where] if number < len(others) else []
    return tuple(dict.fromkeys(found))


def offered(legal: Iterable[Any]) -> tuple[str, ...]:
    """Legal placements as texts; those that leave a reduction pending come last."""
    return tuple(sorted(map(placements_text, legal), key=lambda text: "P" in text))


def count_matches(graph: JointGraph, where: str) -> int:
    """How many tensors a WHERE means; raises InvalidConstraintError with the nearest names if none."""
    return len(resolve(where, graph))


def pinned_keys(graph: JointGraph, pins: Iterable[Constraint]) -> tuple[dict[str, str], dict[Constraint, str]]:
    """(key -> what is demanded there, demand -> why its WHERE no longer means anything)."""
    keys: dict[str, dict[type, str]] = {}
    orphans: dict[Constraint, str] = {}
    for pin in pins:
        if not where_of(pin):
            continue
        try:
            for ref in resolve(where_of(pin), graph):
                keys.setdefault(graph.nodes[ref.node].key, {})[type(pin)] = mark(pin)
        except InvalidConstraintError as error:
            orphans[pin] = f"{error.message}. {error.hint}"
    return {key: "; ".join(texts.values()) for key, texts in keys.items()}, orphans


# ---- the log ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a log adds up to. `memory_bytes` is the budget asked for, None for that of the hardware; `owner` marks the browser
    that began it, `author` who signed last, "" if that is not known."""

    history: PinHistory = PinHistory()
    plan: str = ""
    base: str = ""
    graph: str = ""
    memory_bytes: int | None = None
    owner: str = ""
    author: str = ""


def signature(author: str) -> dict[str, Any]:
    """Goes with every entry: when, in UTC, and by whom if that is known."""
    return {"at": datetime.now(UTC).isoformat(timespec="seconds"), **({"by": author} if author else {})}


def note_event(plan_id: str, text: str) -> dict[str, Any]:
    return {"event": "note", "plan": plan_id, "text": text.strip()}


def pins_event(pins: Pins) -> dict[str, Any]:
    return {"event": "pins", "pins": [pin.to_json() for pin in pins]}


def plan_event(plan: Plan, base: Plan | None, graph: JointGraph, memory_bytes: int | None, owner: str = "") -> dict[str, Any]:
    """A plan was opened (by `owner`) or solved; `base` is what it is compared with."""
    return {
        "event": "plan", "plan": plan.plan_id, "base": base.plan_id if base else "", "graph": graph.fingerprint,
        "mesh": str(plan.mesh), "memory_bytes": memory_bytes, "step_us": plan.objective_us, "peak_bytes": plan.memory.peak_bytes,
        **({"owner": owner} if owner else {}),
    }  # fmt: skip


def replay(events: Iterable[Mapping[str, Any]]) -> Draft:
    """The first entry with pins is what the plan was opened with: nothing lies before it that could be undone.

    Raises InvalidConstraintError if a line is not one that this module writes.
    """
    draft = Draft()
    mesh: Mesh | None = None
    begun = False
    for event in events:
        try:
            kind = event["event"]
            draft = replace(draft, author=str(event.get("by", draft.author)))
            if kind == "plan":
                mesh = Mesh.parse(event["mesh"])
                draft = replace(
                    draft, plan=str(event["plan"]), base=str(event["base"]), graph=str(event["graph"]),
                    memory_bytes=event["memory_bytes"], owner=draft.owner or str(event.get("owner", "")),
                )  # fmt: skip
            elif kind == "pins" and mesh is not None:
                pins = tuple(_pin(data, mesh) for data in event["pins"])
                draft = replace(draft, history=draft.history.change(pins) if begun else PinHistory(pins=pins))
                begun = True
            elif kind in ("undo", "redo"):
                draft = replace(draft, history=draft.history.undo() if kind == "undo" else draft.history.redo())
            elif kind != "note":
                raise InvalidConstraintError(f"unknown entry {kind!r} in the pin log", hint="Open the plan again on Setup.")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidConstraintError(f"the pin log is damaged: {error!r}", hint="Open the plan again on Setup.") from error
    return draft


def _pin(data: Mapping[str, Any], mesh: Mesh) -> Constraint:
    return from_json({"kind": "pin", **data, "note": str(data.get("note", ""))}, mesh)
