"""A folder of CSV files -> scored rows. File names and columns say what a file is; other files are listed, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planner.accuracy.ends import MEMORY_COLUMNS, STEP_COLUMNS, VTRAIN_COLUMNS, score_memory_row, score_step, score_vtrain
from planner.accuracy.kernels import KERNEL_FILES, score_attention_figure
from planner.accuracy.links import COLLECTIVE_COLUMNS, CollectiveScorer
from planner.accuracy.rows import Fields, Scored, Skip, read_csv
from planner.accuracy.steps import Predictor
from planner.errors import InputError

Progress = Callable[[str], None]
FIGURE_COLUMNS = ("gpu", "library", "phase", "head_dim", "causal", "seq", "total_tokens", "tflops")


@dataclass(frozen=True)
class Folder:
    """What was found: rows with predictions or reasons, and files that are none of the known ones."""

    rows: tuple[Scored, ...]
    unknown_files: tuple[str, ...]


def score_folder(folder: Path, *, progress: Progress = lambda file: None) -> Folder:
    """Raises InputError if there is no such folder or a known file lacks a column."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", hint="Give the folder with the CSV files.")
    rows: list[Scored] = []
    unknown = []
    predictor = Predictor()
    for path in sorted(folder.iterdir()):
        if not path.name.endswith((".csv", ".csv.gz")):
            continue
        found = _score_file(path, predictor)
        if found is None:
            unknown.append(path.name)
            continue
        progress(path.name)
        rows += found
    return Folder(tuple(rows), tuple(unknown))


def _score_file(path: Path, predictor: Predictor) -> Iterator[Scored] | None:
    for pattern, score in KERNEL_FILES:
        if pattern.match(path.name):
            return score(path)
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    if name == "collectives":
        return _each(path, COLLECTIVE_COLUMNS, CollectiveScorer().score)
    if name == "attention_fa_figures":
        return _each(path, FIGURE_COLUMNS, score_attention_figure)
    if name.startswith("e2e_training"):
        return _each(path, STEP_COLUMNS, partial(score_step, predictor))
    if name.startswith("vtrain_"):
        return _each(path, VTRAIN_COLUMNS, partial(score_vtrain, predictor))
    if name.startswith("moe_grouped_gemm"):
        reason = "fused inference kernel of several ops; plans price experts as batched matmuls"
        return _skipped(path, "grouped matmul", reason, "latency_us")
    if name.startswith("memory_korthikanti"):
        reason = "computed by its source's formulas, not measured; sizes of the models are not stated"
        return _skipped(path, "memory by formula", reason, "params_plus_optimizer_GiB")
    if name == "memory_e2e":
        models = {row["row_id"]: row for other in path.parent.glob("e2e_training*.csv*") for row in read_csv(other, STEP_COLUMNS)}
        return _each(path, MEMORY_COLUMNS, partial(score_memory_row, predictor, models))
    return None


def _skipped(path: Path, category: str, reason: str, column: str) -> Iterator[Scored]:
    for row in read_csv(path, (column,)):
        yield Scored(category=category, source=path.name, label=path.name, measured=float(row[column]), skipped=reason)


def _each(path: Path, columns: tuple[str, ...], score: Callable[[Fields], Scored]) -> Iterator[Scored]:
    for line, row in enumerate(read_csv(path, columns), 2):
        try:
            yield score(row)
        except Skip as skip:
            where = f"{path.name} line {line}"
            yield Scored(category=path.name, source=where, label=where, measured=float("nan"), skipped=str(skip))
