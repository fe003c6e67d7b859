"""A device mesh by name and size. Needs no process group and no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from planner.errors import InvalidMeshError

MAX_AXES = 4
DATA_AXIS_NAMES = frozenset({"dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard"})

_EXAMPLE = "Write axis=size pairs, outermost first, for example dp=8,tp=8; the last axis is the nearest devices."


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Axis names and sizes, outermost first; the last axis is the nearest devices (ranks are row-major)."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.axis_names or len(self.axis_names) != len(self.axis_sizes):
            raise InvalidMeshError("a mesh needs at least one axis, and one size per axis", hint=_EXAMPLE)
        if len(self.axis_names) > MAX_AXES:
            raise InvalidMeshError(f"a mesh has at most {MAX_AXES} axes, got {len(self.axis_names)}", hint=_EXAMPLE)
        for name, size in zip(self.axis_names, self.axis_sizes, strict=True):
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
                raise InvalidMeshError(f"{name!r} is not an axis name", hint=_EXAMPLE)
            if size < 1:
                raise InvalidMeshError(f"axis {name} has size {size}; sizes are 1 or more", hint=_EXAMPLE)
        if len(set(self.axis_names)) != len(self.axis_names):
            raise InvalidMeshError(f"axis names repeat: {', '.join(self.axis_names)}", hint=_EXAMPLE)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """`dp=8,tp=8` -> Mesh. Raises InvalidMeshError with the offending part."""
        names, sizes = [], []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
            if match is None:
                raise InvalidMeshError(f"{part.strip()!r} in mesh {text!r} is not axis=size", hint=_EXAMPLE)
            names.append(match[1])
            sizes.append(int(match[2]))
        return cls(axis_names=tuple(names), axis_sizes=tuple(sizes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.axis_names, self.axis_sizes, strict=True))

    @property
    def num_axes(self) -> int:
        return len(self.axis_sizes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.axis_sizes)

    @property
    def data_axes(self) -> tuple[int, ...]:
        """Axes whose name says that they split the batch (dp, fsdp, data, ...)."""
        return tuple(axis for axis, name in enumerate(self.axis_names) if name in DATA_AXIS_NAMES)

    def axis(self, name: str) -> int:
        if name not in self.axis_names:
            raise InvalidMeshError(f"the mesh {self} has no axis {name!r}", hint=f"Axes are {', '.join(self.axis_names)}.")
        return self.axis_names.index(name)

    def to_json(self) -> dict[str, Any]:
        return {"axis_names": list(self.axis_names), "axis_sizes": list(self.axis_sizes)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Mesh:
        return cls(axis_names=tuple(data["axis_names"]), axis_sizes=tuple(data["axis_sizes"]))
