"""Fit of the sustained clock: one number per machine, from training steps that say what they recompute.

Steps are planned once at the profile's clock and simulated at others, where matmuls and attention scale. Printed per machine: the
clock that fits best as mean over sources, and the error of each source under the clock that fits the others best.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from planner.accuracy.ends import STEP_COLUMNS, STEP_OPTIONAL, measured_us
from planner.accuracy.planned import rare_collections
from planner.accuracy.rows import Skip, read_csv
from planner.accuracy.runs import Run, run_of
from planner.accuracy.steps import Predictor
from planner.hardware import load_profile
from planner.hardware_changes import split_name

CLOCKS = np.round(np.arange(0.60, 1.001, 0.02), 2)
ROWS_PER_SOURCE = 12

Errors = Mapping[str, np.ndarray]
"""Source -> [rows, clocks] |predicted / measured - 1|."""


def errors_of(run: Run, measured: float, predictor: Predictor) -> np.ndarray:
    run = predictor.settled(run)
    found = [predictor.times(run, clock) for clock in CLOCKS]
    times = [(run.accumulation - 1) * t.micro + t.last for t in found]
    return np.abs(np.array(times) / measured - 1)


def fit_clocks(folder: Path) -> None:
    with rare_collections():
        _fit(folder)


def _fit(folder: Path) -> None:
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    predictor = Predictor()
    for path in sorted(folder.glob("e2e_training*.csv")):
        rows = read_csv(path, STEP_COLUMNS, STEP_OPTIONAL)
        random.Random(0).shuffle(rows)
        for row in rows:
            if not row["ac_policy"]:
                continue
            try:
                run = run_of(row)
                measured = measured_us(row, run)
                if measured is None:
                    continue
                mine = found.setdefault(split_name(run.hardware)[0], {}).setdefault(row["group"], [])
                if len(mine) < ROWS_PER_SOURCE:
                    mine.append(errors_of(run, measured, predictor))
            except Skip:
                continue
    for hardware, sources in sorted(found.items()):
        report(hardware, {source: np.array(errors) for source, errors in sources.items() if errors})


def report(hardware: str, errors: Errors) -> None:
    means = {source: rows.mean(0) for source, rows in errors.items()}
    best = CLOCKS[np.mean(list(means.values()), axis=0).argmin()]
    now = int(np.abs(CLOCKS - load_profile(hardware).sustained_clock).argmin())
    print(f"# {hardware}: clock {best:.2f} fits best over {len(means)} sources; the profile's is {CLOCKS[now]:.2f}")
    for source, mine in means.items():
        others = [curve for other, curve in means.items() if other != source]
        chosen = int(np.mean(others, axis=0).argmin()) if others else int(mine.argmin())
        how = f"left out (clock {CLOCKS[chosen]:.2f})" if others else "in sample: the only source"
        present = f"{100 * mine[now]:.1f} % at the profile's"
        print(f"#   {source}: {100 * mine[chosen]:.1f} % {how}, {present}, {len(errors[source])} rows")
