"""Below the pin form: what each placement would cost, and why. Filled by the worker while the page stays free."""

from __future__ import annotations

import streamlit as st

from app import asking, state
from app.components import answers as html
from app.components.markup import plain
from app.components.pulse import pulse
from app.jobs import Job
from app.view_models import prices
from app.view_models.setup_form import describe
from app.views.problems import show_error
from planner import Pin


def draw(key: str, where: str, options: tuple[str, ...], now: str, placement: str) -> None:
    """`key` is the tensor, `where` what would be pinned, `placement` the one that is picked of the legal `options`.

    A fragment of its own: while the answers come in, nothing else is drawn again.
    """
    found = state.session()
    document = found.document
    if document is None:
        return
    st.markdown(f"**If pinned to** · {plain(key) if where == key else plain(where)}")
    if found.running is not None:
        st.caption("The prices follow when the running job has ended.")
        return
    job = asking.prices(found, where)
    job.wait(0.1)
    known = tuple(job.result) if job.state == "done" else tuple(job.rows)
    if job.error is not None:
        st.caption(plain(describe(job.error)))
    else:
        st.html(html.price_table(*prices.first_rows(prices.price_rows(known, options), placement)))
        st.caption(
            f"Step and memory per device against plan {document.plan.plan_id[:7]}, re-solved: everything else may move."
            + (f" {len({o.placements for o in known})} of {len(options)} so far." if job.active else "")
        )
    waiting = [job, _why(found, key, where, now, placement)]
    if any(one is not None and one.active for one in waiting):
        pulse(f"answers {key}")


def _why(found: state.Session, key: str, where: str, now: str, placement: str) -> Job | None:
    """The button, and the answer below it. Returns its job if it was asked."""
    asked = (where, placement)
    is_now = placement == now
    label = "Why this?" if is_now else f"Why not {placement}?"
    if found.why != asked and st.button(label, key="why", help="What pays for the difference, part by part."):
        found.why = asked
    if found.why != asked or found.document is None:
        return None
    if is_now:
        job = asking.local_prices(found, key)
    else:
        job = asking.why(found, where, Pin.parse(f"{where}={placement}", found.document.plan.mesh).placements)
    job.wait(0.1)
    if job.active:
        st.caption(f"{plain(label)} Comparing plans, {job.seconds:.0f} s.")
    elif job.error is not None:
        if show_error(job.error, key="why"):
            found.why = None
            st.rerun()
    elif job.result is not None:
        _answer(job, label, is_now=is_now)
    return job


def _answer(job: Job, label: str, *, is_now: bool) -> None:
    with st.container(border=True, key="why_answer"):
        st.markdown(f"**{plain(label)}**")
        if is_now:
            st.html(html.local_table(prices.local_rows(job.result)))
            st.caption(
                "At this op alone while all others stay as they are: its work, bringing its inputs, passing its result on. The "
                "cheapest here need not be the best for the whole step: the table above re-solves."
            )
        else:
            st.html(html.why(prices.why(job.result)))
            st.caption("Parts of the difference in step time; ×N are equal changes of repeated layers.")
