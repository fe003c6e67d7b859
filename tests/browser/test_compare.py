"""Compare and Export in a real browser, with a made-up planner: recipe, marks in the graph, sweep, report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Tab


def go(tab: Tab, name: str) -> None:
    tab.page.get_by_role("link", name=name, exact=True).click()
    tab.settled()


def test_a_recipe_is_priced_compared_and_marked_in_the_graph(tab: Tab, quick_server: str):
    tab.open(quick_server)
    go(tab, "Compare")
    tab.press(re.compile("^Price recipe"))
    tab.page.get_by_text("Step time by module").wait_for(timeout=60_000)
    assert re.search(r"[▲▼] [+-]", tab.page.get_by_role("group", name="B minus A").inner_text())
    tab.page.get_by_role("button", name="Mark the differences in the graph").click()
    tab.page.locator(".box.module").first.wait_for(timeout=60_000)
    tab.page.get_by_text(re.compile("^base plan")).first.wait_for()


def test_a_sweep_fills_its_table_and_a_point_opens_its_plan(tab: Tab, quick_server: str):
    tab.open(quick_server)
    go(tab, "Compare")
    tab.radio("Mesh sweep")
    tab.press("Sweep 6 meshes")
    tab.page.get_by_text("Fastest first").wait_for(timeout=60_000)
    tab.page.get_by_role("button", name="Begin anew").wait_for()
    tab.settled()
    tab.page.locator(".js-plotly-plot .point").first.click(force=True)
    opening = tab.page.get_by_role("button", name=re.compile("^Open the plan of dp="))
    mesh = opening.inner_text().removeprefix("Open the plan of ").strip()
    opening.click()
    tab.page.locator(".box.module").first.wait_for(timeout=60_000)
    go(tab, "Setup")
    expect(tab.page.get_by_label("Mesh axes, outermost first")).to_have_value(mesh)


@pytest.mark.parametrize("dark", [False, True])
def test_the_report_is_shown_and_reads_alone(new_tab: Any, quick_server: str, tmp_path: Path, dark: bool):
    tab = new_tab(dark=dark, width=1280)
    tab.open(quick_server)
    go(tab, "Export")
    tab.radio("HTML report")
    tab.page.frame_locator("iframe").get_by_text("Where this comes from").wait_for(timeout=60_000)
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing reaches beyond the page"
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name=re.compile(r"^Download .*\.html$")).click()
    download.value.save_as(tmp_path / "report.html")
    tab.page.goto((tmp_path / "report.html").as_uri())
    tab.page.get_by_text("Where this comes from").wait_for()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
