"""Memory per device, in bytes: what is counted, and what each strategy adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from planner.errors import InputError

OPTIMIZER_BYTES_PER_ELEMENT = {"adamw": 8, "sgd": 0, "none": 0}
"""AdamW keeps two fp32 moments per parameter element; plain SGD keeps nothing."""


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """Which optimizer state is kept, and in which precision gradients are stored (that of the parameter)."""

    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_BYTES_PER_ELEMENT:
            raise InputError(f"unknown optimizer {self.optimizer!r}", hint=f"Known: {', '.join(OPTIMIZER_BYTES_PER_ELEMENT)}.")

    @property
    def optimizer_bytes_per_element(self) -> int:
        return OPTIMIZER_BYTES_PER_ELEMENT[self.optimizer]


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on one device (all devices hold the same, shards are even). `peak_bytes` is their sum: no temporaries, no reserve.

    `kept_parameter_bytes`: parameters as the forward pass read them (cast, gathered), kept for backward.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    kept_parameter_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryBreakdown:
        return cls(
            **{f.name: int(data[f.name] if f.name != "kept_parameter_bytes" else data.get(f.name, 0)) for f in fields(cls)}
        )


@dataclass(frozen=True, eq=False)
class MemoryTerms:
    """Bytes that one node adds under each of its strategies, by category; float64 [strategies] each."""

    parameter_bytes: np.ndarray
    gradient_bytes: np.ndarray
    optimizer_bytes: np.ndarray
    activation_bytes: np.ndarray
    kept_parameter_bytes: np.ndarray | None = None
    """None: none"""

    @property
    def total(self) -> np.ndarray:
        held = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
        return held if self.kept_parameter_bytes is None else held + self.kept_parameter_bytes


@dataclass(frozen=True, eq=False)
class MemoryTable:
    """Terms per graph node; nodes that keep nothing are absent."""

    policy: MemoryPolicy
    terms: Mapping[int, MemoryTerms]
