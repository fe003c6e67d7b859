"""Seconds of the stages of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Progress = Callable[[str], None]
"""Called with the name of each stage as it begins: `trace`, `enumerate`, `estimate`, `solve`, `verify`."""


class Clock:
    """Runs stages, reports their beginning and keeps their seconds."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def run(self, stage: str, work: Callable[[], T]) -> T:
        self.progress(stage)
        start = time.perf_counter()
        result = work()
        self.seconds[stage] = time.perf_counter() - start
        return result
