"""Two plans, one too big for the budget and one that fits -> better plans that fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planner.solving.problem import PairwiseProblem


def mix_plans(
    problem: PairwiseProblem, cost_us: np.ndarray, fits: np.ndarray, other: np.ndarray, budget_bytes: int
) -> np.ndarray:
    """`fits` with some of the places where `other` differs switched to it: the places that save most per byte, while the
    budget holds. Places are connected sets of differing nodes, so their effects add up exactly."""
    lay = problem.layout
    differs = fits != other
    if not differs.any():
        return fits
    label = np.where(differs, np.arange(lay.num_nodes), lay.num_nodes)
    inner = np.flatnonzero(differs[lay.edge_u] & differs[lay.edge_v])
    u, v = lay.edge_u[inner], lay.edge_v[inner]
    changed = True
    while changed:
        least = label.copy()
        np.minimum.at(least, u, label[v])
        np.minimum.at(least, v, label[u])
        padded = np.append(least, lay.num_nodes)
        least = np.minimum(least, padded[least])
        changed = bool((least != label).any())
        label = least
    at_fits, at_other = lay.first[:-1] + fits, lay.first[:-1] + other
    count = lay.num_nodes + 1
    us = np.bincount(label, cost_us[at_other] - cost_us[at_fits], count)
    edge_change = problem.edge_us(other) - problem.edge_us(fits)
    us += np.bincount(np.minimum(label[lay.edge_u], label[lay.edge_v]), edge_change, count)
    more_bytes = np.bincount(label, problem.num_bytes[at_other] - problem.num_bytes[at_fits], count)
    free = budget_bytes - problem.used_bytes(fits)
    take = np.zeros(count, np.bool_)
    per_byte = us / np.maximum(more_bytes, 1e-9)
    for place in np.argsort(per_byte, kind="stable"):
        if us[place] < 0 and more_bytes[place] <= free:
            take[place] = True
            free -= more_bytes[place]
    return np.where(take[label], other, fits)


def hybrids(layers: np.ndarray, fits: np.ndarray, other: np.ndarray, cut: int) -> list[np.ndarray]:
    """Plans that follow `other` in the layers before (or from) `cut` and `fits` elsewhere; what lies outside of the layers
    (layer -1) follows either."""
    inside = layers >= 0
    found = []
    for side in (layers < cut, layers >= cut):
        for outside in (fits, other):
            found.append(np.where(inside, np.where(side, other, fits), outside))
    return found


def cross_over(
    layers: np.ndarray,
    fits: np.ndarray,
    other: np.ndarray,
    mend: Callable[[np.ndarray, int], np.ndarray],
    offer: Callable[[np.ndarray], bool],
) -> None:
    """Repeated layers at the critical price per byte can each run either way: search how many of them run the `other` way.

    `mend(plan, cut)` makes the seam at a layer good; `offer(plan)` takes a plan and says whether it fits. The number of layers
    is found by bisection, for each way of cutting by itself.
    """
    numbers = np.unique(layers[layers >= 0])
    for way in range(4):
        low, high = 0, len(numbers)  # positions between layers; ways 0, 1 grow with the cut, ways 2, 3 shrink
        while low <= high:
            middle = (low + high) // 2
            cut = int(numbers[middle]) if middle < len(numbers) else int(numbers[-1]) + 1
            fitted = offer(mend(hybrids(layers, fits, other, cut)[way], cut))
            if fitted == (way < 2):
                low = middle + 1
            else:
                high = middle - 1
