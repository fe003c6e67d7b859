"""Communication and Memory in a real browser: clicks in charts reach the page, and nothing runs over the edge."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Tab


def test_a_click_in_the_icicle_filters_and_leads_on_to_the_explorer(tab: Tab, quick_server: str):
    page = tab.page
    page.goto(f"{quick_server}/communication?op=output/linear/fwd%230")
    page.get_by_text("Hotspots", exact=True).wait_for(timeout=60_000)
    tab.settled()
    assert page.get_by_role("button", name="Clear filter").is_disabled()
    page.locator("[class*=st-key-comm_icicle] g.slice").nth(2).click()
    page.locator(".st-key-comm_clear button:not([disabled])").wait_for()
    tab.settled()
    tab.press("Show in Explorer")
    page.locator(".box.op.selected").wait_for()
    assert "op=output" in page.url


@pytest.mark.parametrize("dark", [False, True])
def test_both_pages_fit_the_narrowest_screen(new_tab, quick_server: str, dark: bool):
    tab = new_tab(dark=dark, width=1280)
    for name, last in (("communication", "Hotspots"), ("memory", "Who holds what")):
        tab.page.goto(f"{quick_server}/{name}")
        tab.page.get_by_text(last, exact=True).wait_for(timeout=60_000)
        tab.settled()
        tab.page.locator(".js-plotly-plot .main-svg").nth(2).wait_for(timeout=60_000)
        assert tab.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
