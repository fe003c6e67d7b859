# mypy: allow-untyped-defs
"""Arc consistency: drop every strategy that some neighbour can never serve. What is left is the honest list of what is legal."""

from __future__ import annotations

import numba
import numpy as np

from planner.solving.layout import Layout


@numba.njit(cache=True, nogil=True)
def _revise(lay, alive, node, port, others, other_port, table, size):
    """Kill strategies of `node` whose placement has no partner among `others`' strategies. Row-major `table` starts with
    the node's side. -> number of strategies killed."""
    have = np.zeros(size, np.bool_)
    for s in range(lay.first[others + 1] - lay.first[others]):
        if alive[lay.first[others] + s]:
            have[lay.pool[other_port + s]] = True
    verdict = np.zeros(size, np.int8)  # 0 not yet known, 1 has a partner, -1 has none
    killed = 0
    for s in range(lay.first[node + 1] - lay.first[node]):
        at = lay.first[node] + s
        if not alive[at]:
            continue
        p = lay.pool[port + s]
        if verdict[p] == 0:
            verdict[p] = -1
            if have[p] and np.isfinite(table[p * size + p]):
                verdict[p] = 1
            else:
                for q in range(size):
                    if have[q] and np.isfinite(table[p * size + q]):
                        verdict[p] = 1
                        break
        if verdict[p] < 0:
            alive[at] = False
            killed += 1
    return killed


@numba.njit(cache=True, nogil=True)
def _mark(lay, node, dirty):
    for c in range(lay.out_at[node], lay.out_at[node + 1]):
        dirty[lay.out_edge[c]] = True
    for c in range(lay.in_at[node], lay.in_at[node + 1]):
        dirty[lay.in_edge[c]] = True


@numba.njit(cache=True, nogil=True)
def _propagate(lay, alive, dirty):
    """Revise dirty edges until none is left. -> a node without any strategy, or -1."""
    again = True
    while again:
        again = False
        for e in range(lay.edge_u.size):
            if not dirty[e]:
                continue
            dirty[e] = False
            again = True
            u, v, t = lay.edge_u[e], lay.edge_v[e], lay.edge_table[e]
            size, start, stop = lay.table_size[t], lay.table_at[t], lay.table_at[t + 1]
            if _revise(lay, alive, v, lay.port_v[e], u, lay.port_u[e], lay.table_transposed[start:stop], size) > 0:
                _mark(lay, v, dirty)
            if _revise(lay, alive, u, lay.port_u[e], v, lay.port_v[e], lay.table[start:stop], size) > 0:
                _mark(lay, u, dirty)
            if not alive[lay.first[v] : lay.first[v + 1]].any():
                return v
            if not alive[lay.first[u] : lay.first[u + 1]].any():
                return u
    return -1


def make_consistent(layout: Layout, alive: np.ndarray, changed: np.ndarray | None = None) -> int:
    """Clear entries of `alive` (bool, flat over strategies, changed in place) that no neighbour can serve.

    `changed` lists the nodes whose entries were cleared since `alive` was last consistent; None means all.
    Returns a node that has no strategy left (there is no plan), or -1.
    """
    if changed is None:
        dirty = np.ones(layout.num_edges, np.bool_)
        suspects = np.arange(layout.num_nodes)
    else:
        dirty = np.zeros(layout.num_edges, np.bool_)
        suspects = changed
        for node in changed:
            _mark(layout, int(node), dirty)
    for node in suspects:
        if not alive[layout.span(int(node))].any():
            return int(node)
    return int(_propagate(layout, alive, dirty))
