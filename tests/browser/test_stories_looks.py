"""How the pages look: nothing runs over the edge, all text can be read, in both themes, on wide and narrow screens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.view_models.report import report
from planner import Pin, hardware_profile
from tests.app.synthetic import WQ, make_plan, small_graph
from tests.browser.conftest import SmallServer, Tab

MEASURES = (Path(__file__).parent / "measures.js").read_text(encoding="utf-8")
LAST = {
    "": ".box.op.selected", "communication": ".st-key-comm_heat .main-svg", "memory": ".st-key-mem_saved_module .main-svg",
    "compare": ".st-key-swap", "export": ".st-key-upload", "setup": ".st-key-start",
}  # fmt: skip
"""Page -> what is drawn late on it."""
WIDTHS = (1280, 900, 2560)


def measured(tab: Tab) -> dict[str, Any]:
    return dict(tab.page.evaluate(MEASURES))


@pytest.mark.parametrize("dark", [False, True])
def test_every_page_fits_and_can_be_read(new_tab: Callable[..., Tab], small: SmallServer, tmp_path: Path, dark: bool):
    """Text against its ground at least 4.5:1 (3:1 if large), as WCAG 2 has it; canvases and text on bars are not measured."""
    tab = new_tab(dark=dark, width=WIDTHS[0])
    problems = []
    for page, last in LAST.items():
        tab.page.goto(small.link(page, op=WQ))
        tab.page.locator(last).first.wait_for()
        tab.settled()
        for width in WIDTHS:
            tab.page.set_viewport_size({"width": width, "height": 950})
            tab.page.wait_for_function("width => document.documentElement.clientWidth <= width", arg=width)
            found = measured(tab)
            problems += [
                f"{page or 'explorer'} at {width}: {kind} {what}" for kind in ("faint", "outside") for what in found[kind]
            ]
            assert found["overflow"] <= 0, (page, width)
        tab.page.screenshot(path=tmp_path / f"{page or 'explorer'}.png")
        tab.page.set_viewport_size({"width": WIDTHS[0], "height": 950})
    assert problems == []


@pytest.mark.parametrize("dark", [False, True])
def test_the_report_is_read_offline_in_both_themes_and_on_paper(new_tab: Callable[..., Tab], tmp_path: Path, dark: bool):
    graph = small_graph()
    base = make_plan(graph)
    plan = make_plan(graph, pins=(Pin.parse("layers.*.attention.wq=S(0)R # kernel needs it", base.mesh),))
    text = report(plan, base, hardware_profile(plan.hardware_name))
    assert len(text.encode()) < 2_000_000
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    tab = new_tab(dark=dark, width=900)
    tab.page.context.set_offline(True)
    tab.page.goto((tmp_path / "report.html").as_uri())
    tab.page.get_by_text("Where this comes from").wait_for()
    for medium in ("screen", "print"):
        tab.page.emulate_media(media=medium)
        assert measured(tab) == {"faint": [], "outside": [], "overflow": 0}, medium
    tab.page.locator("summary").click()
    tab.page.get_by_text("node.link_bytes_per_s").wait_for()


def test_the_measures_see_what_is_wrong(tab: Tab, small: SmallServer):
    """Faint text and text beyond the edge, put into a real page."""
    tab.page.goto(small.link("export"))
    tab.page.locator(LAST["export"]).wait_for()
    tab.page.evaluate(
        """() => {
          const add = (style, text) => Object.assign(document.body.appendChild(document.createElement("p")), {textContent: text}).style.cssText = style;
          add("position: fixed; top: 0; left: 0; color: #999; background: #fff", "grey on white");
          add("position: fixed; top: 40px; left: 0; color: #000; opacity: 0.4; background: #fff", "half gone");
          add("position: fixed; top: 80px; right: -60px; color: #000; background: #fff", "beyond the edge");
        }"""  # noqa: E501
    )
    found = measured(tab)
    assert any("grey on white" in text for text in found["faint"]) and any("half gone" in text for text in found["faint"])
    assert any("beyond the edge" in text for text in found["outside"])
