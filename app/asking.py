"""Questions of the inspector and of a conflict, to the worker of the open plan. Their jobs are polled by the panels."""

from __future__ import annotations

import time
from typing import Any

from app import work
from app.jobs import Job
from app.state import Session

QUIET_S = 1.5
"""The forecast is asked for when nothing was clicked for so long."""


def follow(found: Session) -> None:
    """When the selection has moved on, nobody waits for what was asked about the box before."""
    if found.asked_about != found.selected:
        work.stop_questions(found, *work.OF_THE_INSPECTOR)
        found.questions = {question: job for question, job in found.questions.items() if job.state != "failed"}
        found.asked_about, found.why, found.touched = found.selected, None, time.monotonic()


def prices(found: Session, where: str) -> Job:
    """What pinning `where` to each legal placement would come to (`Override`s), under the constraints of the plan shown."""
    assert found.document is not None
    plan = found.document.plan
    return work.ask(found, "overrides", (where,), where, plan.constraints, plan.checkpointed)


def why(found: Session, where: str, placements: Any) -> Job:
    """Why the plan does not have these placements there (`Explanation`)."""
    assert found.document is not None
    return work.ask(found, "explain", (where, placements), found.document.plan, where, placements)


def local_prices(found: Session, key: str) -> Job:
    """What each placement costs at the op alone (`LocalPrice`s)."""
    assert found.document is not None
    return work.ask(found, "local_prices", (key,), found.document.plan, key)


def exposed(found: Session, *, may_ask: bool) -> Job | None:
    """The forecast of the plan that is open (`Exposed`): the job if it was asked for, which only happens when `may_ask`, the
    worker has nothing else to do and the user looks on: a click would wait behind it, which takes a second for a large model."""
    assert found.document is not None
    question = ("exposed", found.document.plan.plan_id)
    known = found.questions.get(question)
    wanted = may_ask and found.running is None and (known is None or known.state == "cancelled")
    if wanted and time.monotonic() - found.touched > QUIET_S and work.is_idle(found):
        return work.ask(found, "exposed", (), found.document.plan)
    return known


def give_up(found: Session, conflicts: tuple[str, ...]) -> Job:
    """What solving again would bring without each member of a conflict (`Relaxation`s)."""
    document = found.document
    assert document is not None
    demands, budget = document.history.pins, document.memory_bytes
    return work.ask(found, "give_up", (demands, budget, conflicts), demands, budget, conflicts)
