"""Device memory over a step: every storage from where it is allocated to its last use.

The caching allocator gives and takes memory as the CPU issues work, so the walk is in issue order: a storage is allocated by the
action that writes it and is free after the last action that reads it. What a block's function is handed (gathered parameters,
tensors saved in forward, results of the block before) is there until the function returns: its caller, or a compiled function,
holds it. So while a block runs, its gathered parameters and those on their way for the next one are there, and the gradients of
the one before.

A collective holds what it reads and writes until it is done: that is, given a timeline, until a compute action starts that is
issued later and finds it done, and in any case no longer than until it is awaited. Parameters, optimizer state, buffers and
inputs are there all the time.

`allocated` is what tensors take; `reserved` adds the allocator's slack on what comes and goes, communicator groups and the
driver's context. Guesses among these are marked in `assumptions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.actions import COMPUTE, Actions, Storage
from planner.costing.assumptions import Overhead
from planner.costing.timeline import Timeline

WORKSPACE = "workspace"
NUM_TOP = 12


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveMemory:
    """Memory of one device, in bytes.

    Attributes:
        allocated_bytes: the most that tensors and workspace take at once.
        reserved_bytes: the same with slack and reserve: what the device must have.
        moment: number of the action at which it is reached; `moment_name` with its block.
        by_category: what is there at that moment, by kind. Adds up to `allocated_bytes`.
        top: the largest storages at that moment that come and go, largest first.
        live_bytes: after each action has allocated, what is allocated.
    """

    schedule: str
    allocated_bytes: int
    reserved_bytes: int
    reserve_bytes: int
    moment: int
    moment_name: str
    by_category: Mapping[str, int]
    top: tuple[Storage, ...]
    live_bytes: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule, "allocated_bytes": self.allocated_bytes, "reserved_bytes": self.reserved_bytes,
            "reserve_bytes": self.reserve_bytes, "moment": self.moment_name, "by_category": dict(self.by_category),
            "top": [
                {
                    "tensor": s.key, "bytes": s.num_bytes, "shape": list(s.shape), "dtype": s.dtype,
                    "placements": s.placements, "module": s.module, "category": s.category,
                }
                for s in self.top
            ],
        }  # fmt: skip


def walk(actions: Actions, timeline: Timeline | None = None, overhead: Overhead | None = None) -> LiveMemory:
    """The peak of a step, its moment and what is there then. Without a timeline collectives are done when they are awaited."""
    overhead = overhead or Overhead()
    born, last = lifetimes(actions, timeline)
    static = sum(actions.static_bytes.values())
    freed: dict[int, int] = {}
    for number, at in last.items():
        freed[at + 1] = freed.get(at + 1, 0) + actions.storages[number].num_bytes
    live, here = [], static
    for number, action in enumerate(actions.actions):
        here += sum(actions.storages[s].num_bytes for s in action.writes) - freed.get(number, 0)
        live.append(here + (overhead.workspace_bytes if action.has_workspace else 0))
    moment = max(range(len(live)), key=live.__getitem__, default=-1)
    peak = live[moment] if live else static
    present = [actions.storages[s] for s, at in born.items() if at <= moment <= last[s]]
    categories = dict(actions.static_bytes)
    for storage in present:
        categories[storage.category] = categories.get(storage.category, 0) + storage.num_bytes
    if live and actions.actions[moment].has_workspace:
        categories[WORKSPACE] = overhead.workspace_bytes
    reserve = overhead.context_bytes + sum(map(overhead.group_bytes, actions.group_sizes))
    return LiveMemory(
        schedule=actions.schedule,
        allocated_bytes=peak,
        reserved_bytes=peak + round(overhead.slack * (peak - static)) + reserve,
        reserve_bytes=reserve,
        moment=moment,
        moment_name=f"{actions.actions[moment].name} ({actions.actions[moment].block})" if live else "",
        by_category=categories,
        top=tuple(sorted(present, key=lambda s: -s.num_bytes)[:NUM_TOP]),
        live_bytes=tuple(live),
    )


def lifetimes(actions: Actions, timeline: Timeline | None = None) -> tuple[dict[int, int], dict[int, int]]:
    """Storage -> the action that allocates it; storage -> the last action during which it is there."""
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    awaited: dict[int, int] = {}
    for number, action in enumerate(actions.actions):
        for storage in action.writes:
            assert storage not in born, f"{actions.storages[storage].key} is allocated twice"
            born[storage] = last[storage] = number
        for storage in action.reads:
            assert storage in born, f"{action.name} reads what is not there"
            last[storage] = number
        for other in action.awaits:
            awaited.setdefault(other, number)
    end = len(actions.actions) - 1
    _hold_what_is_handed(actions, born, last)
    for number, action in enumerate(actions.actions):
        if action.lane != COMPUTE:
            done = awaited.get(number, end + 1)
            if timeline is not None:
                done = min(done, _found_done(timeline, number))
            for storage in (*action.reads, *action.writes):
                last[storage] = max(last[storage], done - 1)
    return born, last | dict.fromkeys(actions.held, end)


def _hold_what_is_handed(actions: Actions, born: dict[int, int], last: dict[int, int]) -> None:
    """Operands of a block's function, until it returns."""
    for first, until in actions.calls:
        for action in actions.actions[first : until + 1]:
            last.update((storage, max(last[storage], until)) for storage in action.reads if born[storage] < first)


def _found_done(timeline: Timeline, collective: int) -> int:
    """The first compute action, issued after a collective, that starts when it is done; starts of compute rise in issue order."""
    listed = timeline.actions.actions
    for number in range(collective + 1, len(listed)):
        if listed[number].lane == COMPUTE and timeline.start_us[number] >= timeline.end_us[collective]:
            return number
    return len(listed)
