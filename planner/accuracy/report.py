"""Scored rows -> the table by category, the worst rows, the reasons for what was skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from planner.accuracy.rows import Scored

TARGETS_PCT: Mapping[str, float] = {
    "gemm bf16, m >= 128": 6,
    "attention, seq >= 1024": 8,
    "attention by library": 8,
    "collectives in a node, >= 1 MiB": 10,
    "collectives in a node, < 1 MiB": 20,
    "collectives across nodes, >= 1 MiB": 20,
    "collectives across nodes, < 1 MiB": 20,
    "pointwise, >= 64 MB": 5,
    "pointwise, < 64 MB": 20,
    "step time": 12,
    "memory": 10,
}
"""Mean absolute error in % aimed at, as mean over sources."""
WORST = 10
TAU_TARGET, REGRET_TARGET_PCT = 0.8, 3.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One category. Errors in %; `by_source_pct` is the mean over sources of each source's mean."""

    category: str
    rows: int
    sources: int
    skipped: int
    mean_pct: float | None
    by_source_pct: float | None
    median_pct: float | None
    p90_pct: float | None
    bias_pct: float | None
    target_pct: float | None

    @property
    def passes(self) -> bool | None:
        """None without rows or without a target."""
        if self.by_source_pct is None or self.target_pct is None:
            return None
        return self.by_source_pct <= self.target_pct


def summarise(rows: Iterable[Scored]) -> tuple[Line, ...]:
    groups: dict[str, list[Scored]] = {}
    for row in rows:
        groups.setdefault(row.category, []).append(row)
    return tuple(_line(category, groups[category]) for category in sorted(groups))


def _line(category: str, rows: list[Scored]) -> Line:
    scored = [row for row in rows if row.predicted is not None]
    errors = np.array([row.error for row in scored]) * 100
    of_source: dict[str, list[float]] = {}
    for row, error in zip(scored, errors, strict=True):
        of_source.setdefault(row.source, []).append(abs(error))

    def rounded(value: float) -> float | None:
        return round(float(value), 2) if scored else None

    empty = not scored
    return Line(
        category=category,
        rows=len(scored),
        sources=len(of_source),
        skipped=len(rows) - len(scored),
        mean_pct=None if empty else rounded(np.abs(errors).mean()),
        by_source_pct=None if empty else rounded(float(np.mean([np.mean(e) for e in of_source.values()]))),
        median_pct=None if empty else rounded(np.median(np.abs(errors))),
        p90_pct=None if empty else rounded(float(np.quantile(np.abs(errors), 0.9))),
        bias_pct=None if empty else rounded(errors.mean()),
        target_pct=TARGETS_PCT.get(category),
    )


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """How well the cheapest plan is picked among plans for the same work; means over groups of at least four plans.

    `tau` is Kendall's (pairs in the right order minus pairs in the wrong one, over all pairs); `regret_pct` is what the plan
    ranked first takes beyond the fastest measured.
    """

    groups: int
    tau: float
    regret_pct: float


def ranking(rows: Iterable[Scored]) -> Ranking | None:
    groups: dict[str, list[Scored]] = {}
    for row in rows:
        if row.group and row.predicted is not None:
            groups.setdefault(row.group, []).append(row)
    ranked = [mine for mine in groups.values() if len(mine) >= 4]
    if not ranked:
        return None
    return Ranking(
        groups=len(ranked),
        tau=round(float(np.mean([_tau(mine) for mine in ranked])), 3),
        regret_pct=round(100 * float(np.mean([_regret(mine) for mine in ranked])), 2),
    )


def _tau(rows: list[Scored]) -> float:
    measured = np.array([row.measured for row in rows])
    predicted = np.array([row.predicted for row in rows], float)
    upper = np.triu_indices(len(rows), 1)
    agree = np.sign(measured[:, None] - measured)[upper] * np.sign(predicted[:, None] - predicted)[upper]
    return float(agree.mean())


def _regret(rows: list[Scored]) -> float:
    chosen = min(rows, key=lambda row: row.predicted or 0.0)
    return chosen.measured / min(row.measured for row in rows) - 1


def worst(rows: Iterable[Scored], category: str, count: int = WORST) -> list[Scored]:
    mine = [row for row in rows if row.category == category and row.predicted is not None]
    return sorted(mine, key=lambda row: -abs(row.error))[:count]


def skip_reasons(rows: Iterable[Scored]) -> list[tuple[str, str, int]]:
    """(category, reason, rows), most frequent first."""
    counts = Counter((row.category, row.skipped) for row in rows if row.skipped)
    return [(category, reason, count) for (category, reason), count in counts.most_common()]


def as_text(rows: tuple[Scored, ...], unknown_files: Iterable[str], *, worst_rows: int = 3) -> str:
    names = ("mean", "by src", "median", "p90", "bias", "target")
    head = f"{'category':36s} {'rows':>6s} {'srcs':>5s} {'skip':>5s} " + " ".join(f"{name:>7s}" for name in names)
    lines = [head]
    table = summarise(rows)
    for line in table:
        figures = (line.mean_pct, line.by_source_pct, line.median_pct, line.p90_pct, line.bias_pct)
        cells = " ".join(f"{'-':>7s}" if f is None else f"{f:6.1f}%" for f in figures)
        aim = "" if line.target_pct is None else f"<={line.target_pct:g}%"
        verdict = {None: "", True: " ok", False: " MISSED"}[line.passes]
        lines.append(f"{line.category:36s} {line.rows:6d} {line.sources:5d} {line.skipped:5d} {cells} {aim:>7s}{verdict}")
    lines.append("'by src' is the mean over sources, and what the target is for. Errors are |predicted / measured - 1|.")
    found = ranking(rows)
    if found is not None:
        verdict = "ok" if found.tau >= TAU_TARGET and found.regret_pct <= REGRET_TARGET_PCT else "MISSED"
        lines.append(
            f"plan ranking: Kendall tau {found.tau:.2f} (>= {TAU_TARGET}), regret of the first {found.regret_pct:.1f} % "
            f"(<= {REGRET_TARGET_PCT:g} %), {found.groups} groups: {verdict}"
        )
    for line in table:
        for row in worst(rows, line.category, worst_rows):
            lines.append(
                f"worst {line.category}: {row.label}: {row.measured:.4g} -> {row.predicted:.4g} ({100 * row.error:+.0f} %)"
            )
    for category, reason, count in skip_reasons(rows):
        lines.append(f"skipped {count} of {category}: {reason}")
    lines += [f"not read: {name} (unknown file)" for name in unknown_files]
    return "\n".join(lines)


def as_json(rows: tuple[Scored, ...], unknown_files: Iterable[str]) -> dict[str, Any]:
    table = summarise(rows)
    return {
        "categories": [{**asdict(line), "passes": line.passes} for line in table],
        "ranking": None if (found := ranking(rows)) is None else asdict(found),
        "worst": {
            line.category: [
                {"label": r.label, "source": r.source, "measured": r.measured, "predicted": r.predicted, "error": r.error}
                for r in worst(rows, line.category)
            ]
            for line in table
        },
        "skipped": [{"category": c, "reason": r, "rows": n} for c, r, n in skip_reasons(rows)],
        "unknown_files": list(unknown_files),
    }
