"""A folder of CSV files -> scored rows. File names and columns say what a file is; other files are listed, not guessed.

One bad row or file ends nothing: it is skipped with its reason, or has failed with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from planner.accuracy.ends import (
    MEMORY_COLUMNS,
    MEMORY_OPTIONAL,
    STEP_COLUMNS,
    STEP_OPTIONAL,
    VTRAIN_COLUMNS,
)
from planner.accuracy.kernels import FIGURE_COLUMNS, KERNEL_FILES, score_attention_figure
from planner.accuracy.links import COLLECTIVE_COLUMNS, COLLECTIVE_OPTIONAL, CollectiveScorer
from planner.accuracy.planned import MEMORY, RANKED, STEP, Job, Progress, score_jobs
from planner.accuracy.rows import Fields, Scored, Skip, failure, number, read_csv
from planner.errors import InputError, PlannerError


@dataclass(frozen=True)
class Folder:
    """What was found: rows with predictions or reasons; files that are none of the known ones; known files that cannot be read,
    each with what is wrong with it."""

    rows: tuple[Scored, ...]
    unknown_files: tuple[str, ...]
    unreadable: tuple[tuple[str, str], ...] = ()


def score_folder(
    folder: Path, *, progress: Progress = lambda file: None, workers: int | None = None, limit_s: float | None = None
) -> Folder:
    """`workers` and `limit_s`: see `planned.py`. Raises InputError if there is no such folder."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", hint="Give the folder with the CSV files.")
    rows: list[Scored] = []
    jobs: list[Job] = []
    unknown, unreadable = [], []
    for path in sorted(folder.iterdir()):
        if not path.name.endswith((".csv", ".csv.gz")):
            continue
        try:
            scored, planned = score_file(path), jobs_of(path)
            if scored is None and planned is None:
                unknown.append(path.name)
                continue
            progress(path.name)
            rows += scored or ()
            jobs += planned or ()
        except InputError as error:
            unreadable.append((path.name, error.message))
    rows += score_jobs(jobs, workers=workers, limit_s=limit_s, progress=progress)
    return Folder(tuple(rows), tuple(unknown), tuple(unreadable))


def stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".csv")


def score_file(path: Path) -> Iterator[Scored] | None:
    """The rows of a file of kernels or collectives; None if it is none."""
    for pattern, score in KERNEL_FILES:
        if match := pattern.fullmatch(stem(path)):
            return score(path, match)
    name = stem(path)
    if name == "collectives":
        return _each(path, COLLECTIVE_COLUMNS, COLLECTIVE_OPTIONAL, CollectiveScorer().score)
    if name == "attention_fa_figures":
        return _each(path, FIGURE_COLUMNS, (), score_attention_figure)
    if name.startswith("moe_grouped_gemm"):
        reason = "fused inference kernel of several ops; plans price experts as batched matmuls"
        return _skipped(path, "grouped matmul", reason, "latency_us")
    if name.startswith("memory_korthikanti"):
        reason = "computed by its source's formulas, not measured; sizes of the models are not stated"
        return _skipped(path, "memory by formula", reason, "params_plus_optimizer_GiB")
    return None


def jobs_of(path: Path) -> list[Job] | None:
    """The rows of a file of training runs; None if it is none."""
    name = stem(path)
    if name.startswith("e2e_training"):
        return _jobs(STEP, path, read_csv(path, STEP_COLUMNS, STEP_OPTIONAL))
    if name.startswith("vtrain_"):
        return _jobs(RANKED, path, read_csv(path, VTRAIN_COLUMNS))
    if name == "memory_e2e":
        models = _models(path.parent)
        return _jobs(MEMORY, path, read_csv(path, MEMORY_COLUMNS, MEMORY_OPTIONAL), lambda row: models.get(row["row_id"]))
    return None


def _jobs(
    kind: str, path: Path, rows: list[dict[str, str]], model: Callable[[Fields], Fields | None] = lambda row: None
) -> list[Job]:
    return [Job(kind=kind, file=path.name, line=line, row=row, model=model(row)) for line, row in enumerate(rows, 2)]


def _models(folder: Path) -> dict[str, Fields]:
    """The rows of training steps by id; files that cannot be read are told where they are scored."""
    found: dict[str, Fields] = {}
    for path in sorted(folder.glob("e2e_training*.csv*")):
        try:
            found |= {row["row_id"]: row for row in read_csv(path, STEP_COLUMNS, STEP_OPTIONAL)}
        except InputError:
            continue
    return found


def _skipped(path: Path, category: str, reason: str, column: str) -> Iterator[Scored]:
    for row in read_csv(path, (), (column,)):
        try:
            measured = number(row, column)
        except Skip:
            measured = None
        nothing = float("nan")
        yield Scored(
            category=category,
            source=path.name,
            label=path.name,
            measured=nothing if measured is None else measured,
            skipped=reason,
        )


def _each(path: Path, columns: tuple[str, ...], optional: tuple[str, ...], score: Callable[[Fields], Scored]) -> Iterator[Scored]:
    for line, row in enumerate(read_csv(path, columns, optional), 2):
        where = f"{path.name} line {line}"
        nothing = Scored(category=path.name, source=where, label=where, measured=float("nan"))
        try:
            yield score(row)
        except Skip as skip:
            yield replace(nothing, skipped=str(skip))
        except PlannerError as error:
            yield replace(nothing, skipped=error.message)
        except Exception as error:
            yield replace(nothing, failed=failure(error))
