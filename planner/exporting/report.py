"""What was checked before an exported file was handed out, in lines to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "check": "against its own single-rank run",
    "reference": "against the model itself",
    "recipe": "in fp32 against the model itself",
}


def report_lines(report: Mapping[str, Any]) -> tuple[str, ...]:
    """`Export.report` -> one check a line, then what was not run."""
    label = (str(report["label"]), *(f"differs: {note}" for note in report.get("differs", ()))) if "label" in report else ()
    if report.get("passed") is None:
        return (*label, "not checked")
    found = [*label, *(f"at full size, {line}" for line in report.get("dry_run", ()))]
    numbers = report.get("numbers", {})
    if isinstance(numbers, str):
        found.append(numbers)
    else:
        found += [_comparison(_NAMES[name], values) for name, values in numbers.items()]
    return (*found, f"took {report['seconds']:.0f} s", f"not run here: {report['not_run']}")


def _comparison(name: str, values: Mapping[str, Any]) -> str:
    return (
        f"{name}, mesh ({values['mesh']}): loss differs by {values['loss_difference']:.1e}, "
        f"{values['gradients']} gradients by at most {values['largest_error']:.1e}, collectives {values['counts']}"
    )
