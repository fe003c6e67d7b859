"""What the search for a proof came to: the plan to go on with, and a sentence about it."""

from __future__ import annotations

from dataclasses import replace

from planner import Plan

SAME = 1e-6
"""Relative difference of objectives below which one plan is as good as another; the planner calls a plan optimal to the same."""


def gap_text(plan: Plan) -> str:
    """`within 0.6 %`"""
    return f"within {100 * plan.report.gap:.2g} %"


def settle(shown: Plan, found: Plan) -> tuple[Plan, str]:
    """`shown` is the first answer, `found` what a longer search for the same pins gave. -> (plan to show, note)

    The first answer stays, with the better bound, unless the other plan is really better.
    """
    saved_us = shown.objective_us - found.objective_us
    if saved_us > SAME * shown.objective_us:
        proof = "it is proved optimal" if found.report.status == "optimal" else f"it is proved {gap_text(found)}"
        return found, f"A plan that is {saved_us / 1e3:,.2f} ms faster replaced the first answer; {proof}."
    bound_us = min(shown.objective_us, max(shown.report.bound_us, found.report.bound_us))
    proved = shown.objective_us - bound_us <= SAME * shown.objective_us
    report = replace(
        shown.report, bound_us=bound_us, status="optimal" if proved else shown.report.status, method=found.report.method,
        seconds=shown.report.seconds + found.report.seconds,
    )  # fmt: skip
    plan = replace(shown, report=report)
    return plan, "The plan is proved optimal." if proved else f"The search ended without a full proof: {gap_text(plan)}."
