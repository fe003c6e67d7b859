"""When each action of a step runs: an event simulation of a device's streams and of the CPU that feeds them.

Three lanes run at once: compute, links inside a node, links across nodes. Each runs its actions in issue order. An action starts
when the CPU has issued it, its lane is free, what it awaits is done and, for a collective, the compute issued before it is
done. While compute and communication run at once both are slower by the factors of `Contention`. The CPU issues without ever
waiting for the device; its time per kernel and per collective is the profile's.

Not modelled: other jobs on the machine, ranks that lag behind others, the input pipeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.actions import COMPUTE, LANES, Action, Actions
from planner.costing.assumptions import Contention
from planner.hardware import HardwareProfile

WAITS_FOR_CPU, WAITS_FOR_COLLECTIVE, WAITS_IN_QUEUE, DRAINS = "CPU issue", "collective", "queue of collectives", "end of step"
"""Why compute stands still: its next kernel is not issued yet; a collective it needs runs, or waits for others on its links; or
all compute is done and collectives still run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """A step in time. All times in µs.

    Attributes:
        start_us, end_us: of each action.
        issued_us: when the CPU has issued it.
        alone_us: per lane, the sum of its actions' times without contention.
        busy_us: per lane, how long it runs.
        idle_us: why compute stands still -> how long.
        exposed_us: `all_gather@dp` -> how long compute stands still for such collectives.
        path: numbers of the actions of one critical path, in order.
        mfu: model FLOPs over what all devices could do in that time at datasheet peak; 0 if nothing is counted.
    """

    actions: Actions
    contention: Contention
    step_us: float
    issue_us: float
    start_us: tuple[float, ...]
    end_us: tuple[float, ...]
    issued_us: tuple[float, ...]
    alone_us: Mapping[str, float]
    busy_us: Mapping[str, float]
    idle_us: Mapping[str, float]
    exposed_us: Mapping[str, float]
    path: tuple[int, ...]
    mfu: float

    @property
    def exposed_total_us(self) -> float:
        return sum(self.exposed_us.values())

    @property
    def communication_us(self) -> float:
        """Sum of all collectives without contention."""
        return sum(us for lane, us in self.alone_us.items() if lane != COMPUTE)

    @property
    def busy_share(self) -> dict[str, float]:
        return {lane: us / self.step_us if self.step_us else 0.0 for lane, us in self.busy_us.items()}

    @property
    def critical_path(self) -> tuple[tuple[str, float], ...]:
        """(name, how long it ran) of the actions of one critical path, in order."""
        return tuple((self.actions.actions[n].name, self.end_us[n] - self.start_us[n]) for n in self.path)

    def to_json(self) -> dict[str, Any]:
        longest = sorted(self.critical_path, key=lambda pair: -pair[1])[:20]
        return {
            "schedule": self.actions.schedule, "step_us": self.step_us, "mfu": self.mfu, "issue_us": self.issue_us,
            "alone_us": dict(self.alone_us), "busy_share": self.busy_share, "idle_us": dict(self.idle_us),
            "exposed_us": dict(self.exposed_us), "exposed_total_us": self.exposed_total_us,
            "critical_path_length": len(self.path), "critical_path_longest": [list(pair) for pair in longest],
        }  # fmt: skip

    def chrome_trace(self) -> dict[str, Any]:
        """For chrome://tracing or Perfetto: one row per lane and one for the CPU."""
        rows = {"CPU issue": 0, **{lane: number for number, lane in enumerate(LANES, 1)}}
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}} for name, row in rows.items()
        ]
        issued = 0.0
        for number, action in enumerate(self.actions.actions):
            span = {"name": action.name, "ph": "X", "pid": 0, "args": {"block": action.block, "alone_us": action.us}}
            if self.issued_us[number] > issued:
                events.append({**span, "tid": 0, "ts": issued, "dur": self.issued_us[number] - issued})
                issued = self.issued_us[number]
            if action.us > 0:
                duration = self.end_us[number] - self.start_us[number]
                events.append({**span, "tid": rows[action.lane], "ts": self.start_us[number], "dur": duration})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def simulate(actions: Actions, hardware: HardwareProfile, contention: Contention | None = None) -> Timeline:
    """The timeline of a step. Asserts that it is no shorter than any lane alone and no longer than all of them in a row."""
    run = _Run(actions, hardware, contention or Contention())
    run.to_the_end()
    return run.timeline()


@dataclass
class _Run:
    """One simulation; thrown away afterwards."""

    actions: Actions
    hardware: HardwareProfile
    contention: Contention
    now: float = 0.0
    running: dict[str, int] = field(default_factory=dict)
    """lane -> action"""
    left: dict[str, float] = field(default_factory=dict)
    """lane -> µs of work that its action has left"""
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        listed = self.actions.actions
        self.start, self.end = [0.0] * len(listed), [-1.0] * len(listed)
        self.queues: dict[str, list[int]] = {lane: [] for lane in LANES}
        self.at = dict.fromkeys(LANES, 0)
        self.before: list[tuple[int, ...]] = []
        self.issued: list[float] = []
        clock = 0.0
        for number, action in enumerate(listed):
            clock += self._issue_us(action)
            self.issued.append(clock)
            compute, own = self.queues[COMPUTE], self.queues[action.lane]
            behind = compute[-1:] if action.lane != COMPUTE else []
            self.before.append((*own[-1:], *behind, *action.awaits))
            own.append(number)

    def _issue_us(self, action: Action) -> float:
        """CPU time: a collective is a call of PyTorch's, everything else a launch of a compiled kernel."""
        launch = self.hardware.launch
        return launch.collective_us if action.collective is not None else launch.compiled_us * action.launches

    # ---- the simulation -----------------------------------------------------------------------------------------------
    def to_the_end(self) -> None:
        while True:
            self._start_what_can()
            if not self.running and all(self._head(lane) is None for lane in LANES):
                return
            rates = self._rates()
            until = min(
                [self.now + self.left[lane] / rates[lane] for lane in self.running]
                + [self.issued[head] for head in self._issue_waits() if self.issued[head] > self.now]
            )
            self._advance(until, rates)

    def _head(self, lane: str) -> int | None:
        """The next action of a lane that has not started."""
        queue, at = self.queues[lane], self.at[lane]
        return queue[at] if at < len(queue) else None

    def _is_free(self, number: int) -> bool:
        return all(self.end[other] >= 0 for other in self.before[number])

    def _start_what_can(self) -> None:
        started = True
        while started:
            started = False
            for lane in LANES:
                head = self._head(lane)
                if lane in self.running or head is None or self.issued[head] > self.now or not self._is_free(head):
                    continue
                started = True
                self.at[lane] += 1
                self.start[head] = self.now
                if self.actions.actions[head].us > 0:
                    self.running[lane], self.left[lane] = head, self.actions.actions[head].us
                else:
                    self.end[head] = self.now

    def _rates(self) -> dict[str, float]:
        both = COMPUTE in self.running and len(self.running) > 1
        return {
            lane: 1 / self.contention.factor(self.actions.actions[number].bound) if both else 1.0
            for lane, number in self.running.items()
        }

    def _issue_waits(self) -> Iterator[int]:
        for lane in LANES:
            head = self._head(lane)
            if head is not None and lane not in self.running and self._is_free(head):
                yield head

    def _advance(self, until: float, rates: Mapping[str, float]) -> None:
        passed = until - self.now
        self._account(passed)
        for lane, number in list(self.running.items()):
            self.left[lane] -= passed * rates[lane]
            if self.left[lane] <= 1e-9 * max(1.0, until):
                self.end[number] = until
                del self.running[lane], self.left[lane]
        self.now = until

    def _account(self, passed: float) -> None:
        for lane in self.running:
            self.busy[lane] += passed
        if COMPUTE in self.running:
            return
        cause, culprit = self._why_idle()
        self.idle[cause] += passed
        if culprit is not None:
            self.exposed[self.actions.actions[culprit].label] += passed

    def _why_idle(self) -> tuple[str, int | None]:
        """The cause, and the collective that compute stands still for. A collective comes before the CPU: were the kernel issued,
        it would have to wait all the same."""
        head = self._head(COMPUTE)
        if head is None:
            return (DRAINS, next(iter(self.running.values()))) if self.running else (WAITS_FOR_CPU, None)
        waits = {self.actions.actions[other].lane: other for other in self.before[head] if self.end[other] < 0}
        for lane, other in waits.items():
            if self.running.get(lane) == other:
                return WAITS_FOR_COLLECTIVE, other
        for lane in (*waits, *LANES) if waits else ():
            if lane in self.running:
                return WAITS_IN_QUEUE, self.running[lane]
        return WAITS_FOR_CPU, None

    # ---- the result ---------------------------------------------------------------------------------------------------
    def timeline(self) -> Timeline:
        listed = self.actions.actions
        alone = {lane: sum(listed[number].us for number in self.queues[lane]) for lane in LANES}
        issue_us = self.issued[-1] if self.issued else 0.0
        slip = 1e-6 * max(1.0, self.now)
        assert self.now >= max(alone.values()) - slip, "a step is shorter than the work of one lane"
        assert self.now <= sum(alone.values()) + issue_us + slip, "a step is longer than all its work in a row"
        return Timeline(
            actions=self.actions,
            contention=self.contention,
            step_us=self.now,
            issue_us=issue_us,
            start_us=tuple(self.start),
            end_us=tuple(self.end),
            issued_us=tuple(self.issued),
            alone_us=alone,
            busy_us={lane: self.busy[lane] for lane in LANES},
            idle_us=dict(self.idle),
            exposed_us=dict(sorted(self.exposed.items(), key=lambda pair: -pair[1])),
            path=self._path(),
            mfu=self._mfu(),
        )

    def _path(self) -> tuple[int, ...]:
        """Back from the last action, each time to what let it start last; ends where the CPU did."""
        if not self.end:
            return ()
        found = [max(range(len(self.end)), key=self.end.__getitem__)]
        while True:
            number = found[-1]
            released = max(self.before[number], key=self.end.__getitem__, default=None)
            if released is None or self.end[released] < self.issued[number]:
                return tuple(n for n in reversed(found) if self.actions.actions[n].us > 0)
            found.append(released)

    def _mfu(self) -> float:
        if not self.now or not self.actions.math_dtype:
            return 0.0
        could = self.hardware.peak(self.actions.math_dtype) * self.now * 1e-6 * self.actions.num_devices
        return self.actions.model_flops / could
