"""The step as it is forecast: communication beside compute. The same kind of events as in series, at the times of the timeline.

A collective is exposed while compute stands still until it is done. What the timeline says per collective and axes is the
measure: the parts of single calls are scaled to add up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from app.view_models.communication import Call, calls_of
from app.view_models.status import Quantity
from app.view_models.timeline import COMPUTE, Event, Piece
from planner import JointGraph, Plan
from planner.actions import COMPUTE as COMPUTE_LANE
from planner.actions import Action
from planner.costing.timeline import Timeline

SHORTEST_GAP_US = 1.0
"""Compute that stands still for less is taken to run on."""

CallKey = tuple[str, str, str]
"""Collective, mesh axes, key of the op that made the tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Overlapped:
    """Attributes:
    exposed_us: of all calls with that key together; `by_axis_us` per mesh axes.
    of_calls: of each call; calls of the same tensor share theirs by their times.
    model: how it is modelled, in words.
    """

    events: tuple[Event, ...]
    step_us: float
    exposed_us: Mapping[CallKey, float]
    by_axis_us: Mapping[str, float]
    of_calls: Mapping[Call, float]
    model: str

    @property
    def exposed_total_us(self) -> float:
        return sum(self.by_axis_us.values())


def overlapped(graph: JointGraph, plan: Plan, timeline: Timeline) -> Overlapped:
    """`graph` is that of the plan; `timeline` its overlapped one."""
    actions = timeline.actions.actions
    pieces = _exposed(timeline)
    shares = _shares(pieces, timeline)
    events, sums = [], dict[CallKey, float]()
    for number, action in enumerate(actions):
        if action.us > 0:
            events.append(_event(graph, plan, timeline, number, tuple(pieces.get(number, ())), shares.get(number, 0.0)))
        if action.collective is not None:
            key = (str(action.collective.kind), action.axes, _key(action))
            sums[key] = sums.get(key, 0.0) + shares.get(number, 0.0)
    by_axis = {action.axes: 0.0 for action in actions if action.axes}
    for label, us in timeline.exposed_us.items():
        by_axis[label.partition("@")[2]] += us
    return Overlapped(
        events=tuple(events), step_us=timeline.step_us, exposed_us=sums, by_axis_us=dict(sorted(by_axis.items())),
        of_calls=_of_calls(calls_of(graph, plan), sums), model=model_text(timeline),
    )  # fmt: skip


def _of_calls(calls: Iterable[Call], exposed_us: Mapping[CallKey, float]) -> dict[Call, float]:
    groups: dict[CallKey, list[Call]] = {}
    for call in calls:
        groups.setdefault((call.kind, call.axis, call.tensor), []).append(call)
    shares: dict[Call, float] = {}
    for key, group in groups.items():
        whole = sum(call.us for call in group)
        for call in group:
            shares[call] = shares.get(call, 0.0) + (exposed_us.get(key, 0.0) * call.us / whole if whole else 0.0)
    return shares


def model_text(timeline: Timeline) -> str:
    c = timeline.contention
    return (
        "Overlap model: parameters of the next block are gathered while one block runs, gradients are reduced while backward "
        "goes on. A collective starts when the CPU has issued it, its links are free and the compute issued before it is done. "
        f"While both run, products take {c.math:g} times as long, other kernels {c.memory:g} times, collectives "
        f"{c.communication:g} times."
    )


def quantities(found: Overlapped, plan: Plan) -> tuple[Quantity, ...]:
    """Step and exposed communication, whole step."""
    source = (
        f"forecast, not measured: event simulation of compute, links and the issuing CPU; hardware profile {plan.hardware_name}"
    )
    rows = [("step, overlapped", found.step_us, source), ("exposed", found.exposed_total_us, EXPOSED_SOURCE)]
    rows += [(f"exposed {axis}", us, EXPOSED_SOURCE) for axis, us in found.by_axis_us.items()]
    return tuple(Quantity(label=label, value=us / 1000, unit="ms", source=text, digits=2) for label, us, text in rows)


EXPOSED_SOURCE = "forecast: time that compute stands still for a collective, or for others before it on the same links"


# ---- which collective compute stands still for --------------------------------------------------------------------------


def _exposed(timeline: Timeline) -> dict[int, list[Piece]]:
    """Action -> when compute stands still for it. Of several that run, it is the one that ends last before compute goes on."""
    actions = timeline.actions.actions
    gaps = _gaps(timeline)
    sent = sorted(
        (timeline.start_us[n], timeline.end_us[n], n) for n, a in enumerate(actions) if a.lane != COMPUTE_LANE and a.us > 0
    )
    found: dict[int, list[Piece]] = {}
    first = 0
    for begin, end in gaps:
        while first < len(sent) and sent[first][1] <= begin and all(s[1] <= begin for s in sent[first : first + 2]):
            first += 1
        inside = []
        for start, stop, number in sent[first:]:
            if start >= end:
                break
            if stop > begin:
                inside.append((max(start, begin), min(stop, end), number))
        for start, stop, number in _one_at_a_time(inside):
            found.setdefault(number, []).append((start, stop - start))
    return found


def _gaps(timeline: Timeline) -> list[tuple[float, float]]:
    gaps, clock = [], 0.0
    for number, action in enumerate(timeline.actions.actions):
        if action.lane == COMPUTE_LANE and action.us > 0:
            if timeline.start_us[number] - clock >= SHORTEST_GAP_US:
                gaps.append((clock, timeline.start_us[number]))
            clock = timeline.end_us[number]
    if timeline.step_us - clock >= SHORTEST_GAP_US:
        gaps.append((clock, timeline.step_us))
    return gaps


def _one_at_a_time(inside: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Cut where any begins or ends; each part goes to the one that ends last."""
    cuts = sorted({time for start, stop, _ in inside for time in (start, stop)})
    parts = []
    for start, stop in pairwise(cuts):
        running = [(end, number) for begin, end, number in inside if begin <= start and end >= stop]
        if running:
            parts.append((start, stop, max(running)[1]))
    return parts


def _shares(pieces: Mapping[int, list[Piece]], timeline: Timeline) -> dict[int, float]:
    """Exposed µs of each action, scaled so that those of one label add up to what the timeline says of it."""
    actions = timeline.actions.actions
    raw = {number: sum(us for _, us in parts) for number, parts in pieces.items()}
    for number, action in enumerate(actions):
        if action.collective is not None:
            raw.setdefault(number, 0.0)
    whole: dict[str, float] = {}
    for number, us in raw.items():
        whole[actions[number].label] = whole.get(actions[number].label, 0.0) + us
    alike = {label: sum(1 for action in actions if action.label == label) for label in whole}
    return {
        number: timeline.exposed_us.get(label, 0.0) * (us / whole[label] if whole[label] else 1 / alike[label])
        for number, us in raw.items()
        for label in (actions[number].label,)
    }


# ---- events -------------------------------------------------------------------------------------------------------------


def _key(action: Action) -> str:
    """Of the op, or of the one that made the tensor that is moved."""
    return action.name.rpartition(" of ")[2]


def _event(graph: JointGraph, plan: Plan, timeline: Timeline, number: int, pieces: tuple[Piece, ...], share: float) -> Event:
    action = timeline.actions.actions[number]
    storages = timeline.actions.storages
    key = _key(action) if _key(action) in graph.node_by_key else ""
    lane = f"{action.axes}, {action.lane}" if action.axes else COMPUTE
    c = action.collective
    detail = {
        "block": action.block, "alone_us": round(action.us, 3),
        "reads": [_storage(storages[n].key, storages[n].placements) for n in action.reads],
        "writes": [_storage(storages[n].key, storages[n].placements) for n in action.writes],
    }  # fmt: skip
    if c is not None:
        detail |= {"bytes": c.full_bytes, "dtype": c.dtype, "exposed_us": round(share, 3)}
    phase = action.block.partition(" ")[0]
    return Event(
        lane=lane, name=str(c.kind) if c is not None else action.name.removesuffix(f" of {key}") if key else action.name,
        key=key, phase=phase if phase in ("forward", "backward") else "optimizer",
        module=graph.nodes[graph.node_by_key[key]].module if key else "", begin_us=timeline.start_us[number],
        us=timeline.end_us[number] - timeline.start_us[number], detail=detail, exposed=pieces,
    )  # fmt: skip


def _storage(key: str, placements: str) -> str:
    return f"{key} {placements}"
