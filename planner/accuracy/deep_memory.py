"""Peak memory of a deep model from two shallow ones.

At corresponding moments of two depths (in the first or the last layer, or outside the layers) what is alive differs by what one
layer adds; it is extended by that for every layer more. Within a stack of equal layers memory rises or falls evenly, so the peak
of a deep model is at one of these moments.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from planner.accuracy.rows import Skip
from planner.accuracy.runs import Run
from planner.actions import Actions
from planner.costing.assumptions import CONSTANTS
from planner.costing.live_memory import LiveMemory

DEPTHS = (2, 3)
SLACK: float = CONSTANTS["memory.framework_slack"].value
BLOCK = re.compile(r"(\w+) block (-?\d+)")

Moment = tuple[str, str, int, int]
"""Counted from the front or the back, phase, block, place in the block."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Walked:
    """A shallow model; `elements` of parameters on a device."""

    actions: Actions
    memory: LiveMemory
    elements: float
    num_layers: int

    @property
    def moments(self) -> dict[Moment, int]:
        """What is alive at each moment that has a counterpart at other depths."""
        found: dict[Moment, int] = {}
        places: Counter[str] = Counter()
        for action, live in zip(self.actions.actions, self.memory.live_bytes, strict=True):
            place = places[action.block]
            places[action.block] += 1
            match = BLOCK.fullmatch(action.block)
            number = int(match[2]) if match else self.num_layers
            phase = match[1] if match else action.block
            if number <= 0:
                found["front", phase, number, place] = live
            if number >= self.num_layers - 1:
                found["back", phase, number - self.num_layers, place] = live
        return found


@dataclass(frozen=True, kw_only=True)
class DeepMemory:
    """Bytes on one device.

    Attributes:
        allocated_bytes: what tensors take at most.
        cached_bytes: what the allocator has then, with fragments: "reserved" in PyTorch's statistics.
        reserved_bytes: with communicator groups and the driver's context: what the device must have.
    """

    allocated_bytes: float
    cached_bytes: float
    reserved_bytes: float


def deep_memory(few: Walked, more: Walked, run: Run) -> DeepMemory:
    """Raises Skip if the plans of both depths do not run alike."""
    layers = run.layers - few.num_layers
    first, second = few.moments, more.moments
    if first.keys() != second.keys():
        raise Skip("layers of the plan are not alike")
    per_layer = more.elements - few.elements
    changed = other_state(run, few.elements + layers * per_layer)
    peak = max(live + layers * (second[moment] - live) for moment, live in first.items()) + changed
    static = [sum(walked.actions.static_bytes.values()) for walked in (few, more)]
    moving = peak - (static[0] + layers * (static[1] - static[0]) + changed)
    cached = peak + SLACK * max(0.0, moving)
    return DeepMemory(allocated_bytes=peak, cached_bytes=cached, reserved_bytes=cached + few.memory.reserve_bytes)


def other_state(run: Run, elements: float) -> float:
    """Bytes that the run keeps beyond the planner's 16 per parameter: 4 each of parameter and gradient, 8 of AdamW.

    With bf16 parameters (2) their fp32 copies (4) belong to the optimizer; ZeRO 1 and 2 split the optimizer's over data ranks,
    ZeRO 2 gradients too.
    """
    parameters, gradients, optimizer = (2.0, 4.0, 12.0) if run.has_master else (4.0, 4.0, 8.0)
    if run.zero in (1, 2) and not run.shards_parameters:
        optimizer /= run.data_ranks
        gradients /= run.data_ranks if run.zero == 2 else 1
    return (parameters + gradients + optimizer - 16) * elements
