"""What differs between a plan and its base, grouped over layers."""

from __future__ import annotations

from dataclasses import dataclass

from planner import JointGraph, Plan, diff, without_layer


@dataclass(frozen=True, kw_only=True)
class ChangeGroup:
    """The same change of the same thing in one or more layers. `first` is the key to show."""

    name: str
    before: str
    after: str
    count: int
    first: str


def changed_keys(graph: JointGraph, base: Plan, plan: Plan) -> dict[str, str]:
    """Box key -> placement in the base plan, for boxes whose placement differs. Stored gradients lie as their parameters."""
    changes = {c.key: c.before for c in diff(base, plan) if c.before and c.after}
    gradients = {
        f"grad:{p.name}": changes[graph.nodes[p.node].key]
        for p in graph.parameters
        if p.gradient is not None and graph.nodes[p.node].key in changes
    }
    return {**changes, **gradients}


def grouped(base: Plan, plan: Plan) -> tuple[ChangeGroup, ...]:
    """Largest groups first; names without the layer number."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for change in diff(base, plan):
        name = without_layer(change.key.removeprefix("param:"))
        found.setdefault((name, change.before or "absent", change.after or "absent"), []).append(change.key)
    groups = [
        ChangeGroup(name=name, before=before, after=after, count=len(keys), first=keys[0])
        for (name, before, after), keys in found.items()
    ]
    return tuple(sorted(groups, key=lambda group: -group.count))
