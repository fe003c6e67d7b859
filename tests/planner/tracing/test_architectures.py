"""Architectures of transformers at published widths, a few layers deep: traced, planned, exported, equal to the library's own."""

from __future__ import annotations

import pytest

from tests.benchmarks.architectures import CASES, Case, run


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_an_architecture_is_traced_planned_and_exported(case: Case) -> None:
    found = run(case, export=True, limit_s=900)
    assert "failed" not in found, found["failed"]
    assert found["replicated"] == {}
    assert found["exports"] <= 1e-4
