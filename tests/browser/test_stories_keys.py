"""Without a mouse and without looking: the graph by keys, and what a screen reader finds on each page."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.app.synthetic import WQ
from tests.browser.conftest import SmallServer, Tab

FOCUS = """() => {
  let at = document.activeElement;
  while (at?.shadowRoot?.activeElement) at = at.shadowRoot.activeElement;
  return at;
}"""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, [role=combobox], [role=radio], a[href]")]
  .filter((e) => e.checkVisibility() && !e.closest("[aria-hidden=true], .js-plotly-plot, [data-testid=stDataFrame]"))
  .filter((e) => ![e.getAttribute("aria-label"), e.getAttribute("title"), e.innerText, e.textContent, e.value,
    ...[...(e.labels ?? [])].map((l) => l.innerText), e.getAttribute("aria-labelledby"), e.placeholder].some((t) => t?.trim()))
  .map((e) => e.outerHTML.slice(0, 160))"""


def focused(tab: Tab, attribute: str) -> str:
    return str(tab.page.evaluate(f"() => ({FOCUS})()?.getAttribute('{attribute}') ?? ''"))


def test_the_graph_is_walked_opened_searched_and_pinned_by_keys_alone(tab: Tab, small: SmallServer):
    keys = tab.page.keyboard
    tab.open(small.link())
    tab.settled()
    keys.press("/")
    assert "find" in focused(tab, "aria-label").lower()
    keys.type("layers.0.attention.wq/linear/fwd")
    keys.press("Enter")
    tab.page.locator(f'.box.op.selected[data-key="{WQ}"]').wait_for()
    keys.press("Escape")  # from the search into the graph
    assert focused(tab, "role") == "application"
    keys.press("ArrowUp")
    assert re.search(r"cast|weight|wq", focused(tab, "aria-label"))
    keys.press("ArrowDown")
    assert re.match("linear", focused(tab, "aria-label"))
    keys.press("Enter")
    tab.page.locator(f'.box.op.selected[data-key="{WQ}"]').wait_for()
    tab.legal()
    keys.press("p")
    assert tab.page.evaluate(f"() => ({FOCUS})().closest('.st-key-panel') !== null"), "the focus is at the pin control"
    tab.page.locator(".canvas").focus()
    keys.press("Escape")
    expect(tab.page.locator(".box.op.selected")).to_have_count(0)
    keys.press("Home")
    expect(tab.page.get_by_role("button", name="layers.0 … layers.3 ×4")).to_be_visible()


def test_a_box_says_what_it_is(tab: Tab, small: SmallServer):
    tab.open(small.link(op=WQ))
    box = tab.page.locator(f'.box.op[data-key="{WQ}"]')
    box.wait_for()
    assert box.get_attribute("role") == "button"
    assert re.search(r"linear, S\(0\) on dp, S\(1\) on tp", box.get_attribute("aria-label") or "")
    module = tab.page.locator(".box.module.open").first
    assert module.get_attribute("aria-expanded") == "true"


def test_every_page_has_landmarks_headings_names_and_a_status(tab: Tab, small: SmallServer):
    for page in ("", "communication", "memory", "compare", "export", "setup"):
        tab.page.goto(small.link(page, op=WQ))
        expect(tab.page.get_by_role("heading", level=1, name=(page or "explorer").title())).to_have_count(1)
        expect(tab.page.get_by_role("status", name="Plan status")).to_have_count(1)
        tab.settled()
        assert tab.page.locator("main, [role=main]").count() == 1, page
        assert tab.page.locator("nav, [role=navigation], header, [role=banner]").count() >= 1, page
        assert tab.page.evaluate("() => document.documentElement.lang") == "en"
        assert tab.page.evaluate(UNNAMED) == [], page
        tables = tab.page.locator(".px table:has(th)")
        for number in range(tables.count()):
            assert tables.nth(number).locator("tr").first.locator("th").count() > 0
