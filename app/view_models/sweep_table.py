"""The table of a sweep over mesh shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from app.view_models.status import GB, GIB
from planner import Plan
from planner.sweep import Entry, SweepRequest, meshes, ordered, pareto

DECIMALS = ("step ms", "compute ms", "comm ms", "peak GiB")
STATES = {"infeasible": "does not fit", "indivisible": "does not divide", "time_limit": "no answer in time"}


def request_of(plan: Plan, memory_bytes: int | None) -> SweepRequest:
    """The model, hardware and limits of a plan."""
    return SweepRequest(
        model=plan.request, devices=plan.mesh.num_devices, hardware=plan.hardware_name, memory_bytes=memory_bytes,
        optimizer=plan.memory_policy.optimizer, gpus_per_node=plan.gpus_per_node, checkpoint=plan.checkpoint,
    )  # fmt: skip


def with_axes(request: SweepRequest, axes: tuple[int, int]) -> SweepRequest:
    return replace(request, axes=axes)


def num_meshes(devices: int, axes: tuple[int, int]) -> int:
    """Raises InputError if so few devices have no mesh."""
    return len(meshes(devices, axes))


def ordered_entries(rows: Iterable[tuple[Entry, Any]]) -> tuple[Entry, ...]:
    """Fastest first, those without a plan last."""
    return ordered([entry for entry, _ in rows])


def columns(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    """Column -> values. Volume is in full bytes, per axis or group."""
    front = pareto(entries)
    return {
        "mesh": [entry.mesh for entry in entries],
        "best": ["not beaten" if entry.mesh in front else "" for entry in entries],
        "step ms": [_scaled(entry.objective_us, 1000) for entry in entries],
        "compute ms": [_scaled(entry.compute_us, 1000) for entry in entries],
        "comm ms": [_scaled(entry.comm_us, 1000) for entry in entries],
        "peak GiB": [_scaled(entry.peak_bytes, GIB) for entry in entries],
        "proof": [proof(entry) for entry in entries],
        "volume GB": [volumes(entry) for entry in entries],
        "checkpointed layers": [entry.checkpointed if entry.solved else None for entry in entries],
        "reason": [entry.reason for entry in entries],
    }


def volumes(entry: Entry) -> str:
    """`dp 3.2, dp+tp 50.7`; what rounds to nothing is left out."""
    return ", ".join(f"{axis} {size / GB:,.1f}" for axis, size in entry.comm_bytes.items() if size >= 0.05 * GB)


def proof(entry: Entry) -> str:
    if not entry.solved:
        return STATES.get(entry.status, entry.status)
    return "optimal" if entry.status == "optimal" else f"within {100 * (entry.gap or 0.0):.2g} %"


def _scaled(value: float | None, unit: int) -> float | None:
    return None if value is None else round(value / unit, 1)
