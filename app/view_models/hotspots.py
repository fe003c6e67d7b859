"""What communicates most: redistributions grouped over layers."""

from __future__ import annotations

from dataclasses import dataclass

from app.view_models.placements import placements_text
from planner import Plan, without_layer


@dataclass(frozen=True, kw_only=True)
class Hotspot:
    """The same redistribution in one or more layers, together: full bytes of its collectives, µs.

    `moves` names its collectives with their axes in order (`all_gather dp, slice`).
    """

    name: str
    moves: str
    source: str
    target: str
    phase: str
    count: int
    num_bytes: int
    us: float


def largest(plan: Plan, most: int) -> tuple[Hotspot, ...]:
    """The slowest first; ties by name."""
    found: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for r in plan.redistributions:
        moves = ", ".join(
            "slice" if s.collective is None else f"{s.collective.kind} {plan.axes_text(s.collective.axes)}" for s in r.steps
        )
        size = sum(s.collective.full_bytes for s in r.steps if s.collective is not None)
        source, target = placements_text(r.source), placements_text(r.steps[-1].target)
        found.setdefault((without_layer(r.tensor[0]), moves, source, target, r.phase), []).append((size, r.us))
    spots = [
        Hotspot(
            name=name, moves=moves, source=source, target=target, phase=phase, count=len(items),
            num_bytes=sum(size for size, _ in items), us=sum(us for _, us in items),
        )
        for (name, moves, source, target, phase), items in found.items()
    ]  # fmt: skip
    return tuple(sorted(spots, key=lambda spot: (-spot.us, spot.name, spot.moves)))[:most]
