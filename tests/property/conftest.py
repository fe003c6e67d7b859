"""Time limits of solves speak of solving: what is compiled just in time is compiled before the first of them."""

from __future__ import annotations

import pytest

from planner.solving import message_passing


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    message_passing.warm_up()
