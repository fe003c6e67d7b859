"""Files that leave the app and come back: the op table as CSV, plans as JSON."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from typing import Any

from planner import Plan, PlanFormatError

MOST_BYTES = 20 * 2**20
MOST_UNPACKED_BYTES = 64 * 2**20
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(columns: dict[str, list[Any]]) -> str:
    """Rows under a header. Text that a spreadsheet would run as a formula gets an apostrophe in front."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(value) for value in row] for row in zip(*columns.values(), strict=True))
    return out.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def file_stem(plan: Plan) -> str:
    """`llama3-8b-0123abc`, safe as a file name anywhere."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", plan.request.model.rpartition("/")[2])[:40].strip("-") or "model"
    return f"{name}-{plan.plan_id[:7]}"


def read_plan(data: bytes) -> Plan:
    """A plan from an uploaded `.json` or `.json.gz`.

    Raises:
        PlanFormatError: too large, not JSON, or no plan; nothing is loaded then.
    """
    hint = "Give the plan.json that this page or `plan -o` wrote."
    if len(data) > MOST_BYTES:
        raise PlanFormatError(f"the file is larger than {MOST_BYTES // 2**20} MiB", hint=hint)
    try:
        return Plan.from_json(json.loads(_unpacked(data)))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PlanFormatError(f"the file cannot be read as JSON: {error}", hint=hint) from error
    except (EOFError, OSError, zlib.error) as error:
        raise PlanFormatError(f"the file cannot be unpacked: {error}", hint=hint) from error


def _unpacked(data: bytes) -> bytes:
    """Never more than the limit, whatever a compressed file claims."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    with gzip.open(io.BytesIO(data)) as file:
        found = file.read(MOST_UNPACKED_BYTES + 1)
    if len(found) > MOST_UNPACKED_BYTES:
        raise PlanFormatError(
            f"the file unpacks to more than {MOST_UNPACKED_BYTES // 2**20} MiB", hint="This is no plan of this program."
        )
    return found


def first_lines(text: str, count: int = 40) -> str:
    """A preview. Long lines are cut."""
    lines = text.split("\n", count)
    cut = [line if len(line) <= 400 else f"{line[:400]} …" for line in lines[:count]]
    return "\n".join(cut)
