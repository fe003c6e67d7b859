"""Time limits of solves speak of solving: what is compiled just in time is compiled before the first of them."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_before(compiled: None) -> None:
    """See `compiled`."""
