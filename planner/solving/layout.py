"""Flat arrays of a pairwise problem, in the form that the compiled loops walk over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """Structure of a pairwise problem; read-only. A strategy meets an edge only through a placement number.

    Nodes are numbered in sweep order and every edge has `edge_u < edge_v`.

    Attributes:
        first: int64 [nodes + 1]; strategies of node i are entries `first[i]:first[i + 1]` of flat strategy arrays.
        edge_u, edge_v: int64 [edges], the two nodes.
        edge_table: int64 [edges], number of the price table, rows are placements of u's side, columns of v's.
        port_u, port_v: int64 [edges]; `pool[port_u[e] + s]` is the placement number that strategy s of node u has at edge e.
        pool: int32, the port maps, shared between equal ones.
        table_size: int64 [tables], placements P of a (square) table.
        table_at: int64 [tables + 1]; table t is `table[table_at[t]:table_at[t + 1]]`, row-major.
        table, table_transposed: float64, µs, `inf` = impossible. Every table is a shortest-path closure.
        message_at: int64 [edges + 1], where the message of an edge lies (one entry per placement).
        out_at, out_edge: edges that leave a node towards later ones: `out_edge[out_at[i]:out_at[i + 1]]`.
        in_at, in_edge: edges that arrive from earlier ones.
    """

    first: np.ndarray
    edge_u: np.ndarray
    edge_v: np.ndarray
    edge_table: np.ndarray
    port_u: np.ndarray
    port_v: np.ndarray
    pool: np.ndarray
    table_size: np.ndarray
    table_at: np.ndarray
    table: np.ndarray
    table_transposed: np.ndarray
    message_at: np.ndarray
    out_at: np.ndarray
    out_edge: np.ndarray
    in_at: np.ndarray
    in_edge: np.ndarray

    @property
    def num_nodes(self) -> int:
        return len(self.first) - 1

    @property
    def num_edges(self) -> int:
        return len(self.edge_u)

    def span(self, node: int) -> slice:
        """Entries of the node's strategies in flat arrays."""
        return slice(int(self.first[node]), int(self.first[node + 1]))

    def ports(self, edge: int) -> tuple[np.ndarray, np.ndarray]:
        """Placement numbers of u's strategies and of v's strategies at the edge."""
        sizes = self.first[1:] - self.first[:-1]
        u, v = self.port_u[edge], self.port_v[edge]
        return self.pool[u : u + sizes[self.edge_u[edge]]], self.pool[v : v + sizes[self.edge_v[edge]]]

    def table_of(self, edge: int) -> np.ndarray:
        """float64 [P, P] µs, rows of u's side."""
        number = self.edge_table[edge]
        size = self.table_size[number]
        return self.table[self.table_at[number] : self.table_at[number + 1]].reshape(size, size)


@dataclass(frozen=True)
class EdgeSpec:
    """One edge before flattening: nodes u < v, placement numbers of their strategies, number of the table."""

    u: int
    v: int
    port_u: np.ndarray
    port_v: np.ndarray
    table: int


def flatten(sizes: Sequence[int], edges: Sequence[EdgeSpec], tables: Sequence[np.ndarray]) -> Layout:
    """Strategies per node, edges and square tables -> Layout. Port maps that are the same object are stored once."""
    place: dict[int, int] = {}
    parts: list[np.ndarray] = []
    filled = 0
    offsets: list[int] = []
    for edge in edges:
        assert edge.u < edge.v, "edges go from earlier to later nodes"
        for port in (edge.port_u, edge.port_v):
            if id(port) not in place:
                place[id(port)] = filled
                parts.append(port)
                filled += len(port)
            offsets.append(place[id(port)])
    edge_u = np.array([edge.u for edge in edges], np.int64)
    edge_v = np.array([edge.v for edge in edges], np.int64)
    edge_table = np.array([edge.table for edge in edges], np.int64)
    table_size = np.array([len(table) for table in tables], np.int64)
    out_at, out_edge = _by_node(edge_u, len(sizes))
    in_at, in_edge = _by_node(edge_v, len(sizes))
    return Layout(
        first=_offsets(np.array(sizes, np.int64)),
        edge_u=edge_u,
        edge_v=edge_v,
        edge_table=edge_table,
        port_u=np.array(offsets[::2], np.int64),
        port_v=np.array(offsets[1::2], np.int64),
        pool=np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32),
        table_size=table_size,
        table_at=_offsets(table_size**2),
        table=np.concatenate([table.ravel() for table in tables]) if tables else np.zeros(0),
        table_transposed=np.concatenate([table.T.ravel() for table in tables]) if tables else np.zeros(0),
        message_at=_offsets(table_size[edge_table]),
        out_at=out_at,
        out_edge=out_edge,
        in_at=in_at,
        in_edge=in_edge,
    )


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _by_node(ends: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(ends, kind="stable").astype(np.int64)
    return np.searchsorted(ends[order], np.arange(num_nodes + 1)).astype(np.int64), order
