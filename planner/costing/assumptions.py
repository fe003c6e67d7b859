"""Constants of the timeline and of the memory around a program's tensors: `hardware_profiles/common/step.toml`.

They are the same for all hardware profiles and have the provenance of a profile's constants. Guesses are said to be guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.constants import common_constants
from planner.errors import InputError

CONSTANTS = common_constants("step")


@dataclass(frozen=True, kw_only=True)
class Contention:
    """How much longer work takes while communication and compute run at once; 1 is no effect.

    Raises InputError if a factor is under 1, or if running at once would do less than running one after the other.
    """

    math: float = CONSTANTS["contention.math"].value
    memory: float = CONSTANTS["contention.memory"].value
    communication: float = CONSTANTS["contention.communication"].value

    def __post_init__(self) -> None:
        slowest = max(self.math, self.memory)
        if min(self.math, self.memory, self.communication) < 1 or 1 / slowest + 1 / self.communication < 1:
            raise InputError(
                f"contention factors {self.math:g}, {self.memory:g}, {self.communication:g} make no sense",
                hint="Each is 1 or more, and 1/compute + 1/communication is 1 or more: else overlap would only lose.",
            )

    def factor(self, bound: str) -> float:
        return float(getattr(self, bound))


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Memory beyond tensors."""

    slack: float = CONSTANTS["memory.slack"].value
    workspace_bytes: int = CONSTANTS["memory.workspace_bytes"].value
    context_bytes: int = CONSTANTS["memory.context_bytes"].value

    def group_bytes(self, ranks: int) -> int:
        """Of one communicator group: linear between the known rank counts, flat outside."""
        (few, low), (many, high) = CONSTANTS["memory.group_bytes"].value
        share = min(max((ranks - few) / (many - few), 0.0), 1.0)
        return round(low + share * (high - low))
