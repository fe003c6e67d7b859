"""The everyday solver: message passing with a proven bound, several decodings, and mending of the best plan.

When value and bound agree the plan is optimal and proved so. The state can be copied and restored, so a changed problem (a
pin, another memory price) starts from where a similar one ended; bounds hold for any messages. That also allows momentum:
messages that drift at a steady pace are moved on by more than a sweep would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.solving import kernels
from planner.solving.consistency import make_consistent
from planner.solving.kernels import Messages
from planner.solving.layout import EdgeSpec, Layout, flatten
from planner.solving.nudges import NUDGE_PART
from planner.solving.problem import PairwiseProblem

TOLERANCE = 1e-6
"""Relative gap at which a plan counts as proved."""

_NOISE = 1e-13
"""Relative difference of two values that comes from the order of summation alone."""

_SETTLED_US = 1e-9
_MEND_ORDERS = 3
_WINDOW_SWEEPS = (6, 12, 24)
"""Sweeps among the nodes of a window before each round of whole sweeps; the last number holds from there on."""

_FIRST_ROUNDS, _WIDER_ROUNDS = 4, 1
"""Rounds with the first window, and with each wider one. What they leave open has effects far away."""

_WINDOW_PART, _WIDER_PART = 0.005, 0.001
"""In the first window, or in a wider one, what brings less than this part of the gap is not worth a sweep."""

_NOTICEABLE = 1e-5
_SLOW_PART = 0.05
"""A rise of the bound below this part of the mean rise per round so far is slow."""

_MEND_PATIENCE = 3
"""Mendings without success after which mending over and over ends."""

_AMPLE_S = 20.0
"""With less time than this the first round is a single sweep: it tells how long one takes."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A plan and a bound. `value_us` is `inf` (and `choice` meaningless) if no plan was found."""

    choice: np.ndarray
    value_us: float
    bound_us: float
    sweeps: int

    @property
    def proved(self) -> bool:
        return self.value_us < np.inf and self.value_us - self.bound_us <= TOLERANCE * abs(self.value_us)

    @property
    def gap(self) -> float:
        """Relative; `inf` without a plan."""
        return (self.value_us - self.bound_us) / abs(self.value_us or 1.0) if self.value_us < np.inf else np.inf


@dataclass(frozen=True)
class Effort:
    """How long to try. `deadline` is a `time.monotonic()` value.

    Attributes:
        max_sweeps: whole sweeps at most.
        patience: stop after this many rounds of sweeps that improve neither plan nor bound noticeably.
        round_sweeps: sweeps in a round; one is a round as long as there are windows.
        mend_every: rounds between two mendings.
        local_sweeps: with a window, so many of the first sweeps pass forward messages only there.
        ahead: whole sweeps begin with passes that send all a node knows ahead (`kernels._share`), until the bound rises slowly.
            Effects of one change far away arrive much sooner; a whole problem from nothing ends worse so.
        eps_us: messages that move less than this count as settled.
        tolerance, enough_us: stop when the gap is within this part of the value, or below this many µs.
        tell: called with value (`inf` without a plan) and bound after every round of sweeps.
    """

    max_sweeps: int = 400
    patience: int = 4
    round_sweeps: int = 8
    mend_every: int = 3
    local_sweeps: int = 5
    eps_us: float = _SETTLED_US
    tolerance: float = TOLERANCE
    enough_us: float = 0.0
    deadline: float = np.inf
    cancelled: Callable[[], bool] | None = None
    tell: Callable[[float, float], None] | None = None
    ahead: bool = False

    def suffices(self, value: float, bound: float) -> bool:
        """A plan is there and the gap is small enough."""
        return value < np.inf and value - bound <= max(self.tolerance * abs(value), self.enough_us)

    def reached(self, value: float, bound: float, nudges_us: float) -> bool:
        """Tells where the search stands; whether that is enough. Nudges are part of both and not of what is told."""
        if self.tell is not None:
            self.tell(value, bound - nudges_us)
        return self.suffices(value, bound)

    def affordable(self, sweep_s: float | None) -> int:
        """Sweeps that fit before the deadline, at least 1. `sweep_s`: what one takes; None = not known yet."""
        left = self.deadline - time.monotonic()
        if left == np.inf or sweep_s == 0.0:
            return self.max_sweeps
        if sweep_s is None:
            return self.max_sweeps if left > _AMPLE_S else 1
        return max(1, int(min(left / sweep_s, self.max_sweeps)))

    def expired(self) -> bool:
        return time.monotonic() > self.deadline or (self.cancelled is not None and self.cancelled())


class MessagePassing:
    """Messages and current prices of one problem.

    Attributes:
        cost_us: present prices, `inf` for strategies that are ruled out; those left must be arc consistent.
        nudges_us: tiny prices on top that make equally cheap plans differ, see `nudges.py`. Outcomes are without them: values are
            those of `cost_us`, bounds are lowered by what the nudges can add.
    """

    def __init__(self, problem: PairwiseProblem, nudges_us: np.ndarray | None = None) -> None:
        self.problem = problem
        self.layout: Layout = problem.layout
        self.cost_us = problem.unary_us.copy()
        self.nudges_us = np.zeros(len(self.cost_us)) if nudges_us is None else nudges_us
        self.most_nudges_us = float(np.maximum.reduceat(self.nudges_us, self.layout.first[:-1]).sum())
        self._nudged_us = self.cost_us + self.nudges_us
        nodes, entries, edges = self.layout.num_nodes, int(self.layout.message_at[-1]), self.layout.num_edges
        self.messages = Messages(
            forward=np.zeros(entries), backward=np.zeros(entries), before=np.zeros(entries), pace=np.array([1.0, -np.inf, 1.0]),
            node_low=np.zeros(nodes), edge_low=np.zeros(edges), choice=np.zeros(nodes, np.int64),
            stale_forward=np.ones(nodes, np.bool_), stale_backward=np.ones(nodes, np.bool_),
            stale_choice=np.ones(nodes, np.bool_),
        )  # fmt: skip

    def save(self) -> tuple[np.ndarray, Messages]:
        return self.cost_us.copy(), self.messages.copy()

    def restore(self, saved: tuple[np.ndarray, Messages]) -> None:
        self._set(saved[0])
        self.messages.restore(saved[1])

    def set_costs(self, cost_us: np.ndarray) -> None:
        """Other prices per strategy (`inf` = ruled out): what depends on them becomes stale."""
        differs = cost_us != self.cost_us
        if not differs.any():
            return
        touched = np.logical_or.reduceat(differs, self.layout.first[:-1])
        self._set(cost_us)
        for stale in (self.messages.stale_forward, self.messages.stale_backward, self.messages.stale_choice):
            stale[touched] = True

    def _set(self, cost_us: np.ndarray) -> None:
        self.cost_us[:] = cost_us
        np.add(cost_us, self.nudges_us, out=self._nudged_us)

    def mark_stale(self) -> None:
        """Everything is to be computed again: messages were changed from outside."""
        for stale in (self.messages.stale_forward, self.messages.stale_backward, self.messages.stale_choice):
            stale[:] = True

    def run(self, effort: Effort, start: np.ndarray | None = None, windows: Sequence[np.ndarray] = ()) -> Outcome:
        """Sweep, decode and mend until proved, stuck or out of time.

        `start` is a plan to begin with. `windows` (bool per node, each wider than the one before) say where prices changed:
        messages settle there before each round of whole sweeps, in one after the other, and mending is confined to them. After
        the widest come rounds of whole sweeps alone.
        """
        if self.most_nudges_us > 0.0:  # they are taken off the bound
            effort = replace(effort, tolerance=effort.tolerance - NUDGE_PART)
        lay, penalty = self.layout, self.penalty_us()
        everyone = np.ones(lay.num_nodes, np.bool_)
        best = np.zeros(lay.num_nodes, np.int64) if start is None else start.copy()
        bound, done, stuck, rounds = -np.inf, 0, 0, 0
        found = np.zeros(lay.num_nodes, np.int64)
        rng = np.random.default_rng(0)
        members = np.flatnonzero(windows[0] if windows else everyone)
        value = np.inf
        if start is not None:
            kernels.mend(lay, self._nudged_us, _orders(rng, members), penalty, best)
            value = kernels.value_of(lay, self._nudged_us, best)
        sweep_s, ahead, climb = None, effort.ahead, _Climb()
        self.messages.pace[:2] = 1.0, -np.inf
        while done < effort.max_sweeps and not effort.expired():
            window = _at_round(windows, rounds)
            self._set_share(0.0 if ahead and window is None else 1.0)
            count = min(1 if window is not None else effort.round_sweeps, effort.max_sweeps - done, effort.affordable(sweep_s))
            clock, active = time.monotonic(), everyone
            members = np.flatnonzero(everyone if window is None else window)
            if window is not None:
                self._settle(window, effort.eps_us, rounds, value - bound)
                active = everyone if done >= effort.local_sweeps else window
                self.messages.pace[:2] = 1.0, -np.inf
            found_value, found_bound, swept = self.sweep(effort, active, count, penalty, found)
            done += swept
            sweep_s = (time.monotonic() - clock) / max(1, swept)
            before, bound = (value, bound), max(bound, found_bound)
            if window is None and ahead and climb.is_slow(bound):
                ahead, value = False, self._mend_on(best, value, penalty, rng, effort)
            if _is_better(found_value, value):
                best[:], value = found, found_value
            if effort.reached(value, bound, self.most_nudges_us):
                break
            rounds += 1
            if rounds % effort.mend_every == 0:
                value = self._mend(best, value, penalty, _orders(rng, members))
            if effort.suffices(value, bound):
                break
            small = TOLERANCE * abs(bound)
            if windows and value < np.inf:
                small = max(small, min(_WINDOW_PART * (value - bound), _NOTICEABLE * abs(bound)))
            stuck = 0 if value < before[0] - small or bound > before[1] + small else stuck + 1
            if stuck >= effort.patience or swept < count:
                break
        if not effort.suffices(value, bound) and not effort.expired():
            value = self._mend(best, value, penalty, _orders(rng, members))
            value = self._mend_on(best, value, penalty, rng, effort) if effort.ahead else value
        return self._outcome(best, value, bound, done)

    def _outcome(self, choice: np.ndarray, value: float, bound: float, sweeps: int) -> Outcome:
        """Value and bound without the nudges."""
        if self.most_nudges_us > 0.0:
            bound -= self.most_nudges_us
            value = kernels.value_of(self.layout, self.cost_us, choice) if value < np.inf else value
        return Outcome(choice, value, min(bound, value), sweeps)

    def sweep(
        self, effort: Effort, active: np.ndarray, count: int, penalty: float, found: np.ndarray
    ) -> tuple[float, float, int]:
        """Up to `count` sweeps; the best plan of them goes into `found`. -> its value, the bound, sweeps done"""
        return kernels.sweeps(
            self.layout, self._nudged_us, self.messages, active, count, effort.tolerance, effort.eps_us, penalty, found
        )  # type: ignore[no-any-return]

    def _set_share(self, share: float) -> None:
        """All nodes are visited again if it changes: the parts of the bound belong to one share."""
        if self.messages.pace[2] != share:
            self.messages.pace[2] = share
            self.mark_stale()

    def _settle(self, window: np.ndarray, eps_us: float, rounds: int, gap_us: float) -> None:
        """Pass messages among the nodes of the window only, until that brings little of the gap. Gives no bound."""
        enough = 0.3 * TOLERANCE * abs(self.bound_now())
        if gap_us < np.inf:
            enough = max(enough, (_WINDOW_PART if rounds < _FIRST_ROUNDS else _WIDER_PART) * gap_us)
        count = _WINDOW_SWEEPS[min(rounds, len(_WINDOW_SWEEPS) - 1)]
        kernels.settle(self.layout, self._nudged_us, self.messages, window, count, eps_us, enough)

    def _mend(self, best: np.ndarray, value: float, penalty: float, orders: np.ndarray) -> float:
        """Improve `best` in place: mend it, and mend two decodings of the present messages. -> its value"""
        lay = self.layout
        backward = self.messages.choice.copy()
        kernels.decode_backward(lay, self._nudged_us, self.messages, penalty, backward)
        for candidate in (best.copy() if value < np.inf else None, self.messages.choice.copy(), backward):
            if candidate is not None:
                kernels.mend(lay, self._nudged_us, orders, penalty, candidate)
                mended = kernels.value_of(lay, self._nudged_us, candidate)
                if _is_better(mended, value):
                    best[:], value = candidate, mended
        return value

    def _mend_on(self, best: np.ndarray, value: float, penalty: float, rng: np.random.Generator, effort: Effort) -> float:
        """Mend `best` in place over and over while that helps: sweeps have little left to say. -> its value"""
        everyone = np.arange(self.layout.num_nodes)
        failed = 0
        while failed < _MEND_PATIENCE and not effort.expired():
            kernels.mend(self.layout, self._nudged_us, _orders(rng, everyone), penalty, best)
            mended = kernels.value_of(self.layout, self._nudged_us, best)
            failed = 0 if _is_better(mended, value) else failed + 1
            value = min(value, mended)
        return value

    def reduced_costs(self) -> np.ndarray:
        """float64, flat: how much above `bound_now` any plan with the strategy is, at least."""
        out = np.zeros(len(self._nudged_us))
        kernels.reduced_costs(self.layout, self._nudged_us, self.messages, out)
        return out

    def bound_now(self) -> float:
        """The bound of the last whole sweep, to which the reduced costs belong."""
        return float(self.messages.node_low.sum() + self.messages.edge_low.sum()) - self.most_nudges_us

    def penalty_us(self) -> float:
        """A price above that of any sensible plan, used only to compare plans with impossible pairs in decoding."""
        finite = np.where(np.isfinite(self._nudged_us), self._nudged_us, np.inf)
        least = np.minimum.reduceat(finite, self.layout.first[:-1])
        tables = self.layout.table[np.isfinite(self.layout.table)]
        return 100.0 * (float(np.abs(least[np.isfinite(least)]).sum()) + float(tables.max(initial=1.0)))


@dataclass
class _Climb:
    """How the bound rises from round to round."""

    first: float = -np.inf
    last: float = -np.inf
    rounds: int = 0

    def is_slow(self, bound: float) -> bool:
        """The bound of one round more rises by little, compared to the rounds before."""
        rise, self.last, self.rounds = bound - self.last, bound, self.rounds + 1
        if self.rounds == 1:
            self.first = bound
        return self.rounds > 2 and rise < _SLOW_PART * (bound - self.first) / (self.rounds - 1)


def _at_round(windows: Sequence[np.ndarray], rounds: int) -> np.ndarray | None:
    """The window of a round; None after the widest."""
    stage = max(0, (rounds - _FIRST_ROUNDS) // _WIDER_ROUNDS + 1)
    return windows[stage] if stage < len(windows) else None


def _is_better(value: float, other: float) -> bool:
    """By more than the order of summation can make."""
    return value < other and (np.isinf(other) or value < other - _NOISE * abs(other))


def _orders(rng: np.random.Generator, members: np.ndarray) -> np.ndarray:
    """int64 [orders, nodes]: random orders of the nodes to mend."""
    return np.array([rng.permutation(members) for _ in range(_MEND_ORDERS)])


def warm_up() -> float:
    """Compile (or load from the cache) all loops, on a problem of two nodes. -> seconds it took"""
    began = time.perf_counter()
    port = np.arange(2, dtype=np.int32)
    layout = flatten([2, 2], [EdgeSpec(0, 1, port, port, 0)], [np.array([[0.0, 1.0], [1.0, 0.0]])])
    prices = np.array([1.0, 2.0, 2.0, 1.0])
    problem = PairwiseProblem(
        layout=layout, unary_us=prices, num_bytes=np.zeros(4), strategy_numbers=np.array([0, 1, 0, 1]),
        node_of=np.arange(2), shared_of={},
    )  # fmt: skip
    make_consistent(layout, np.ones(4, np.bool_), np.arange(2))
    solver = MessagePassing(problem)
    solver.run(Effort(max_sweeps=1, tolerance=-1.0), windows=[np.ones(2, np.bool_)])
    solver.run(Effort(max_sweeps=1, tolerance=-1.0), np.zeros(2, np.int64))
    solver.reduced_costs()
    return time.perf_counter() - began
