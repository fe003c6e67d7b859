# mypy: allow-untyped-defs
"""Compiled loops of message passing: sweeps with a proven bound, decoding, and the mending of a decoded plan.

Method: sequential tree-reweighted message passing (V. Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", IEEE PAMI 2006). Messages are kept per *placement* of an edge, so an edge costs K + P*P, not K*K.

Why the bound holds. Let d_v(s) = cost of strategy s + all messages into v, and r_e(p, q) = table - both messages of e. For
any messages the price of a plan is the sum of d_v over nodes plus r_e over edges. A backward pass chooses the message of
e = (u, v) towards u so that r_e(p, q) >= low_e - g_v * (d_v(q) - low_v), with low_v = min d_v and g_v * (edges from earlier
nodes) <= 1. Summing, every plan costs at least the sum of all low_v and low_e. Infinite entries mean "impossible" and are
skipped; with arc-consistent strategies every entry that is read is finite.

One file, though a long one: what numba keeps of a compiled function is thrown away when its own file changes, and not when that
of a function it calls does.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

MESSAGE_LIMIT = 1e12
"""Largest message entry kept, µs. Lowering a message entry never invalidates the bound."""


MOST_MOMENTUM = 0.9
"""Part of the last movement that a message is moved on by, at most."""


class Messages(NamedTuple):
    """State of message passing, changed in place.

    Attributes:
        forward, backward: float64, flat by `Layout.message_at`: entries per placement, towards v and towards u.
        before: float64, `backward` as it was when momentum was last given.
        pace: float64 [3], the step number of the momentum, the bound of the sweep before, and how shares are formed (`_share`).
        node_low, edge_low: float64, parts of the bound.
        choice: int64 [nodes], strategy of each node in the running decoding.
        stale_forward, stale_backward, stale_choice: bool [nodes], what must be computed again at the node's next visit.
    """

    forward: np.ndarray
    backward: np.ndarray
    before: np.ndarray
    pace: np.ndarray
    node_low: np.ndarray
    edge_low: np.ndarray
    choice: np.ndarray
    stale_forward: np.ndarray
    stale_backward: np.ndarray
    stale_choice: np.ndarray

    def copy(self) -> Messages:
        return Messages(*(array.copy() for array in self))

    def restore(self, saved: Messages) -> None:
        for mine, other in zip(self, saved, strict=True):
            mine[:] = other


@numba.njit(cache=True, nogil=True)
def _transform(h, old, at, table, base, n, msg):
    """msg[q] = min_p h[p] - old[at + p] + table[p, q]; h is `inf` where no living strategy has placement p. The table is a
    shortest-path closure, so a p that is already reached more cheaply (msg[p] <= h[p]) is exact to skip."""
    best = -1
    before, new = old[at : at + n], msg[:n]  # slices let the compiler use vector instructions
    for p in range(n):
        if h[p] < np.inf:
            h[p] -= before[p]
            if best < 0 or h[p] < h[best]:
                best = p
    w, row = h[best], table[base + best * n : base + best * n + n]
    for q in range(n):
        new[q] = w + row[q]
    for p in range(n):
        if h[p] < new[p]:
            w, row = h[p], table[base + p * n : base + p * n + n]
            for q in range(n):
                new[q] = min(new[q], w + row[q])


@numba.njit(cache=True, nogil=True)
def _store(messages, at, n, msg, eps):
    """Write the message, normalised to minimum 0, if some entry moved by more than eps. -> (moved, constant for the bound).
    An old message may stay if the constant is lowered so that old + constant <= new everywhere."""
    new, old = msg[:n], messages[at : at + n]
    low = new[0]
    for q in range(1, n):
        low = min(low, new[q])
    most, slack = 0.0, 0.0
    for q in range(n):
        change = min(new[q] - low, MESSAGE_LIMIT) - old[q]
        most = max(most, change)
        slack = min(slack, change)
    if most <= eps and slack >= -eps:
        return False, low + slack
    for q in range(n):
        old[q] = min(new[q] - low, MESSAGE_LIMIT)
    return True, low


@numba.njit(cache=True, nogil=True)
def _gather(lay, cost, m, i, d):
    """d[s] = cost of strategy s of node i + all messages into i. -> number of strategies"""
    start = lay.first[i]
    k = lay.first[i + 1] - start
    own, total = cost[start : start + k], d[:k]
    for s in range(k):
        total[s] = own[s]
    for c in range(lay.out_at[i], lay.out_at[i + 1]):
        e = lay.out_edge[c]
        message, port = m.backward[lay.message_at[e] : lay.message_at[e + 1]], lay.pool[lay.port_u[e] : lay.port_u[e] + k]
        for s in range(k):
            total[s] += message[port[s]]
    for c in range(lay.in_at[i], lay.in_at[i + 1]):
        e = lay.in_edge[c]
        message, port = m.forward[lay.message_at[e] : lay.message_at[e + 1]], lay.pool[lay.port_v[e] : lay.port_v[e] + k]
        for s in range(k):
            total[s] += message[port[s]]
    return k


@numba.njit(cache=True, nogil=True)
def _share(here, there, pace):
    """g: which part of a node's cost goes along each of its `here` edges of a pass, if `there` edges lie behind. `pace[2]` = 1
    keeps what the edges behind will want (TRW-S: a part per chain), 0 sends everything ahead."""
    return 1.0 / max(1.0, here + pace[2] * max(0, there - here))


@numba.njit(cache=True, nogil=True)
def _share_out(lay, i, pace):
    return _share(lay.out_at[i + 1] - lay.out_at[i], lay.in_at[i + 1] - lay.in_at[i], pace)


@numba.njit(cache=True, nogil=True)
def _share_in(lay, i, pace):
    return _share(lay.in_at[i + 1] - lay.in_at[i], lay.out_at[i + 1] - lay.out_at[i], pace)


@numba.njit(cache=True, nogil=True)
def _spread(pool, port, d, k, g, h, n):
    """h[p] = min over strategies at placement p of g * d."""
    least, numbers, price = h[:n], pool[port : port + k], d[:k]
    for p in range(n):
        least[p] = np.inf
    for s in range(k):
        p = numbers[s]
        least[p] = min(least[p], g * price[s])


@numba.njit(cache=True, nogil=True)
def _price_row(lay, e, from_u, fixed, penalty, d, k):
    """Add the price of edge e to d, the other end being fixed at strategy `fixed`; impossible costs `penalty`."""
    t = lay.edge_table[e]
    n, base = lay.table_size[t], lay.table_at[t]
    if from_u:
        at = base + lay.pool[lay.port_u[e] + fixed] * n
        row, port = lay.table[at : at + n], lay.pool[lay.port_v[e] : lay.port_v[e] + k]
    else:
        at = base + lay.pool[lay.port_v[e] + fixed] * n
        row, port = lay.table_transposed[at : at + n], lay.pool[lay.port_u[e] : lay.port_u[e] + k]
    total = d[:k]
    for s in range(k):
        total[s] += min(penalty, row[port[s]])


@numba.njit(cache=True, nogil=True)
def _argmin(d, k):
    best, values = 0, d[:k]
    for s in range(1, k):
        if values[s] < values[best]:
            best = s
    return best


@numba.njit(cache=True, nogil=True)
def value_of(lay, cost, x):
    """Price of the choice x, `inf` if some pair is impossible."""
    total = 0.0
    for i in range(lay.first.size - 1):
        total += cost[lay.first[i] + x[i]]
    for e in range(lay.edge_u.size):
        t = lay.edge_table[e]
        p, q = lay.pool[lay.port_u[e] + x[lay.edge_u[e]]], lay.pool[lay.port_v[e] + x[lay.edge_v[e]]]
        total += lay.table[lay.table_at[t] + p * lay.table_size[t] + q]
    return total


@numba.njit(cache=True, nogil=True)
def _decode_forward(lay, cost, m, penalty, d):
    """Decide nodes in order: earlier neighbours are decided (their price), later ones speak through messages."""
    for i in range(lay.first.size - 1):
        if not m.stale_choice[i]:
            continue
        m.stale_choice[i] = False
        start = lay.first[i]
        k = lay.first[i + 1] - start
        for s in range(k):
            d[s] = cost[start + s]
        for c in range(lay.out_at[i], lay.out_at[i + 1]):
            e = lay.out_edge[c]
            for s in range(k):
                d[s] += m.backward[lay.message_at[e] + lay.pool[lay.port_u[e] + s]]
        for c in range(lay.in_at[i], lay.in_at[i + 1]):
            e = lay.in_edge[c]
            _price_row(lay, e, True, m.choice[lay.edge_u[e]], penalty, d, k)
        best = _argmin(d, k)
        if m.choice[i] != best:
            m.choice[i] = best
            for c in range(lay.out_at[i], lay.out_at[i + 1]):
                m.stale_choice[lay.edge_v[lay.out_edge[c]]] = True


@numba.njit(cache=True, nogil=True)
def decode_backward(lay, cost, m, penalty, x):
    """As the forward decoding, in the opposite order, into x."""
    d = np.empty(np.diff(lay.first).max())
    for i in range(lay.first.size - 2, -1, -1):
        start = lay.first[i]
        k = lay.first[i + 1] - start
        for s in range(k):
            d[s] = cost[start + s]
        for c in range(lay.in_at[i], lay.in_at[i + 1]):
            e = lay.in_edge[c]
            for s in range(k):
                d[s] += m.forward[lay.message_at[e] + lay.pool[lay.port_v[e] + s]]
        for c in range(lay.out_at[i], lay.out_at[i + 1]):
            e = lay.out_edge[c]
            _price_row(lay, e, False, x[lay.edge_v[e]], penalty, d, k)
        x[i] = _argmin(d, k)


@numba.njit(cache=True, nogil=True)
def _forward_pass(lay, cost, m, active, eps, d, h, msg):
    """Messages towards later nodes."""
    for i in range(lay.first.size - 1):
        if not (active[i] and m.stale_forward[i]):
            continue
        m.stale_forward[i] = False
        k, g = _gather(lay, cost, m, i, d), _share_out(lay, i, m.pace)
        for c in range(lay.out_at[i], lay.out_at[i + 1]):
            e = lay.out_edge[c]
            t = lay.edge_table[e]
            n, at = lay.table_size[t], lay.message_at[e]
            _spread(lay.pool, lay.port_u[e], d, k, g, h, n)
            _transform(h, m.backward, at, lay.table, lay.table_at[t], n, msg)
            moved, _ = _store(m.forward, at, n, msg, eps)
            if moved:
                m.stale_forward[lay.edge_v[e]] = True
                m.stale_backward[lay.edge_v[e]] = True


@numba.njit(cache=True, nogil=True)
def _backward_pass(lay, cost, m, active, eps, d, h, msg):
    """Messages towards earlier nodes, and the parts of the bound."""
    for i in range(lay.first.size - 2, -1, -1):
        if not (active[i] and m.stale_backward[i]):
            continue
        m.stale_backward[i] = False
        k, g = _gather(lay, cost, m, i, d), _share_in(lay, i, m.pace)
        low = d[_argmin(d, k)]
        m.node_low[i] = low
        for s in range(k):
            d[s] -= low
        for c in range(lay.in_at[i], lay.in_at[i + 1]):
            e = lay.in_edge[c]
            t = lay.edge_table[e]
            n, at = lay.table_size[t], lay.message_at[e]
            _spread(lay.pool, lay.port_v[e], d, k, g, h, n)
            _transform(h, m.forward, at, lay.table_transposed, lay.table_at[t], n, msg)
            moved, m.edge_low[e] = _store(m.backward, at, n, msg, eps)
            if moved:
                u = lay.edge_u[e]
                m.stale_forward[u] = True
                m.stale_backward[u] = True
                m.stale_choice[u] = True


@numba.njit(cache=True, nogil=True)
def _momentum(lay, m, pace, active, eps):
    """Move the messages on by a part of what they moved since the last time: they drift at a steady pace for many sweeps.

    The part grows with every step, as in Y. Nesterov, "A method for solving the convex programming problem with convergence
    rate O(1/k^2)", 1983. Bounds hold for any messages.
    """
    step = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * pace[0] ** 2))
    part = min((pace[0] - 1.0) / step, MOST_MOMENTUM)
    pace[0] = step
    for e in range(lay.edge_u.size):
        u, v = lay.edge_u[e], lay.edge_v[e]
        if not (active[u] and active[v]):
            continue
        now, before = m.backward[lay.message_at[e] : lay.message_at[e + 1]], m.before[lay.message_at[e] : lay.message_at[e + 1]]
        most = 0.0
        for q in range(now.size):
            most = max(most, abs(now[q] - before[q]))
        if part * most <= eps:
            before[:] = now
            continue
        for q in range(now.size):
            here = now[q]
            now[q] += part * (here - before[q])
            before[q] = here
        m.stale_forward[u] = True
        m.stale_backward[u] = True
        m.stale_choice[u] = True
        m.stale_backward[v] = True


@numba.njit(cache=True, nogil=True)
def _keep_pace(pace, total):
    """Momentum starts anew when it has led the bound down."""
    if total < pace[1]:
        pace[0] = 1.0
    pace[1] = total


@numba.njit(cache=True, nogil=True)
def sweeps(lay, cost, m, active, count, tolerance, eps, penalty, x):
    """Up to `count` sweeps (forward pass, decoding, backward pass); the best plan found goes into x.

    Forward passes visit nodes in `active`, backward passes all nodes, in both cases only the stale ones: that is what the
    bound needs. Stops early when proved (gap within `tolerance`, relative) or when nothing is stale.
    -> (value of x, bound, sweeps done)
    """
    d = np.empty(np.diff(lay.first).max())
    widest = lay.table_size.max() if lay.table_size.size else 1
    h, msg = np.empty(widest), np.empty(widest)
    everyone = np.ones(active.size, np.bool_)
    best, bound, done = np.inf, -np.inf, 0
    for _ in range(count):
        _momentum(lay, m, m.pace, active, eps)
        _forward_pass(lay, cost, m, active, eps, d, h, msg)
        _decode_forward(lay, cost, m, penalty, d)
        value = value_of(lay, cost, m.choice)
        if value < best:
            best = value
            x[:] = m.choice
        _backward_pass(lay, cost, m, everyone, eps, d, h, msg)
        done += 1
        total = m.node_low.sum() + m.edge_low.sum()
        _keep_pace(m.pace, total)
        bound = max(bound, total)
        if best < np.inf and best - bound <= tolerance * abs(best):
            break
        if not (m.stale_forward.any() or m.stale_backward.any()):
            break
    return best, bound, done


@numba.njit(cache=True, nogil=True)
def settle(lay, cost, m, active, count, eps, enough):
    """Up to `count` sweeps among the active nodes only, until the sum of the bound's parts moves by less than `enough`. The
    parts are no bound afterwards, until a sweep visits what became stale outside."""
    d = np.empty(np.diff(lay.first).max())
    widest = lay.table_size.max() if lay.table_size.size else 1
    h, msg = np.empty(widest), np.empty(widest)
    before = -np.inf
    pace = np.array([1.0, -np.inf, m.pace[2]])
    for _ in range(count):
        _momentum(lay, m, pace, active, eps)
        _forward_pass(lay, cost, m, active, eps, d, h, msg)
        _backward_pass(lay, cost, m, active, eps, d, h, msg)
        total = m.node_low.sum() + m.edge_low.sum()
        if abs(total - before) <= enough:
            break
        before = total
        _keep_pace(pace, total)


@numba.njit(cache=True, nogil=True)
def reduced_costs(lay, cost, m, out):
    """out[s] = a lower bound on (price of any plan with that strategy) - (bound of the messages), `inf` if impossible.

    The bound of the kernel's docstring leaves nonnegative rests: (1 - g_v * edges from earlier nodes) * (d_v - low_v) per
    node and r_e - low_e + g_v * (d_v - low_v) per edge. Choosing s pays its node's rest and at least the least rest of each
    of its edges. Needs messages after a whole backward pass.
    """
    num_nodes = lay.first.size - 1
    kmax = np.diff(lay.first).max()
    widest = lay.table_size.max() if lay.table_size.size else 1
    d, h, near_u, near_v = np.empty(kmax), np.empty(widest), np.empty(widest), np.empty(widest)
    for i in range(num_nodes):
        k, g = _gather(lay, cost, m, i, d), _share_in(lay, i, m.pace)
        rest = 1.0 - g * (lay.in_at[i + 1] - lay.in_at[i])
        for s in range(k):
            out[lay.first[i] + s] = max(0.0, rest * (d[s] - m.node_low[i])) if d[s] < np.inf else np.inf
    for i in range(num_nodes):
        k, g = _gather(lay, cost, m, i, d), _share_in(lay, i, m.pace)
        for s in range(k):
            d[s] -= m.node_low[i]
        for c in range(lay.in_at[i], lay.in_at[i + 1]):
            e = lay.in_edge[c]
            u, t = lay.edge_u[e], lay.edge_table[e]
            n, base, at = lay.table_size[t], lay.table_at[t], lay.message_at[e]
            _spread(lay.pool, lay.port_v[e], d, k, g, h, n)
            near_u[:n] = np.inf
            near_v[:n] = np.inf
            for s in range(lay.first[u + 1] - lay.first[u]):
                p = lay.pool[lay.port_u[e] + s]
                if cost[lay.first[u] + s] == np.inf or near_u[p] < np.inf:
                    continue
                for q in range(n):
                    if h[q] == np.inf:
                        continue
                    w = lay.table[base + p * n + q] - m.backward[at + p] - m.forward[at + q] - m.edge_low[e]
                    near_u[p] = min(near_u[p], w + h[q])
                    near_v[q] = min(near_v[q], w)
            for s in range(lay.first[u + 1] - lay.first[u]):
                out[lay.first[u] + s] += max(0.0, near_u[lay.pool[lay.port_u[e] + s]])
            for s in range(k):
                out[lay.first[i] + s] += max(0.0, near_v[lay.pool[lay.port_v[e] + s]] + g * d[s])


@numba.njit(cache=True, nogil=True)
def _grow_forest(lay, order, root_of, in_forest):
    """Take nodes in `order` while the taken ones induce a forest (no two edges into one tree)."""
    for i in range(root_of.size):
        root_of[i] = i
        in_forest[i] = False
    seen = np.empty(64, np.int64)
    for a in range(order.size):
        i = order[a]
        found, fine = 0, True
        for side in range(2):
            lo, hi = (lay.out_at[i], lay.out_at[i + 1]) if side == 0 else (lay.in_at[i], lay.in_at[i + 1])
            for c in range(lo, hi):
                j = lay.edge_v[lay.out_edge[c]] if side == 0 else lay.edge_u[lay.in_edge[c]]
                if not in_forest[j] or not fine:
                    continue
                while root_of[j] != j:
                    root_of[j] = root_of[root_of[j]]
                    j = root_of[j]
                for b in range(found):
                    fine &= seen[b] != j
                if found == seen.size:
                    fine = False
                if fine:
                    seen[found] = j
                    found += 1
        if fine:
            in_forest[i] = True
            for b in range(found):
                root_of[seen[b]] = i


@numba.njit(cache=True, nogil=True)
def _visit_order(lay, in_forest, parent_edge, visit):
    """Breadth first over every tree. -> nodes in the forest; parents stand before children."""
    n = in_forest.size
    placed = np.zeros(n, np.bool_)
    count = 0
    for root in range(n):
        if not in_forest[root] or placed[root]:
            continue
        placed[root] = True
        parent_edge[root] = -1
        visit[count] = root
        head = count
        count += 1
        while head < count:
            i = visit[head]
            head += 1
            for side in range(2):
                lo, hi = (lay.out_at[i], lay.out_at[i + 1]) if side == 0 else (lay.in_at[i], lay.in_at[i + 1])
                for c in range(lo, hi):
                    e = lay.out_edge[c] if side == 0 else lay.in_edge[c]
                    j = lay.edge_v[e] if side == 0 else lay.edge_u[e]
                    if in_forest[j] and not placed[j]:
                        placed[j] = True
                        parent_edge[j] = e
                        visit[count] = j
                        count += 1
    return count


@numba.njit(cache=True, nogil=True)
def mend(lay, cost, orders, penalty, x):
    """Improve the plan x in place: for each order, take nodes that induce a forest, hold all others, and choose the forest's
    strategies exactly (dynamic programming). Never makes x dearer, impossible pairs counted as `penalty`."""
    n = lay.first.size - 1
    widest = lay.table_size.max() if lay.table_size.size else 1
    h, msg, zero = np.empty(widest), np.empty(widest), np.zeros(widest)
    total = np.empty(lay.first[-1])
    root_of, in_forest = np.empty(n, np.int64), np.empty(n, np.bool_)
    parent_edge, visit = np.empty(n, np.int64), np.empty(n, np.int64)
    for round_ in range(orders.shape[0]):
        _grow_forest(lay, orders[round_], root_of, in_forest)
        count = _visit_order(lay, in_forest, parent_edge, visit)
        for a in range(count):
            _price_against_rest(lay, cost, visit[a], in_forest, penalty, x, total)
        for a in range(count - 1, -1, -1):
            _send_to_parent(lay, total, visit[a], parent_edge[visit[a]], penalty, h, msg, zero)
        for a in range(count):
            i, e = visit[a], parent_edge[visit[a]]
            k = lay.first[i + 1] - lay.first[i]
            d = total[lay.first[i] : lay.first[i + 1]]
            if e >= 0:
                from_u = lay.edge_v[e] == i
                _price_row(lay, e, from_u, x[lay.edge_u[e]] if from_u else x[lay.edge_v[e]], penalty, d, k)
            best = _argmin(d, k)
            if d[best] < d[x[i]]:
                x[i] = best


@numba.njit(cache=True, nogil=True)
def _price_against_rest(lay, cost, i, in_forest, penalty, x, total):
    """Prices of node i's strategies, its neighbours outside the forest being held at x."""
    k = lay.first[i + 1] - lay.first[i]
    d = total[lay.first[i] : lay.first[i + 1]]
    for s in range(k):
        d[s] = cost[lay.first[i] + s]
    for c in range(lay.out_at[i], lay.out_at[i + 1]):
        e = lay.out_edge[c]
        if not in_forest[lay.edge_v[e]]:
            _price_row(lay, e, False, x[lay.edge_v[e]], penalty, d, k)
    for c in range(lay.in_at[i], lay.in_at[i + 1]):
        e = lay.in_edge[c]
        if not in_forest[lay.edge_u[e]]:
            _price_row(lay, e, True, x[lay.edge_u[e]], penalty, d, k)


@numba.njit(cache=True, nogil=True)
def _send_to_parent(lay, total, i, e, penalty, h, msg, zero):
    if e < 0:
        return
    t = lay.edge_table[e]
    n, base = lay.table_size[t], lay.table_at[t]
    k = lay.first[i + 1] - lay.first[i]
    d = total[lay.first[i] : lay.first[i + 1]]
    child_is_v = lay.edge_v[e] == i
    parent = lay.edge_u[e] if child_is_v else lay.edge_v[e]
    _spread(lay.pool, lay.port_v[e] if child_is_v else lay.port_u[e], d, k, 1.0, h, n)
    least = np.inf
    for p in range(n):
        least = min(least, h[p])
    _transform(h, zero, 0, lay.table_transposed if child_is_v else lay.table, base, n, msg)
    port = lay.port_u[e] if child_is_v else lay.port_v[e]
    for s in range(lay.first[parent + 1] - lay.first[parent]):
        total[lay.first[parent] + s] += min(msg[lay.pool[port + s]], least + penalty)
