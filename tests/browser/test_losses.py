"""The end of every job reaches the page, whatever Streamlit loses on the way and whatever is clicked meanwhile."""

from __future__ import annotations

from tests.browser.conftest import Tab

WQ = "layers.0.attention.wq/linear/fwd#0"
CAST = "layers.0.attention.wq/cast/fwd#0"


def solve_with(tab: Tab, placement: str) -> None:
    tab.legal()
    tab.choose(placement)
    tab.press("Pin 1")
    tab.page.get_by_text("stale:").wait_for()
    tab.settled()
    tab.press("Re-solve")


def solved(tab: Tab, placement: str) -> None:
    """Graph, strip and panel show the new plan."""
    tab.page.locator(f'.box.changed[data-key="{WQ}"]').wait_for()
    tab.page.get_by_text("stale:").wait_for(state="hidden")
    tab.page.get_by_role("radio", name=f"{placement} (now)").wait_for()


def test_a_late_event_loop_loses_nothing(tab: Tab, late_server: str):
    tab.open(late_server)
    tab.find(WQ)
    for placement in ("S(0)R", "RR", "S(0)S(1)"):
        solve_with(tab, placement)
        solved(tab, placement)
    tab.press("Clear")
    tab.page.get_by_text("Pins (0)").wait_for()
    tab.press("Undo")
    tab.page.get_by_text("Pins (1)").wait_for()
    tab.radio("Export")
    tab.press("Write and check")
    tab.page.get_by_text("Checks", exact=True).wait_for()


def test_short_jobs_with_clicks_meanwhile(tab: Tab, quick_server: str):
    tab.open(quick_server)
    tab.find(WQ)
    for placement in ("S(0)R", "RR", "S(0)R", "RR"):
        solve_with(tab, placement)
        for key in (CAST, WQ):
            tab.page.locator(f'.box.op[data-key="{key}"]').click()
        solved(tab, placement)
