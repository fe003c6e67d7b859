"""What was checked before an exported file is handed out, in lines to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {"check": "against its own single-rank run", "reference": "against the model itself"}


def lines(report: Mapping[str, Any]) -> tuple[str, ...]:
    """One check a line, then what was not run."""
    if report.get("passed") is None:
        return ("Not checked.",)
    found = [f"at full size, {line}" for line in report.get("dry_run", ())]
    numbers = report.get("numbers", {})
    if isinstance(numbers, str):
        found.append(numbers)
    else:
        found += [_comparison(NAMES.get(name, name), values) for name, values in numbers.items()]
    if "seconds" in report:
        found.append(f"took {report['seconds']:.0f} s")
    if report.get("not_run"):
        found.append(f"not run here: {report['not_run']}")
    return tuple(found)


def _comparison(name: str, values: Mapping[str, Any]) -> str:
    return (
        f"{name}, mesh ({values['mesh']}): loss differs by {values['loss_difference']:.1e}, "
        f"{values['gradients']} gradients by at most {values['largest_error']:.1e}, collectives {values['counts']}"
    )
