"""Constants of the timeline and of the memory around a program's tensors. They are the same for all hardware profiles.

Each has the provenance of a profile's constant. Guesses are said to be guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import InputError
from planner.hardware import Constant
from planner.units import MIB

_DATE = "2026-11-30"

CONSTANTS = {
    "contention.math": Constant(
        value=1.19, unit="time beside communication / time alone", kind="guess", date=_DATE,
        source="between no effect and 1.40 for the worst matmul beside NCCL, which holds 16 to 24 of 132 multiprocessors",
    ),
    "contention.memory": Constant(
        value=1.4, unit="time beside communication / time alone", kind="guess", date=_DATE,
        source="memory-bound kernels share bandwidth with the copies of communication, so they suffer more than matmuls",
    ),
    "contention.communication": Constant(
        value=1.1, unit="time beside compute / time alone", kind="guess", date=_DATE,
        source="a collective keeps its multiprocessors once it has them and loses some memory bandwidth",
    ),
    "memory.slack": Constant(
        value=0.03, unit="fraction of what comes and goes", kind="guess", date=_DATE,
        source="fragments of the caching allocator",
    ),
    "memory.workspace_bytes": Constant(
        value=32 * MIB, unit="bytes while a product or attention runs", kind="guess", date=_DATE,
        source="cuBLAS on Hopper takes 32 MiB unless CUBLAS_WORKSPACE_CONFIG says otherwise",
    ),
    "memory.context_bytes": Constant(
        value=819 * MIB, unit="bytes", kind="guess", date=_DATE,
        source="driver context and libraries, 0.6 to 1.0 GiB",
    ),
    "memory.group_bytes": Constant(
        value=((2, 342 * MIB), (4, 392 * MIB)), unit="(ranks, bytes) per communicator group", kind="derived", date=_DATE,
        source="NCCL buffers as aiconfigurator at 095f58a51 counts them",
    ),
}  # fmt: skip


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
