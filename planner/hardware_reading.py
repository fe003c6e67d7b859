"""The content of a hardware profile's file -> the profile: every constant by name, each in its range."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from planner.constants import constants_in, thaw
from planner.errors import InputError
from planner.hardware import (
    PROFILE_SCHEMA,
    AttentionConstants,
    FabricConstants,
    GemmConstants,
    HardwareProfile,
    LaunchConstants,
    LibraryConstants,
    NodeConstants,
    Points,
    PointwiseConstants,
    QuantiseConstants,
    ScanConstants,
)


def read_profile(data: Mapping[str, Any]) -> HardwareProfile:
    """Raises InputError naming the first key that is missing, unknown or without provenance."""
    return _Reader(data).profile()


class _Reader:
    """Takes constants out by name with a range check; what is left over at the end is an error."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        if data.get("schema") != PROFILE_SCHEMA:
            raise InputError(
                f"hardware profile: schema is {data.get('schema')!r}, this version reads {PROFILE_SCHEMA}",
                hint="Use a profile written for this version.",
            )
        if not data.get("name") or not data.get("title"):
            raise InputError("hardware profile: name or title is missing", hint="Write name = ... and title = ... at the top.")
        self.name, self.title, self.fabric_name = str(data["name"]), str(data["title"]), str(data.get("fabric_name", ""))
        self.constants = constants_in({k: v for k, v in data.items() if k not in ("schema", "name", "title", "fabric_name")})
        self.left = dict(self.constants)

    def value(self, key: str) -> Any:
        if key not in self.left:
            raise InputError(f"hardware profile {self.name}: {key} is missing", hint=f"Add a table [{key}].")
        return self.left.pop(key).value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.value(key)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise InputError(
                f"hardware profile {self.name}: {key} is {value!r}", hint=f"It must be a number from {low:g} to {high:g}."
            )
        return float(value)

    def names(self, prefix: str) -> list[str]:
        return [key.removeprefix(f"{prefix}.") for key in self.left if key.startswith(f"{prefix}.")]

    def points(self, key: str, low: float, high: float) -> Points:
        value = self.value(key)
        ok = isinstance(value, tuple) and value and all(isinstance(p, tuple) and len(p) == 2 for p in value)
        if not ok or list(value) != sorted(value) or not all(x > 0 and low <= y <= high for x, y in value):
            raise InputError(
                f"hardware profile {self.name}: {key} is not a curve",
                hint=f"Write [[x, y], ...] with rising x over 0 and y from {low:g} to {high:g}.",
            )
        return tuple((float(x), float(y)) for x, y in value)

    def profile(self) -> HardwareProfile:
        constants = {key: self.constants[key] for key in sorted(self.constants)}
        content = [self.name, self.fabric_name, [[key, thaw(constant.value)] for key, constant in constants.items()]]
        profile = HardwareProfile(
            name=self.name,
            title=self.title,
            fabric_name=self.fabric_name,
            peak_flop_per_s={dtype: self.number(f"peak.{dtype}", 1e12, 1e17) for dtype in self.names("peak")},
            hbm_bytes_per_s=self.number("memory.hbm_bytes_per_s", 1e11, 1e14),
            hbm_bytes=int(self.number("memory.hbm_bytes", 1e9, 1e13)),
            usable_bytes=int(self.number("memory.usable_bytes", 1e9, 1e13)),
            reserve_bytes=int(self.number("memory.reserve_bytes", 0, 1e11)),
            gpus_per_node=int(self.number("node.gpus_per_node", 1, 1024)),
            sustained_clock=self.number("clock.sustained", 0.3, 1),
            gemm=self.gemm(),
            attention=self.attention(),
            pointwise=PointwiseConstants(
                efficiency=self.number("pointwise.efficiency", 0.05, 1),
                launch_us=self.number("pointwise.launch_us", 0, 100),
                cached_rate=self.points("pointwise.cached_rate", 0.05, 5),
            ),
            quantise=QuantiseConstants(
                efficiency=self.number("quantise.efficiency", 0.05, 1), launch_us=self.number("quantise.launch_us", 0, 100)
            ),
            scan=ScanConstants(
                chunk=int(self.number("scan.chunk", 1, 1e6)),
                launch_us=self.number("scan.launch_us", 0, 1000),
                round_us=self.number("scan.round_us", 0, 1000),
                chunk_us=self.number("scan.chunk_us", 0.01, 1000),
                tasks=self.number("scan.tasks", 1, 1e5),
                convolution_efficiency=self.number("scan.convolution_efficiency", 0.05, 1),
                convolution_launch_us=self.number("scan.convolution_launch_us", 0, 100),
            ),
            launch=LaunchConstants(
                eager_us=self.number("launch.eager_us", 0, 1000),
                compiled_us=self.number("launch.compiled_us", 0, 1000),
                collective_us=self.number("launch.collective_us", 0, 1000),
            ),
            node=self.node(),
            fabric=self.fabric(),
            constants=constants,
            content_hash=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16],
        )
        if self.left:
            raise InputError(
                f"hardware profile {self.name}: unknown constants {', '.join(sorted(self.left))}",
                hint="Check the spelling; a number nothing reads is not kept.",
            )
        return profile

    def gemm(self) -> GemmConstants:
        knots = [tuple(map(float, self.value(f"gemm.surface.{dim}"))) for dim in ("m", "n", "k")]
        table = self.value("gemm.surface.log_residual")
        shaped = len(table) == len(knots[0]) and all(len(row) == len(knots[1]) for row in table)
        cells = [cell for row in table for column in row for cell in column] if shaped else []
        if len(cells) != math.prod(map(len, knots)) or not all(abs(cell) <= 2 for cell in cells):
            raise InputError(
                f"hardware profile {self.name}: gemm.surface.log_residual is not a table of log residuals",
                hint=f"It needs {' x '.join(str(len(k)) for k in knots)} numbers (m, n, k), each from -2 to 2.",
            )
        return GemmConstants(
            compute_efficiency=self.number("gemm.compute_efficiency", 0.05, 1),
            memory_efficiency=self.number("gemm.memory_efficiency", 0.05, 1),
            sharpness=self.number("gemm.sharpness", 1, 20),
            launch_us=self.number("gemm.launch_us", 0, 100),
            surface_m=knots[0],
            surface_n=knots[1],
            surface_k=knots[2],
            surface=table,
            dtype_rate={dtype: self.number(f"gemm.dtype_rate.{dtype}", 0.05, 2) for dtype in self.names("gemm.dtype_rate")},
        )

    def attention(self) -> AttentionConstants:
        dims = sorted(int(name.removeprefix("d")) for name in self.names("attention.efficiency"))
        libraries = {
            name: LibraryConstants(
                rate=self.number(f"attention.library_rate.{name}", 0.05, 5),
                start=self.number(f"attention.library_start.{name}", 0, 20),
                backward_start=self.number(f"attention.library_backward_start.{name}", 0, 20),
            )
            for name in self.names("attention.library_rate")
        }
        return AttentionConstants(
            multiprocessors=int(self.number("attention.multiprocessors", 1, 1e4)),
            head_dims=tuple(dims),
            efficiency=tuple(self.number(f"attention.efficiency.d{dim}", 0.05, 1) for dim in dims),
            start=tuple(self.number(f"attention.start.d{dim}", 0, 20) for dim in dims),
            measured_launch_us=self.number("attention.measured_launch_us", 0, 100),
            measured_passes=self.number("attention.measured_passes", 0, 20),
            backward_flop_factor=self.number("attention.backward_flop_factor", 1, 5),
            backward_rate=self.number("attention.backward_rate", 0.05, 1),
            libraries=libraries,
            library=str(self.value("attention.library")),
            launch_us=self.number("attention.launch_us", 0, 100),
        )

    def node(self) -> NodeConstants:
        curves: dict[str, dict[int, Points]] = {}
        for name in self.names("node.collective"):
            kind, _, ranks = name.partition(".n")
            curves.setdefault(kind, {})[int(ranks)] = self.points(f"node.collective.{name}", 0.1, 1e9)
        return NodeConstants(
            link_bytes_per_s=self.number("node.link_bytes_per_s", 1e9, 1e13),
            nvls_min_ranks=int(self.number("node.nvls_min_ranks", 0, 1e6)) or None,
            curves={kind: dict(sorted(of_ranks.items())) for kind, of_ranks in curves.items()},
        )

    def fabric(self) -> FabricConstants:
        efficiency = {kind: self.number(f"fabric.efficiency.{kind}", 0.05, 1) for kind in self.names("fabric.efficiency")}
        return FabricConstants(
            nic_bytes_per_s=self.number("fabric.nic_bytes_per_s", 1e8, 1e13),
            efficiency=efficiency,
            start_up={kind: self.points(f"fabric.start_up.{kind}", 0.1, 1e6) for kind in self.names("fabric.start_up")},
        )
