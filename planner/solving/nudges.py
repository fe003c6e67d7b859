"""Tiny prices that make equally cheap plans differ.

Message passing ends where every node knows what its strategies cost at best. If several plans cost the same, each node sees
ties, and nodes that break them by themselves do not fit together. So every strategy gets a price of its own, far below the
precision to which a plan is proved. Nodes of the same name in different layers get the same ones: among equally cheap plans
those with equal layers win. What keeps bytes where the same node can do without (a parameter kept for backward) gets the larger
ones.
"""

from __future__ import annotations

import numpy as np

from planner.solving.problem import PairwiseProblem

NUDGE_PART = 1e-7
"""Nudges of a whole plan add up to at most this part of its price."""


def nudge_prices(problem: PairwiseProblem, address: np.ndarray) -> np.ndarray:
    """float64, flat over strategies, µs. `address` int64 [nodes]: equal for nodes that get equal nudges.

    Every plan costs at least the sum of the nodes' cheapest strategies, so that sum says how small is tiny.
    """
    lay = problem.layout
    least = float(np.minimum.reduceat(problem.unary_us, lay.first[:-1]).sum())
    of_node = np.repeat(address.astype(np.uint64), np.diff(lay.first))
    mixed = _scramble(of_node * np.uint64(0x9E3779B97F4A7C15) + problem.strategy_numbers.astype(np.uint64))
    least_bytes = np.repeat(np.minimum.reduceat(problem.num_bytes, lay.first[:-1]), np.diff(lay.first))
    some_keep = np.logical_or.reduceat(problem.num_bytes > 0, lay.first[:-1])
    chosen = (least_bytes == 0) & np.repeat(some_keep, np.diff(lay.first))
    mixed = np.where(chosen, 0.5 * (mixed + (problem.num_bytes > 0)), mixed)
    return mixed * (NUDGE_PART * least / max(lay.num_nodes, 1))


def _scramble(values: np.ndarray) -> np.ndarray:
    """uint64 -> float64 in [0, 1), as if at random. Method: the finaliser of splitmix64 (G. Steele, D. Lea, C. Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))).astype(np.float64) / 2.0**64
