"""What a plan does on the device beyond its objective: a timeline of the step, and the memory of all that is alive at once.

The objective adds up prices as if nothing overlapped; solvers, bounds and explanations speak of that number alone. These are
second numbers, shown beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.actions import OVERLAPPED, SERIAL
from planner.costing.assumptions import CONSTANTS
from planner.costing.live_memory import LiveMemory, walk
from planner.costing.timeline import Timeline, simulate
from planner.issuing import actions_of

if TYPE_CHECKING:
    from planner.costing.assumptions import Contention, Overhead
    from planner.graph import JointGraph
    from planner.hardware import HardwareProfile
    from planner.plan import Plan


@dataclass(frozen=True, eq=False)
class Forecast:
    """Time and memory of one schedule. `usable_bytes` is what the device has for a program."""

    timeline: Timeline
    memory: LiveMemory
    usable_bytes: int

    @property
    def missing_bytes(self) -> int:
        """What the device lacks; 0 if the step fits."""
        return max(0, self.memory.reserved_bytes - self.usable_bytes)

    @property
    def moment_us(self) -> float:
        """When the peak is reached."""
        return self.timeline.start_us[self.memory.moment] if self.memory.moment >= 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        memory = {**self.memory.to_json(), "moment_us": self.moment_us, "usable_bytes": self.usable_bytes}
        constants = {name: constant.to_dict() for name, constant in CONSTANTS.items()}
        return {**self.timeline.to_json(), "memory": memory, "constants": constants}


@dataclass(frozen=True, eq=False)
class Forecasts:
    """Both schedules of one plan: as written, and with communication beside compute."""

    serial: Forecast
    overlapped: Forecast

    def to_json(self) -> dict[str, Any]:
        return {SERIAL: self.serial.to_json(), OVERLAPPED: self.overlapped.to_json()}


def forecast(
    plan: Plan,
    graph: JointGraph,
    hardware: HardwareProfile,
    schedule: str = OVERLAPPED,
    *,
    contention: Contention | None = None,
    overhead: Overhead | None = None,
) -> Forecast:
    """`graph` is the plan's own (`matching.planned_graph`); `hardware` the profile that it was priced with.

    Raises:
        InputError: no such schedule.
        PlanFormatError: the plan was priced with other constants.
        ExportError: plan and graph do not go together.
    """
    timeline = simulate(actions_of(plan, graph, hardware, schedule), hardware, contention)
    return Forecast(timeline, walk(timeline.actions, timeline, overhead), hardware.usable_bytes)
