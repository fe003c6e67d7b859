"""The step as events in lanes, drawn and written as a trace. Here also: in series, one thing after the other. All predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from app.view_models.placements import placements_text
from planner import JointGraph, Plan, layer_of

COMPUTE, LOCAL = "compute", "slice (local)"
PHASES = ("forward", "backward", "optimizer")
SERIAL_KIND = "predicted, not a trace: serial, no overlap"
OVERLAPPED_KIND = "predicted, not a trace: overlapped, as scheduled"

TOUCHING_US = 1.0
"""Compute events with less between them are drawn as one."""

Piece = tuple[float, float]
"""Begin and length of a part of an event, in µs."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that takes time.

    Attributes:
        lane: `compute`, or the mesh axes of a collective.
        name: op or collective; `key` the op, or the first reader of a redistributed tensor.
        phase: one of PHASES.
        begin_us, us: when it begins and how long it takes.
        exposed: the parts of a collective during which compute stands still for it.
        detail: bytes, placements and what else the reader of a trace wants to know.
    """

    lane: str
    name: str
    key: str
    phase: str
    module: str
    begin_us: float
    us: float
    detail: dict[str, Any]
    exposed: tuple[Piece, ...] = ()


def serial(graph: JointGraph, plan: Plan) -> tuple[Event, ...]:
    """All ops and redistributions, each when it is needed: a redistribution before its first reader, a stored gradient after its
    producer, and the optimizer's work on each parameter at the end. The last event ends at the sum of all times. `graph` is
    that of the plan."""
    before, after = _moves(graph, plan)
    found: list[Event] = []
    last: list[Event] = []
    clock = 0.0

    def add(events: list[Event]) -> None:
        nonlocal clock
        for event in events:
            found.append(replace(event, begin_us=clock, exposed=((clock, event.us),) if event.lane != COMPUTE else ()))
            clock += event.us

    for index, node in enumerate(graph.nodes):
        choice = plan.choices.get(node.key)
        add(before.get(index, []))
        if choice is not None and choice.compute_us > 0:
            outputs = [placements_text(p) for p in choice.outputs if p is not None]
            detail = {"placements": outputs, "operands": [placements_text(p) for p in choice.operands if p is not None]}
            if node.kind == "param":
                last.append(_event(COMPUTE, "optimizer step", node.key, "optimizer", node.module, choice.compute_us, detail))
            else:
                add([_event(COMPUTE, node.name, node.key, node.phase, node.module, choice.compute_us, detail)])
        add(after.get(index, []))
    add(last)
    return tuple(found)


def _event(lane: str, name: str, key: str, phase: str, module: str, us: float, detail: dict[str, Any]) -> Event:
    return Event(lane=lane, name=name, key=key, phase=phase, module=module, begin_us=0.0, us=us, detail=detail)


def _moves(graph: JointGraph, plan: Plan) -> tuple[dict[int, list[Event]], dict[int, list[Event]]]:
    """Node -> events just before it, and just after it. What is shared comes before what starts from it."""
    before: dict[int, list[Event]] = {}
    after: dict[int, list[Event]] = {}
    for r in sorted(plan.redistributions, key=lambda r: not r.shared):
        readers = [graph.node_by_key[key] for key, slot in r.consumers if slot >= 0]
        place, index = (before, min(readers)) if readers else (after, graph.node_by_key[r.tensor[0]])
        node = graph.nodes[index]
        source = r.source
        for step in r.steps:
            c = step.collective
            lane = plan.axes_text(c.axes) if c is not None else COMPUTE
            detail = {
                "tensor": r.tensor[0], "from": placements_text(source), "to": placements_text(step.target),
                "bytes": c.full_bytes if c is not None else 0, "dtype": c.dtype if c is not None else "",
                "readers": len(r.consumers),
            }  # fmt: skip
            name = str(c.kind) if c is not None else LOCAL
            place.setdefault(index, []).append(_event(lane, name, node.key, r.phase, node.module, step.us, detail))
            source = step.target
    return before, after


def lanes(events: tuple[Event, ...]) -> tuple[str, ...]:
    return (COMPUTE, *sorted({event.lane for event in events} - {COMPUTE}))


@dataclass(frozen=True, kw_only=True)
class Span:
    """Neighbouring compute events of one layer and phase drawn as one bar, or a part of a collective."""

    lane: str
    text: str
    key: str
    phase: str
    begin_us: float
    us: float
    is_exposed: bool = False


def spans(events: tuple[Event, ...]) -> tuple[Span, ...]:
    """What is drawn; sums are those of the events."""
    found: list[Span] = []
    for event in events:
        found.extend(_pieces(event) if event.lane != COMPUTE else ())
    computed = sorted((event for event in events if event.lane == COMPUTE), key=lambda event: event.begin_us)
    whole: list[Span] = []
    for event in computed:
        layer = layer_of(event.module)
        text = f"{'outside layers' if layer is None else f'layer {layer}'}, {event.phase}"
        last = whole[-1] if whole else None
        if last is not None and last.text == text and event.begin_us - last.begin_us - last.us < TOUCHING_US:
            whole[-1] = replace(last, us=event.begin_us + event.us - last.begin_us)
        else:
            whole.append(Span(lane=COMPUTE, text=text, key=event.key, phase=event.phase, begin_us=event.begin_us, us=event.us))
    return (*whole, *found)


def _pieces(event: Event) -> list[Span]:
    """The event cut into what is exposed and what is not."""
    ends = [time for begin, us in event.exposed for time in (begin, begin + us)]
    cuts = [event.begin_us, *ends, event.begin_us + event.us]
    text = f"{event.name} {'of' if 'reads' in event.detail else 'for'} {event.key}"
    return [
        Span(
            lane=event.lane, text=text, key=event.key, phase=event.phase, begin_us=begin, us=end - begin,
            is_exposed=number % 2 == 1,
        )
        for number, (begin, end) in enumerate(pairwise(cuts))
        if end - begin > 1e-6
    ]  # fmt: skip


def chrome_trace(events: tuple[Event, ...], plan: Plan, kind: str = SERIAL_KIND) -> str:
    """Trace Event Format, as Perfetto and chrome://tracing read it; times in µs. The same plan gives the same text."""
    number = {lane: n for n, lane in enumerate(lanes(events))}
    process = f"{plan.request.model} on {plan.mesh}, plan {plan.plan_id}: {kind}"
    rows: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": process}}]
    for lane, tid in number.items():
        rows.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        rows.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    rows += [
        {
            "ph": "X", "pid": 0, "tid": number[e.lane], "name": e.name, "cat": e.phase,
            "ts": round(e.begin_us, 3), "dur": round(e.us, 3), "args": {"op": e.key, **e.detail},
        }
        for e in events
    ]  # fmt: skip
    facts = {"kind": kind, "plan": plan.plan_id, "hardware": plan.hardware_name, "mesh": str(plan.mesh)}
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": facts}, separators=(",", ":"))
