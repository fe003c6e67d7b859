"""Graph and plan -> the two messages that the plan graph draws. Lists are columns; strings are sent once, referred to by index.

topology  changes only when the model is traced again.
overlay   changes with the plan, the pins or the base plan.

A gradient is stored in the placement of its parameter: that is a use of the gradient tensor without an op. It is drawn as a
box of its own in the backward column, with the key `grad:NAME`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from app.view_models.placements import local_bytes, placement_of, placements_text
from planner import VIEW_OPS, JointGraph, Plan, TensorRef

GIB, MIB, MB = 2**30, 2**20, 10**6
OPTIMIZER_COPIES = {"adamw": 8, "sgd": 0, "none": 0}
"""Bytes of optimizer state per parameter element, as `planner.memory` counts them."""

_RULE = re.compile(r"(?:.*/)?(?P<name>[^/]+)/(?:fwd|bwd)#(?P<ordinal>\d+)")


class DrawnGraph:
    """What is drawn of a joint graph: its nodes, then one box per stored gradient; and all edges between them.

    Attributes:
        keys: of every box.
        edges: (producer box, consumer box, consumer key and operand slot as the plan names the use).
    """

    def __init__(self, graph: JointGraph) -> None:
        self.graph = graph
        self.gradients = [p for p in graph.parameters if p.gradient is not None]
        self.keys = [node.key for node in graph.nodes] + [f"grad:{p.name}" for p in self.gradients]
        self.edges = [
            (ref.node, consumer, (node.key, slot))
            for consumer, node in enumerate(graph.nodes)
            for slot, ref in enumerate(node.operands)
        ]
        for number, parameter in enumerate(self.gradients):
            assert parameter.gradient is not None
            box = len(graph.nodes) + number
            self.edges.append((parameter.gradient.node, box, (graph.nodes[parameter.node].key, -1)))

    @cached_property
    def edge_of_use(self) -> dict[tuple[str, int], int]:
        return {use: number for number, (_, _, use) in enumerate(self.edges)}

    @cached_property
    def topology(self) -> dict[str, Any]:
        return _topology(self)


def _indexed(values: Iterable[str]) -> tuple[list[str], list[int]]:
    """Distinct strings in order of appearance, and for every value its index among them."""
    table: dict[str, int] = {}
    indices = [table.setdefault(value, len(table)) for value in values]
    return list(table), indices


def _with_hash(message: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(message, sort_keys=True, separators=(",", ":"))
    return {"hash": hashlib.sha256(text.encode()).hexdigest()[:16], **message}


def owner(kind: str, key: str, module: str) -> tuple[str, str]:
    """(module path, short name) under which a leaf is drawn: `param:layers.0.wq.weight` -> (`layers.0.wq`, `weight`)."""
    name = key.split(":", 1)[-1]
    path, _, short = name.rpartition(".")
    return (module or path, short or name) if kind in ("param", "buffer", "gradient") else (module, name)


def loose_groups(graph: JointGraph) -> dict[int, str]:
    """Ops outside every module -> name of the box they are drawn in: one box per connected group and phase.

    A group is named after the loss it computes or starts from, otherwise after the first source line in it.
    """
    loose = [i for i, node in enumerate(graph.nodes) if node.is_op and not node.module]
    leader = {i: i for i in loose}

    def find(i: int) -> int:
        while leader[i] != i:
            i = leader[i]
        return i

    for i in loose:
        for ref in graph.nodes[i].operands:
            if ref.node in leader and graph.nodes[ref.node].phase == graph.nodes[i].phase:
                leader[find(i)] = find(ref.node)
    members: dict[int, list[int]] = {}
    for i in loose:
        members.setdefault(find(i), []).append(i)
    names: dict[int, str] = {}
    for group in members.values():
        if len(group) > 2:
            names.update(dict.fromkeys(group, _group_name(graph, group)))
    return names


def _group_name(graph: JointGraph, group: list[int]) -> str:
    reads = {graph.nodes[ref.node].kind for i in group for ref in graph.nodes[i].operands}
    if graph.loss.node in group or "tangent" in reads:
        return "loss"
    return next((graph.nodes[i].source for i in group if graph.nodes[i].source), "ops")


def _boxes(drawn: DrawnGraph) -> list[tuple[str, str, str, bool, int]]:
    """Per box: module, name, kind, backward, ordinal."""
    boxes: list[tuple[str, str, str, bool, int]] = []
    groups = loose_groups(drawn.graph)
    for index, node in enumerate(drawn.graph.nodes):
        if node.is_op:
            rule = _RULE.fullmatch(node.key)
            kind = "view" if node.op in VIEW_OPS else "op"
            name = rule["name"] if rule else node.name
            boxes.append(
                (node.module or groups.get(index, ""), name, kind, node.phase == "backward", int(rule["ordinal"]) if rule else 0)
            )
        else:
            boxes.append((*owner(node.kind, node.key, node.module), node.kind, node.phase == "backward", 0))
    for parameter in drawn.gradients:
        module, name = owner("gradient", parameter.name, drawn.graph.nodes[parameter.node].module)
        boxes.append((module, f"{name} gradient", "gradient", True, 0))
    return boxes


def _topology(drawn: DrawnGraph) -> dict[str, Any]:
    boxes = _boxes(drawn)
    modules, module_of = _indexed(box[0] for box in boxes)
    names, name_of = _indexed(box[1] for box in boxes)
    kinds, kind_of = _indexed(box[2] for box in boxes)
    odd = {
        str(i): key
        for i, (key, (module, name, _, backward, ordinal)) in enumerate(zip(drawn.keys, boxes, strict=True))
        if key != f"{module + '/' if module else ''}{name}/{'bwd' if backward else 'fwd'}#{ordinal}"
    }
    return _with_hash({
        "modules": modules, "names": names, "kinds": kinds,
        "ops": {
            "name": name_of, "module": module_of, "kind": kind_of,
            "backward": [int(box[3]) for box in boxes], "ordinal": [box[4] for box in boxes],
        },
        "odd_keys": odd,
        "edges": {"producer": [a for a, _, _ in drawn.edges], "consumer": [b for _, b, _ in drawn.edges]},
        "repeats": _repeats(drawn.graph),
    })  # fmt: skip


def _repeats(graph: JointGraph) -> dict[str, str]:
    """Path of each numbered module -> id of its structure; equal ids are the same module with other weights."""
    contents: dict[str, list[Any]] = {}
    for node in graph.nodes:
        module, short = owner(node.kind, node.key, node.module)
        parts = module.split(".")
        for depth, part in enumerate(parts):
            if part.isdigit():
                inside = [".".join(parts[depth + 1 :]), short if not node.is_op else node.name, node.kind, node.phase]
                contents.setdefault(".".join(parts[: depth + 1]), []).append([*inside, [str(m) for m in node.outputs]])
    return {path: hashlib.sha256(json.dumps(found).encode()).hexdigest()[:10] for path, found in contents.items()}


def marked(message: Mapping[str, Any], *, pins: Mapping[str, str] = {}, base: Mapping[str, str] = {}) -> dict[str, Any]:
    """The overlay: what is drawn of a plan (`plan_message`), with its marks. `pins`: key -> placement text. `base`: key ->
    placement it had in the base plan, changed boxes only."""
    marks = _with_hash({"plan": message["hash"], "pins": dict(pins), "base": dict(base)})
    return {**message, "hash": marks["hash"], "pins": marks["pins"], "base": marks["base"]}


def plan_message(drawn: DrawnGraph, plan: Plan) -> dict[str, Any]:
    """What is drawn of a plan whatever is pinned."""
    graph = drawn.graph
    placements = [placements_text(placement_of(plan, node.key)) for node in graph.nodes]
    placements += [placements[p.node] for p in drawn.gradients]
    table, placement = _indexed(placements)
    compute = [round(plan.choices[node.key].compute_us, 1) if node.key in plan.choices else 0.0 for node in graph.nodes]
    groups = axis_groups(plan)
    moves, comm = _redistributions(drawn, plan, groups)
    texts, text_of = _indexed(text for _, _, text in moves)
    return _with_hash({
        "graph": drawn.topology["hash"],
        "axes": list(plan.mesh.axis_names),
        "groups": groups,
        "placements": table, "placement": placement,
        "comm_us": comm, "compute_us": compute + [0.0] * len(drawn.gradients), "memory_mib": _memory_mib(drawn, plan),
        "texts": texts,
        "redistributions": {"edge": [e for e, _, _ in moves], "axis": [axis for _, axis, _ in moves], "text": text_of},
    })  # fmt: skip


def traffic_text(num_bytes: int) -> str:
    """`4.2 MB`, `131 kB`: powers of ten, as bandwidths are given."""
    if num_bytes >= 100_000:
        return f"{num_bytes / MB:,.1f} MB"
    return f"{num_bytes / 1000:,.1f} kB" if num_bytes >= 1000 else f"{num_bytes} B"


def step_text(plan: Plan, step: Any) -> str:
    """`all_gather dp 4.2 MB` or `slice (local)`"""
    if step.collective is None:
        return "slice (local)"
    c = step.collective
    return f"{c.kind} {plan.axes_text(c.axes)} {traffic_text(c.full_bytes)}"


def axis_groups(plan: Plan) -> list[str]:
    """The mesh axes, then the flattened groups that the plan communicates over (`dp+tp`)."""
    names = list(plan.mesh.axis_names)
    return names + [group for group in plan.comm_bytes if group not in names]


def _redistributions(drawn: DrawnGraph, plan: Plan, groups: list[str]) -> tuple[list[tuple[int, int, str]], list[float]]:
    """(edge, axis group of the first collective or -1, text) per redistributed edge, and µs per box.

    The time of a shared redistribution is counted once, at its first consumer.
    """
    parts: dict[int, tuple[int, list[str]]] = {}
    comm = [0.0] * len(drawn.keys)
    for r in plan.redistributions:
        used = [plan.axes_text(step.collective.axes) for step in r.steps if step.collective is not None]
        axis = groups.index(used[0]) if used else -1
        text = ", ".join(step_text(plan, step) for step in r.steps)
        edges = [drawn.edge_of_use[use] for use in r.consumers if use in drawn.edge_of_use]
        if len(edges) > 1:
            text += f", shared by {len(edges)}"
        for edge in edges:
            known_axis, texts = parts.get(edge, (-1, []))
            parts[edge] = (known_axis if known_axis >= 0 else axis, [*texts, text])
        if edges:
            comm[drawn.edges[min(edges)][1]] += r.us
    moves = [(edge, axis, ", ".join(texts)) for edge, (axis, texts) in sorted(parts.items())]
    return moves, [round(us, 1) for us in comm]


def _memory_mib(drawn: DrawnGraph, plan: Plan) -> list[float]:
    """MiB per device that a box keeps: parameter and optimizer state, stored gradient, saved activation."""
    graph = drawn.graph
    kept = [0.0] * len(drawn.keys)
    per_element = OPTIMIZER_COPIES[plan.memory_policy.optimizer]
    for parameter in graph.parameters:
        ref = TensorRef(parameter.node, 0)
        own = local_bytes(plan, graph, ref)
        kept[parameter.node] += own + (own // graph.meta(ref).itemsize * per_element if parameter.gradient else 0)
    for number, parameter in enumerate(drawn.gradients):
        kept[len(graph.nodes) + number] += local_bytes(plan, graph, TensorRef(parameter.node, 0))
    for ref in graph.saved_for_backward:
        kept[ref.node] += local_bytes(plan, graph, ref)
    return [round(num_bytes / MIB, 1) for num_bytes in kept]
