"""The bound of message passing, computed again from the messages alone, in plain numpy and straight from its definition.

A plan's price is, whatever the messages are,

    sum over nodes v of d_v(s) + sum over edges e of r_e(p, q)

with d_v = price of the strategy + all messages into v and r_e = table - both messages of e. Moving a part g_v of each node's
d_v - min d_v to every edge from an earlier node, and taking the least of each term, gives a number that no plan is below. Tiny
prices that the solver adds are no part of it: prices are given, messages are only looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.solving.kernels import Messages
from planner.solving.layout import Layout


@dataclass(frozen=True, eq=False)
class Proof:
    """`bound_us`: no plan is cheaper. `with_strategy_us` (flat over strategies): no plan with the strategy is cheaper."""

    bound_us: float
    with_strategy_us: np.ndarray


def price(layout: Layout, cost_us: np.ndarray, choice: np.ndarray) -> float:
    """µs of a choice of one strategy per node: strategies and placement changes, one after the other."""
    total = sum(float(cost_us[layout.span(node)][choice[node]]) for node in range(layout.num_nodes))
    for edge in range(layout.num_edges):
        port_u, port_v = layout.ports(edge)
        row, column = port_u[choice[layout.edge_u[edge]]], port_v[choice[layout.edge_v[edge]]]
        total += float(layout.table_of(edge)[row, column])
    return total


def prove(layout: Layout, cost_us: np.ndarray, messages: Messages) -> Proof:
    """`cost_us` is flat over strategies, `inf` = ruled out."""
    n = layout.num_nodes
    total = [cost_us[layout.span(node)].copy() for node in range(n)]
    in_edges = np.bincount(layout.edge_v, minlength=n)
    out_edges = np.bincount(layout.edge_u, minlength=n)
    for edge in range(layout.num_edges):
        port_u, port_v = layout.ports(edge)
        at = slice(int(layout.message_at[edge]), int(layout.message_at[edge + 1]))
        total[layout.edge_u[edge]] += messages.backward[at][port_u]
        total[layout.edge_v[edge]] += messages.forward[at][port_v]
    low = np.array([values.min() for values in total])
    part = 1.0 / np.maximum(1.0, in_edges + messages.pace[2] * np.maximum(0, out_edges - in_edges))  # part * in_edges <= 1
    over = [values - least for values, least in zip(total, low, strict=True)]
    left = np.maximum(0.0, 1.0 - part * in_edges)
    dearer = [np.where(np.isfinite(over[node]), left[node], 1.0) * over[node] for node in range(n)]
    bound = float(low.sum())
    for edge in range(layout.num_edges):
        u, v = int(layout.edge_u[edge]), int(layout.edge_v[edge])
        port_u, port_v = layout.ports(edge)
        at = slice(int(layout.message_at[edge]), int(layout.message_at[edge + 1]))
        living_u, living_v = np.isfinite(over[u]), np.isfinite(over[v])
        rows, columns = np.unique(port_u[living_u]), np.unique(port_v[living_v])
        rest = layout.table_of(edge)[np.ix_(rows, columns)] - messages.backward[at][rows, None] - messages.forward[at][columns]
        share = np.full(layout.table_size[layout.edge_table[edge]], np.inf)
        np.minimum.at(share, port_v[living_v], part[v] * over[v][living_v])
        least = float((rest + share[columns]).min())
        bound += least
        by_row = np.full(len(share), np.inf)
        by_row[rows] = (rest + share[columns]).min(axis=1) - least
        by_column = np.full(len(share), np.inf)
        by_column[columns] = rest.min(axis=0) - least
        dearer[u] = dearer[u] + by_row[port_u]
        dearer[v] = dearer[v] + by_column[port_v] + part[v] * over[v]
    return Proof(bound, bound + np.concatenate(dearer))
