"""What a plan communicates: every collective call with its place in the model, and sums of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.view_models.placements import placements_text
from app.view_models.status import GB, Quantity
from planner import JointGraph, Plan, hardware_names, hardware_profile, layer_of, without_layer
from planner.hardware_changes import split_name
from planner.provenance import Price, prices

UNITS = ("GB", "ms", "count")
PHASES = ("all", "forward", "backward")
GROUPINGS = ("collective", "module", "layer")
OUTSIDE = "outside layers"
TRAFFIC_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
"""Bytes that the slowest link carries per byte of the buffer, by ranks: bus bandwidth as in PERFORMANCE.md of nccl-tests."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective call of a step, on one rank.

    Attributes:
        axis: mesh axes of its group (`dp`, `dp+tp`); `ranks` in one group.
        module: of the op that reads the result first, "" at top level; `layer` its number, None outside layers.
        box: the box of the plan graph that shows it: the first reader, or the stored gradient.
        tensor: key of the op that made the tensor.
        source, target: whole placements before and after; `axis_source`, `axis_target` on the axes of the call alone.
        num_bytes: the full buffer, as `Plan.comm_bytes` counts it.
        us: predicted, copies around the call included.
    """

    axis: str
    kind: str
    phase: str
    module: str
    layer: int | None
    box: str
    tensor: str
    source: str
    target: str
    axis_source: str
    axis_target: str
    num_bytes: int
    us: float
    ranks: int
    dtype: str

    @property
    def layer_name(self) -> str:
        return OUTSIDE if self.layer is None else f"layer {self.layer}"

    @property
    def module_name(self) -> str:
        """The module without the number of its layer."""
        return without_layer(self.module) or "top level"


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which calls are shown; "" lets everything pass."""

    phase: str = ""
    axis: str = ""
    kind: str = ""
    layer: str = ""
    module: str = ""

    @property
    def path(self) -> tuple[str, ...]:
        """The box of `tree` that the filter stands for, as far as it names one."""
        parts = (self.axis, self.kind, self.layer, self.module)
        return parts[: next((n for n, part in enumerate(parts) if not part), len(parts))]

    def passes(self, call: Call) -> bool:
        wanted = (self.phase, self.axis, self.kind, self.layer, self.module)
        has = (call.phase, call.axis, call.kind, call.layer_name, call.module_name)
        return all(not want or want == own for want, own in zip(wanted, has, strict=True))

    def keep(self, calls: Iterable[Call]) -> tuple[Call, ...]:
        return tuple(call for call in calls if self.passes(call))


@dataclass(frozen=True, kw_only=True)
class Hotspot:
    """Alike calls together: equal but for the layer. `box` is that of the dearest call."""

    module: str
    kind: str
    axis: str
    phase: str
    source: str
    target: str
    count: int
    num_bytes: int
    us: float
    bus_bytes_per_s: float
    box: str
    exposed_us: float = 0.0


def calls_of(graph: JointGraph, plan: Plan) -> tuple[Call, ...]:
    """Every collective of the plan, in its order. `graph` is that of the plan, with repeated layers."""
    found: list[Call] = []
    for r in plan.redistributions:
        reader, slot = r.consumers[0] if r.consumers else (r.tensor[0], 0)
        node = graph.nodes[graph.node_by_key[reader]]
        leaf = reader.partition(":")[2].rpartition(".")[0]
        module = node.module or ("" if node.is_op else leaf)
        box = f"grad:{graph.parameter_of_node[graph.node_by_key[reader]].name}" if slot == -1 and node.kind == "param" else reader
        before = r.source
        for step in r.steps:
            c = step.collective
            if c is not None:
                found.append(Call(
                    axis=plan.axes_text(c.axes), kind=str(c.kind), phase=r.phase, module=module, layer=layer_of(module), box=box,
                    tensor=r.tensor[0], source=placements_text(before), target=placements_text(step.target),
                    axis_source=placements_text([before[a] for a in c.axes]),
                    axis_target=placements_text([step.target[a] for a in c.axes]), num_bytes=c.full_bytes, us=step.us,
                    ranks=math.prod(plan.mesh.axis_sizes[a] for a in c.axes), dtype=c.dtype,
                ))  # fmt: skip
            before = step.target
    return tuple(found)


def local_us(plan: Plan) -> float:
    """Time of the steps without traffic: slices."""
    return sum(step.us for r in plan.redistributions for step in r.steps if step.collective is None)


def amount(call: Call, unit: str) -> float:
    return {"GB": call.num_bytes / GB, "ms": call.us / 1000, "count": 1.0}[unit]


def total(calls: Iterable[Call], unit: str) -> float:
    return sum(amount(call, unit) for call in calls)


def axes_of(calls: Iterable[Call]) -> tuple[str, ...]:
    return tuple(sorted({call.axis for call in calls}))


def layers_of(calls: Iterable[Call]) -> tuple[str, ...]:
    """Names of the layers in order, `outside layers` first."""
    numbers = {call.layer for call in calls}
    return ((OUTSIDE,) if None in numbers else ()) + tuple(f"layer {n}" for n in sorted(n for n in numbers if n is not None))


def bars(calls: Iterable[Call], by: str, unit: str, most: int = 14) -> dict[str, dict[str, float]]:
    """Row -> collective -> amount. Rows are mesh axes, or for `module` and `layer` those within each axis.

    Of modules the largest `most` have rows of their own, the others share one; layers come in order.
    """
    calls = tuple(calls)
    rows: dict[str, dict[str, float]] = {}
    for call in calls:
        name = {
            "collective": call.axis,
            "module": f"{call.axis}: {call.module_name}",
            "layer": f"{call.axis}: {call.layer_name}",
        }[by]
        kinds = rows.setdefault(name, {})
        kinds[call.kind] = kinds.get(call.kind, 0.0) + amount(call, unit)
    if by == "layer":
        names = [f"{axis}: {layer}" for axis in axes_of(calls) for layer in layers_of(calls)]
        return dict(sorted(rows.items(), key=lambda row: names.index(row[0])))
    ranked = sorted(rows.items(), key=lambda row: (-sum(row[1].values()), row[0]))
    if by == "module" and len(ranked) > most + 1:
        rest: dict[str, float] = {}
        for _, kinds in ranked[most:]:
            for kind, value in kinds.items():
                rest[kind] = rest.get(kind, 0.0) + value
        ranked = [*ranked[:most], (f"{len(ranked) - most} other modules", rest)]
    return dict(ranked)


def tree(calls: Iterable[Call], unit: str) -> dict[tuple[str, ...], float]:
    """Path (axis, collective, layer, module) and each of its beginnings -> amount; children add up to their parent."""
    found: dict[tuple[str, ...], float] = {}
    for call in calls:
        path = (call.axis, call.kind, call.layer_name, call.module_name)
        for depth in range(len(path) + 1):
            found[path[:depth]] = found.get(path[:depth], 0.0) + amount(call, unit)
    return found


def heat(calls: Iterable[Call], unit: str) -> dict[str, dict[str, float]]:
    """Axis -> layer -> amount, 0 where a layer does not use the axis."""
    calls = tuple(calls)
    found = {axis: dict.fromkeys(layers_of(calls), 0.0) for axis in axes_of(calls)}
    for call in calls:
        found[call.axis][call.layer_name] += amount(call, unit)
    return found


def only_layers(strip: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Without what is outside layers, which would outshine them; empty if nothing is in a layer."""
    kept = {axis: {layer: value for layer, value in row.items() if layer != OUTSIDE} for axis, row in strip.items()}
    return {axis: row for axis, row in kept.items() if row}


def heat_text(strip: dict[str, dict[str, float]], unit: str) -> str:
    """What the darkest cell is worth, the first of equal ones, and how much is outside layers."""
    name = "calls" if unit == "count" else unit
    cells = [(value, layer, axis) for axis, row in only_layers(strip).items() for layer, value in row.items()]
    sentences = []
    if cells:
        value, layer, axis = max(cells, key=lambda cell: float(f"{cell[0]:.9g}"))
        sentences.append(f"Per layer and mesh axis; darkest: {short(value)} {name}, {layer} over {axis}.")
    outside = [f"{axis} {short(row[OUTSIDE])}" for axis, row in strip.items() if row.get(OUTSIDE)]
    if outside:
        sentences.append(f"Outside layers, {name}: {', '.join(outside)}.")
    return " ".join(sentences)


def short(value: float) -> str:
    """Two decimals, more for small numbers."""
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.3f}" if value >= 0.001 else "<0.001"


def hotspots(calls: Iterable[Call], exposed_us: Mapping[Call, float] | None = None) -> tuple[Hotspot, ...]:
    """Groups of alike calls, the dearest first. `exposed_us`: of each call, as far as it is known."""
    groups: dict[tuple[str, ...], list[Call]] = {}
    for call in calls:
        key = (call.module_name, call.kind, call.axis, call.phase, call.source, call.target)
        groups.setdefault(key, []).append(call)
    found = (_hotspot(key, group, exposed_us or {}) for key, group in groups.items())
    return tuple(sorted(found, key=lambda spot: (-spot.us, spot.module)))


def _hotspot(key: tuple[str, ...], group: list[Call], exposed_us: Mapping[Call, float]) -> Hotspot:
    us = sum(call.us for call in group)
    carried = sum(call.num_bytes * TRAFFIC_FACTOR[call.kind](call.ranks) for call in group)
    module, kind, axis, phase, source, target = key
    return Hotspot(
        module=module, kind=kind, axis=axis, phase=phase, source=source, target=target, count=len(group),
        num_bytes=sum(call.num_bytes for call in group), us=us, bus_bytes_per_s=carried / us * 1e6 if us else 0.0,
        box=max(group, key=lambda call: call.us).box, exposed_us=sum(exposed_us.get(call, 0.0) for call in set(group)),
    )  # fmt: skip


def flows(calls: Iterable[Call]) -> tuple[Hotspot, ...]:
    """Per axis, from which placement to which: modules and phases together."""
    groups: dict[tuple[str, ...], list[Call]] = {}
    for call in calls:
        groups.setdefault(("", call.kind, call.axis, "", call.axis_source, call.axis_target), []).append(call)
    return tuple(sorted((_hotspot(key, group, {}) for key, group in groups.items()), key=lambda f: (f.axis, -f.num_bytes)))


def quantities(plan: Plan, calls: Iterable[Call]) -> tuple[Quantity, ...]:
    """Sums of the calls that are shown, with where they come from."""
    calls = tuple(calls)
    model = f"predicted; sum of the planned collectives; hardware profile {plan.hardware_name}"
    per_axis = [_volume(axis, [call for call in calls if call.axis == axis]) for axis in axes_of(calls)]
    time = Quantity(
        label="time of the calls", value=total(calls, "ms"), unit="ms", digits=2,
        source=f"{model}; copies around the calls included; serial, so all of it is exposed",
    )  # fmt: skip
    slices = Quantity(
        label="local slices, whole step", value=local_us(plan) / 1000, unit="ms", digits=2,
        source=f"predicted; changes of placement without traffic, not in the charts; hardware profile {plan.hardware_name}",
    )  # fmt: skip
    return (*per_axis, time, slices)


def _volume(axis: str, calls: list[Call]) -> Quantity:
    size = total(calls, "GB")
    value, unit = (size, "GB") if size >= 0.1 else (size * 1000, "MB")
    return Quantity(
        label=f"{axis}, {len(calls):,} {'call' if len(calls) == 1 else 'calls'}", value=value, unit=unit, digits=2,
        source=f"counted from the plan: full buffers of one rank in one step; {calls[0].ranks} ranks in a group",
    )  # fmt: skip


def price_sources(plan: Plan) -> tuple[Quantity, ...]:
    """Time of each kind of collective in the whole step: by which rule, how far off it may be, and where its constants are from.

    Empty if this installation has not the hardware profile of the plan.
    """
    if split_name(plan.hardware_name)[0] not in hardware_names():
        return ()
    found = prices(plan, hardware_profile(plan.hardware_name))
    return tuple(_price(price, plan) for price in found if price.kind.partition(" ")[0] in TRAFFIC_FACTOR)


def _price(price: Price, plan: Plan) -> Quantity:
    own = [constant for name, constant in price.constants.items() if name.startswith(("fabric.efficiency", "node.collective"))]
    kinds = ", ".join(sorted({constant.kind for constant in price.constants.values()}))
    sources = "; ".join(dict.fromkeys(constant.source for constant in own))
    return Quantity(
        label=price.kind, value=price.us / 1000, unit="ms", digits=2,
        source=f"predicted, may be off by {price.error_pct:.0f} %: {price.rule}; "
        f"constants of {plan.hardware_name} ({kinds}): {sources}",
    )  # fmt: skip


BUS_SOURCE = (
    "bus GB/s: bytes that the slowest link carries over the predicted time, as nccl-tests defines it: full bytes times "
    "2(n-1)/n for all-reduce, (n-1)/n otherwise, n = ranks in the group"
)
