"""Scored rows -> the table by category, the worst rows, the reasons for what was skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
FEWEST_PLANS = 4
FEWEST_ROWS, MORE, MOST_TOLD = 3, 1.25, 3
"""Of facts: rows that have one, how much more they err, facts told per category."""
TAU_TARGET, REGRET_TARGET_PCT = 0.8, 3.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """One category. Errors in %; `by_source_pct` is the mean over sources of each source's mean."""

    category: str
    rows: int
    sources: int
    skipped: int
    failed: int
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
        skipped=sum(bool(row.skipped) for row in rows),
        failed=sum(bool(row.failed) for row in rows),
        mean_pct=None if empty else rounded(np.abs(errors).mean()),
        by_source_pct=None if empty else rounded(float(np.mean([np.mean(e) for e in of_source.values()]))),
        median_pct=None if empty else rounded(np.median(np.abs(errors))),
        p90_pct=None if empty else rounded(float(np.quantile(np.abs(errors), 0.9))),
        bias_pct=None if empty else rounded(errors.mean()),
        target_pct=TARGETS_PCT.get(category),
    )


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """How well the cheapest plan is picked among plans for the same work; groups of at least four plans.

    `tau` is Kendall's (pairs in the right order minus pairs in the wrong one, over all pairs); `regret_pct` is what the plan
    ranked first takes beyond the fastest measured. Both are means over sources of the means over their groups.
    """

    category: str
    plans: int
    groups: int
    sources: int
    tau: float
    regret_pct: float

    @property
    def passes(self) -> bool:
        return self.tau >= TAU_TARGET and self.regret_pct <= REGRET_TARGET_PCT


def rankings(rows: Iterable[Scored]) -> tuple[Ranking, ...]:
    """By category of the rows."""
    groups: dict[str, dict[tuple[str, str], list[Scored]]] = {}
    for row in rows:
        if row.group and row.predicted is not None:
            groups.setdefault(row.category, {}).setdefault((row.source, row.group), []).append(row)
    found = []
    for category, mine in sorted(groups.items()):
        ranked = {key: plans for key, plans in mine.items() if len(plans) >= FEWEST_PLANS}
        if ranked:
            found.append(_ranking(category, ranked))
    return tuple(found)


def _ranking(category: str, groups: Mapping[tuple[str, str], list[Scored]]) -> Ranking:
    def mean(measure: Callable[[list[Scored]], float]) -> float:
        of_source: dict[str, list[float]] = {}
        for (source, _), plans in groups.items():
            of_source.setdefault(source, []).append(measure(plans))
        return float(np.mean([np.mean(values) for values in of_source.values()]))

    return Ranking(
        category=category.replace("step time of plans to rank", "plan ranking"),
        plans=sum(map(len, groups.values())),
        groups=len(groups),
        sources=len({source for source, _ in groups}),
        tau=round(mean(_tau), 3),
        regret_pct=round(100 * mean(_regret), 2),
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


@dataclass(frozen=True, kw_only=True)
class Telling:
    """A fact whose rows err more than those without it: mean errors in %."""

    category: str
    fact: str
    rows: int
    with_pct: float
    without_pct: float


def telling(rows: Iterable[Scored], category: str) -> list[Telling]:
    """What the worst rows of a category have in common, most telling first: facts of at least FEWEST_ROWS rows that err MORE
    times as much as the others."""
    mine = [row for row in rows if row.category == category and row.predicted is not None]
    errors = np.array([abs(row.error) * 100 for row in mine])
    found = []
    for fact in dict.fromkeys(fact for row in mine for fact in row.facts):
        has = np.array([fact in row.facts for row in mine])
        if FEWEST_ROWS <= has.sum() < len(mine):
            with_it, without = float(errors[has].mean()), float(errors[~has].mean())
            if with_it > MORE * without:
                found.append(
                    Telling(
                        category=category,
                        fact=fact,
                        rows=int(has.sum()),
                        with_pct=round(with_it, 1),
                        without_pct=round(without, 1),
                    )
                )
    return sorted(found, key=lambda one: -one.rows * (one.with_pct - one.without_pct))


def skip_reasons(rows: Iterable[Scored]) -> list[tuple[str, str, int]]:
    """(category, reason, rows), most frequent first."""
    counts = Counter((row.category, row.skipped) for row in rows if row.skipped)
    return [(category, reason, count) for (category, reason), count in counts.most_common()]


def failures(rows: Iterable[Scored]) -> list[tuple[str, str, str]]:
    """(category, row, error) of what went wrong."""
    return [(row.category, row.label, row.failed) for row in rows if row.failed]


def as_text(
    rows: tuple[Scored, ...], unknown_files: Iterable[str], unreadable: Iterable[tuple[str, str]] = (), *, worst_rows: int = 3
) -> str:
    table = summarise(rows)
    lines = [*_table(table), *map(_ranked, rankings(rows))]
    for line in table:
        for row in worst(rows, line.category, worst_rows):
            why = f" [{'; '.join(row.facts)}]" if row.facts else ""
            lines.append(
                f"worst {line.category}: {row.label}: {row.measured:.4g} -> {row.predicted:.4g} ({100 * row.error:+.0f} %){why}"
            )
        for one in telling(rows, line.category)[:MOST_TOLD]:
            lines.append(
                f"why {line.category}: {one.rows} rows with '{one.fact}' err {one.with_pct:g} %, the others {one.without_pct:g} %"
            )
    for category, reason, count in skip_reasons(rows):
        lines.append(f"skipped {count} of {category}: {reason}")
    lines += [f"FAILED: {label} ({category}): {error}" for category, label, error in failures(rows)]
    lines += [f"not read: {reason}" for _, reason in unreadable]
    lines += [f"not read: {name} (unknown file)" for name in unknown_files]
    return "\n".join(lines)


def _table(table: Iterable[Line]) -> Iterator[str]:
    names = ("mean", "by src", "median", "p90", "bias", "target")
    yield f"{'category':42s} {'rows':>6s} {'srcs':>5s} {'skip':>5s} {'fail':>5s} " + " ".join(f"{name:>7s}" for name in names)
    for line in table:
        figures = (line.mean_pct, line.by_source_pct, line.median_pct, line.p90_pct, line.bias_pct)
        cells = " ".join(f"{'-':>7s}" if f is None else f"{f:6.1f}%" for f in figures)
        aim = "" if line.target_pct is None else f"<={line.target_pct:g}%"
        verdict = {None: "", True: " ok", False: " MISSED"}[line.passes]
        counts = f"{line.rows:6d} {line.sources:5d} {line.skipped:5d} {line.failed:5d}"
        yield f"{line.category:42s} {counts} {cells} {aim:>7s}{verdict}"
    yield "'by src' is the mean over sources, and what the target is for. Errors are |predicted / measured - 1|."


def _ranked(found: Ranking) -> str:
    return (
        f"{found.category}: Kendall tau {found.tau:.2f} (>= {TAU_TARGET}), regret of the first {found.regret_pct:.1f} % "
        f"(<= {REGRET_TARGET_PCT:g} %), {found.plans} plans in {found.groups} groups of {found.sources} sources: "
        f"{'ok' if found.passes else 'MISSED'}"
    )


def as_json(rows: tuple[Scored, ...], unknown_files: Iterable[str], unreadable: Iterable[tuple[str, str]] = ()) -> dict[str, Any]:
    table = summarise(rows)
    return {
        "categories": [{**asdict(line), "passes": line.passes} for line in table],
        "rankings": [{**asdict(found), "passes": found.passes} for found in rankings(rows)],
        "worst": {
            line.category: [
                {
                    "label": r.label,
                    "source": r.source,
                    "measured": r.measured,
                    "predicted": r.predicted,
                    "error": r.error,
                    "facts": list(r.facts),
                }
                for r in worst(rows, line.category)
            ]
            for line in table
        },
        "why": [asdict(one) for line in table for one in telling(rows, line.category)],
        "skipped": [{"category": c, "reason": r, "rows": n} for c, r, n in skip_reasons(rows)],
        "failed": [{"category": c, "row": label, "error": error} for c, label, error in failures(rows)],
        "unknown_files": list(unknown_files),
        "unreadable_files": [{"file": name, "reason": reason} for name, reason in unreadable],
    }
