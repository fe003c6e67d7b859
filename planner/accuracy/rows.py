"""Rows of measurements and what was predicted for them."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError

Fields = Mapping[str, str]
"""One line of a CSV file by column name; empty where the source says nothing."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One measurement: predicted, or skipped with the reason.

    Attributes:
        source: the unit of cross-validation: rows of one source are near copies of each other.
        label: the row in a reader's words.
        group: rows that are plans of one and the same work, for ranking; "" for none.
    """

    category: str
    source: str
    label: str
    measured: float
    predicted: float | None = None
    skipped: str = ""
    group: str = ""

    @property
    def error(self) -> float:
        """predicted / measured - 1"""
        assert self.predicted is not None
        return self.predicted / self.measured - 1


class Skip(Exception):
    """Raised for a row that cannot be expressed; the text is the reason, the same for all rows of a kind."""


def read_csv(path: Path, columns: Iterable[str]) -> list[dict[str, str]]:
    """The rows of a file, plain or gzipped.

    Raises:
        InputError: a column is missing or the file is not readable text.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = csv.DictReader(text.decode().splitlines())
        found = [{name: (value or "").strip() for name, value in line.items() if name is not None} for line in lines]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path.name} cannot be read: {error}", hint="It must be a CSV file with a header line.") from error
    missing = sorted(set(columns) - set(lines.fieldnames or ()))
    if missing:
        raise InputError(f"{path.name} has no column {', '.join(missing)}", hint=f"Columns are {', '.join(columns)}.")
    return found


def number(row: Fields, name: str) -> float | None:
    """A field as a number; None where it is empty."""
    text = row.get(name, "")
    if text in ("", "nan", "NaN"):
        return None
    try:
        return float(text)
    except ValueError as error:
        raise Skip(f"{name} is not a number") from error


def needed(row: Fields, *names: str) -> tuple[float, ...]:
    """Fields that must be there. Raises Skip naming the first that is not."""
    found = []
    for name in names:
        value = number(row, name)
        if value is None:
            raise Skip(f"{name} is not stated")
        found.append(value)
    return tuple(found)


def score_each(rows: Iterable[Fields], score: Callable[[Fields], Scored]) -> Iterator[Scored]:
    """Scores row by row; a row that cannot be expressed is skipped with its reason."""
    for row in rows:
        yield score(row)
