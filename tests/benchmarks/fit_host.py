"""Fit of the operators that an eager framework issues per kernel: one number, from plans for one work of `vtrain_*`.

Small micro-batches wait for the CPU, large ones do not notice it. Printed: the number that fits best as mean over the shapes of
models, and the error of each shape under the number that fits the others best.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from planner.accuracy.ends import VTRAIN_COLUMNS
from planner.accuracy.planned import rare_collections
from planner.accuracy.rows import Skip, needed, read_csv
from planner.accuracy.runs import vtrain_run
from planner.accuracy.steps import Predictor

OPERATORS = np.round(np.arange(1.0, 4.01, 0.25), 2)
ROWS_PER_SHAPE = 14


def fit_host(folder: Path) -> None:
    found: dict[str, list[np.ndarray]] = {}
    predictor = Predictor()
    with rare_collections():
        for path in sorted(folder.glob("vtrain_*.csv")):
            rows = read_csv(path, VTRAIN_COLUMNS)
            random.Random(0).shuffle(rows)
            for row in rows:
                mine = found.setdefault("x".join(row[name] for name in ("hidden", "layers", "seq")), [])
                try:
                    if len(mine) < ROWS_PER_SHAPE:
                        run, measured = vtrain_run(row), needed(row, "iter_ms")[0] * 1e3
                        times = [predictor.times(run, operators=operators) for operators in OPERATORS]
                        steps = np.array([(run.accumulation - 1) * t.micro + t.last for t in times])
                        mine.append(np.abs(steps / measured - 1))
                except Skip:
                    continue
    report({shape: np.array(rows).mean(0) for shape, rows in found.items() if rows})


def report(means: dict[str, np.ndarray]) -> None:
    together = np.mean(list(means.values()), axis=0)
    print(
        f"# operators per kernel: {OPERATORS[together.argmin()]:.2f} fits best over {len(means)} shapes, as mean of their errors"
    )
    print("#   " + ", ".join(f"{n:.2f}: {100 * e:.1f} %" for n, e in zip(OPERATORS, together, strict=True)))
    for shape, mine in means.items():
        chosen = int(np.mean([curve for other, curve in means.items() if other != shape] or [mine], axis=0).argmin())
        print(f"#   {shape}: {100 * mine[chosen]:.1f} % left out (at {OPERATORS[chosen]:.2f}), {100 * mine[0]:.1f} % at 1")
