"""What is left to decide once strategies are ruled out: a smaller problem, cut into parts that do not touch each other.

Nodes with one strategy left are decided; their edges become prices of the other end. An edge that has one placement left at
one end is such a price too. What remains is solved exactly, part by part (together if a memory budget ties the parts).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from planner.solving.ilp import IlpResult, Watch, count_columns, solve_ilp
from planner.solving.layout import EdgeSpec, Layout, flatten


@dataclass(frozen=True, eq=False)
class Core:
    """A reduced problem.

    Attributes:
        layout, cost_us, num_bytes: as for the whole problem, over the open nodes only.
        nodes: whole-problem node of each open node.
        kept: per open node, the whole-problem strategies that remain.
        decided: int64 [whole nodes], the strategy of decided nodes (open ones hold an arbitrary living strategy).
        constant_us, constant_bytes: what decided nodes and their edges add.
    """

    layout: Layout
    cost_us: np.ndarray
    num_bytes: np.ndarray
    nodes: np.ndarray
    kept: tuple[np.ndarray, ...]
    decided: np.ndarray
    constant_us: float
    constant_bytes: float

    def whole_choice(self, choice: np.ndarray) -> np.ndarray:
        found = self.decided.copy()
        for node, kept, strategy in zip(self.nodes, self.kept, choice, strict=True):
            found[node] = kept[strategy]
        return found


def reduce_to_core(layout: Layout, cost_us: np.ndarray, num_bytes: np.ndarray) -> Core:
    """`cost_us` is `inf` for strategies that are ruled out; every node must have one left."""
    alive = np.isfinite(cost_us)
    living = [np.flatnonzero(alive[layout.span(node)]) for node in range(layout.num_nodes)]
    decided = np.array([members[0] for members in living], np.int64)
    open_nodes = np.array([node for node, members in enumerate(living) if len(members) > 1], np.int64)
    number = np.full(layout.num_nodes, -1, np.int64)
    number[open_nodes] = np.arange(len(open_nodes))
    cost = [cost_us[layout.span(int(node))][living[node]].copy() for node in open_nodes]
    num = [num_bytes[layout.span(int(node))][living[node]] for node in open_nodes]
    is_decided = number < 0
    at = (layout.first[:-1] + decided)[is_decided]
    constant_us, constant_bytes = float(cost_us[at].sum()), float(num_bytes[at].sum())
    edges: list[EdgeSpec] = []
    tables: list[np.ndarray] = []
    known: dict[int, int] = {}
    for edge in range(layout.num_edges):
        u, v = int(layout.edge_u[edge]), int(layout.edge_v[edge])
        port_u, port_v = layout.ports(edge)
        left, right = port_u[living[u]], port_v[living[v]]
        table = layout.table_of(edge)
        one_left, one_right = (left == left[0]).all(), (right == right[0]).all()
        if one_left and one_right:
            constant_us += float(table[left[0], right[0]])
        elif one_left:
            cost[number[v]] += table[left[0], right]
        elif one_right:
            cost[number[u]] += table[left, right[0]]
        else:
            which = int(layout.edge_table[edge])
            if which not in known:
                known[which] = len(tables)
                tables.append(table)
            edges.append(EdgeSpec(int(number[u]), int(number[v]), left, right, known[which]))
    return Core(
        layout=flatten([len(values) for values in cost], edges, tables),
        cost_us=np.concatenate(cost) if cost else np.zeros(0),
        num_bytes=np.concatenate(num) if num else np.zeros(0),
        nodes=open_nodes,
        kept=tuple(living[node] for node in open_nodes),
        decided=decided,
        constant_us=constant_us,
        constant_bytes=constant_bytes,
    )


def solve_core(
    layout: Layout,
    cost_us: np.ndarray,
    num_bytes: np.ndarray,
    *,
    budget_bytes: int | None,
    max_columns: int,
    time_limit_s: float,
    gap_us: float,
    watch: Watch | None = None,
) -> IlpResult | None:
    """The exact optimum among strategies not ruled out; None if the core has more than `max_columns` variables."""
    if _open_strategies(layout, cost_us) > max_columns:
        return None
    core = reduce_to_core(layout, cost_us, num_bytes)
    until = time.monotonic() + time_limit_s
    if budget_bytes is not None:
        if count_columns(core.layout, core.cost_us) > max_columns:
            return None
        rest = int(budget_bytes - round(core.constant_bytes))
        if not len(core.nodes):
            fits = rest >= 0
            value = core.constant_us if fits else np.inf
            return IlpResult("optimal" if fits else "infeasible", value, value, core.decided if fits else None)
        found = solve_ilp(
            core.layout, core.cost_us, num_bytes=core.num_bytes, budget_bytes=rest, time_limit_s=time_limit_s, gap_us=gap_us,
            watch=watch and watch.shifted(core.constant_us),
        )  # fmt: skip
        return _whole(core, found)
    parts = _parts(core)
    if sum(count_columns(part.layout, part.cost_us) for part in parts) > max_columns:
        return None
    choice = np.zeros(len(core.nodes), np.int64)
    value, bound, status = 0.0, 0.0, "optimal"
    if watch is not None:  # what one of several parts comes to says nothing about the whole
        watch = watch.shifted(core.constant_us) if len(parts) == 1 else Watch(watch.cancelled)
    for part in parts:
        found = solve_ilp(
            part.layout, part.cost_us, time_limit_s=until - time.monotonic(), gap_us=gap_us / max(1, len(parts)), watch=watch
        )  # fmt: skip
        if found.choice is None:
            return found
        status = status if found.status == "optimal" else "feasible"
        value += found.value_us
        bound += found.bound_us
        choice[part.nodes] = found.choice
    return _whole(core, IlpResult(status, value, bound, choice))


def _open_strategies(layout: Layout, cost_us: np.ndarray) -> int:
    """Strategies of nodes that have a choice: fewer columns than that no core has."""
    living = np.add.reduceat(np.isfinite(cost_us).astype(np.int64), layout.first[:-1])
    return int(living[living > 1].sum())


def _whole(core: Core, found: IlpResult) -> IlpResult:
    if found.choice is None:
        return IlpResult(found.status, found.value_us, found.bound_us + core.constant_us, None)
    return IlpResult(
        found.status, found.value_us + core.constant_us, found.bound_us + core.constant_us, core.whole_choice(found.choice)
    )  # fmt: skip


def _parts(core: Core) -> list[Core]:
    """Connected parts of a core, as cores over the core's nodes."""
    lay = core.layout
    label = np.arange(lay.num_nodes)
    changed = True
    while changed:
        least = label.copy()
        np.minimum.at(least, lay.edge_u, label[lay.edge_v])
        np.minimum.at(least, lay.edge_v, label[lay.edge_u])
        changed = bool((least != label).any())
        label = least[least]
    parts = []
    for name in np.unique(label):
        members = np.flatnonzero(label == name)
        number = np.full(lay.num_nodes, -1, np.int64)
        number[members] = np.arange(len(members))
        mine = np.flatnonzero(label[lay.edge_u] == name)
        tables = {int(t): i for i, t in enumerate(dict.fromkeys(lay.edge_table[mine]))}
        specs = [
            EdgeSpec(int(number[lay.edge_u[e]]), int(number[lay.edge_v[e]]), *lay.ports(int(e)), tables[int(lay.edge_table[e])])
            for e in mine
        ]
        first_edge = {int(lay.edge_table[e]): int(e) for e in mine[::-1]}
        spans = [lay.span(int(node)) for node in members]
        parts.append(
            Core(
                layout=flatten([s.stop - s.start for s in spans], specs, [lay.table_of(first_edge[t]) for t in tables]),
                cost_us=np.concatenate([core.cost_us[s] for s in spans]),
                num_bytes=np.concatenate([core.num_bytes[s] for s in spans]),
                nodes=members,
                kept=(),
                decided=np.zeros(0, np.int64),
                constant_us=0.0,
                constant_bytes=0.0,
            )
        )
    return parts
