"""Rows of measurements and what was predicted for them."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError

Fields = Mapping[str, str]
"""One line of a CSV file by column name; empty where the source says nothing."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One measurement: predicted, or skipped with the reason, or `failed`: an error of the planner's own.

    Attributes:
        source: the unit of cross-validation: rows of one source are near copies of each other.
        label: the row in a reader's words.
        group: rows that are plans of one and the same work, for ranking; "" for none.
        facts: what is known or assumed about the row that may explain its error (`facts.py`).
    """

    category: str
    source: str
    label: str
    measured: float
    predicted: float | None = None
    skipped: str = ""
    failed: str = ""
    group: str = ""
    facts: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """predicted / measured - 1"""
        assert self.predicted is not None
        return self.predicted / self.measured - 1


class Skip(Exception):
    """Raised for a row that cannot be expressed; the text is the reason, the same for all rows of a kind."""


def failure(error: Exception) -> str:
    """What is told of an error that is nobody's input."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def read_csv(path: Path, columns: Iterable[str], optional: Iterable[str] = ()) -> list[dict[str, str]]:
    """The rows of a file, plain or gzipped; a column of `optional` that is not there is empty in all rows.

    Raises:
        InputError: the file is empty, lacks one of `columns`, or is not readable text.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = csv.DictReader(io.StringIO(text.decode("utf-8-sig"), newline=""), skipinitialspace=True)
        names = [(name or "").strip() for name in lines.fieldnames or ()]
        lines.fieldnames = names
        read = [{name: (value or "").strip() for name, value in line.items() if isinstance(name, str)} for line in lines]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path.name} cannot be read: {error}", hint="It must be a CSV file with a header line.") from error
    if not names:
        raise InputError(f"{path.name} is empty", hint=f"Columns are {', '.join(columns)}.")
    missing = sorted(set(columns) - set(names))
    if missing:
        raise InputError(f"{path.name} has no column {', '.join(missing)}", hint=f"Columns are {', '.join(columns)}.")
    unstated = dict.fromkeys(set(optional) - set(names), "")
    return [unstated | row for row in read if any(row.values())]


def number(row: Fields, name: str) -> float | None:
    """A field as a number; None where it is empty."""
    text = row.get(name, "")
    if text.lower() in ("", "nan"):
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise Skip(f"{name} is not a number") from error
    if not math.isfinite(value):
        raise Skip(f"{name} is not a number")
    return value


def needed(row: Fields, *names: str) -> tuple[float, ...]:
    """Fields that must be there, all over 0. Raises Skip naming the first that is not."""
    found = []
    for name in names:
        value = number(row, name)
        if value is None:
            raise Skip(f"{name} is not stated")
        if value <= 0:
            raise Skip(f"{name} is not over 0")
        found.append(value)
    return tuple(found)


def counts(row: Fields, *names: str) -> tuple[int, ...]:
    """Fields that must be there, all whole and over 0. Raises Skip naming the first that is not."""
    return tuple(_whole(name, value) for name, value in zip(names, needed(row, *names), strict=True))


def count(row: Fields, name: str, unstated: int) -> int:
    """A field that is whole and over 0, or `unstated` if it is empty."""
    return counts(row, name)[0] if number(row, name) is not None else unstated


def _whole(name: str, value: float) -> int:
    if value != int(value):
        raise Skip(f"{name} is not a whole number")
    return int(value)
