"""Which tests run in one process, if several share the work."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

BROWSER = "tests/browser/"


class InFiles(LoadScopeScheduling):
    """Tests of one file share what is dear to make (traces, plans, servers); one real browser at a time is enough."""

    def _split_scope(self, nodeid: str) -> str:
        return BROWSER if nodeid.startswith(BROWSER) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return InFiles(config, log)
