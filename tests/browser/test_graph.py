"""The plan graph in a real browser, on the shipped Llama-3-8B plan. Nothing here asks a worker for anything."""

from __future__ import annotations

import re
import time

import pytest

from tests.browser.conftest import Tab

WQ = "layers.0.attention.wq/linear/fwd#0"
LINK = "/?op=layers.17.attention.wq/linear/fwd%230"


def test_the_overview_is_small_and_layers_are_one_box(tab: Tab, quick_server: str):
    tab.open(quick_server)
    assert tab.page.locator(".box").count() < 25
    assert tab.box("layers.0 … layers.31 ×32").is_visible()
    assert tab.box("forward").count() == 1 and tab.box("backward").count() == 1


def test_opening_a_run_opens_one_layer_and_keeps_the_rest_together(tab: Tab, quick_server: str):
    tab.open(quick_server)
    tab.box("layers.0 … layers.31 ×32").click()
    assert tab.box("layers.1 … layers.31 ×31").count() == 1
    tab.find("layers.17.attention.wq/linear/fwd")
    assert tab.box("layers.18 … layers.31 ×14").count() == 1
    assert tab.box("layers.1 … layers.16 ×16").count() == 1


def test_modules_open_and_close_without_a_rerun(tab: Tab, quick_server: str):
    tab.open(quick_server)
    tab.page.get_by_text("exposed comm").first.wait_for()  # the last that the strip hears by itself
    tab.settled()
    before = tab.received_bytes
    tab.box("layers.0 … layers.31 ×32").click()
    tab.box("attention,").first.wait_for()
    tab.page.locator('.box.module.open[data-id="forward/layers.0"]').click(position={"x": 60, "y": 12})
    tab.box("layers.0 … layers.31 ×32").wait_for()
    tab.page.wait_for_timeout(300)
    assert tab.received_bytes == before


def test_an_overview_shows_where_one_is_and_goes_elsewhere(tab: Tab, quick_server: str):
    tab.open(quick_server)
    minimap, scene = tab.page.locator(".minimap"), tab.page.locator(".scene > g")
    tab.find(WQ)
    minimap.wait_for()
    seen = [float(tab.page.locator(".minimap .seen").get_attribute(name) or 0) for name in ("y", "height")]
    box = tab.page.locator(".box.op.selected").bounding_box()
    frame = minimap.bounding_box()
    assert box is not None and frame is not None
    before = scene.get_attribute("transform")
    minimap.click(position={"x": frame["width"] / 2, "y": frame["height"] - 4})
    assert scene.get_attribute("transform") != before
    assert float(tab.page.locator(".minimap .seen").get_attribute("y") or 0) > seen[0] + seen[1], (
        "the end of the graph is seen now"
    )
    assert tab.page.locator(".box.op.selected").get_attribute("data-key") == WQ, "moving the camera selects nothing"
    assert tab.page.locator(".minimap .part.selected").count() == 1


def test_a_link_opens_centres_and_selects(tab: Tab, quick_server: str):
    tab.open(quick_server + LINK)
    tab.page.locator(".box.op.selected").wait_for()
    assert tab.page.locator(".box.op.selected").get_attribute("data-key") == "layers.17.attention.wq/linear/fwd#0"
    tab.page.get_by_text("layers.17.attention.wq/linear/fwd#0", exact=True).first.wait_for()


def test_search_reaches_hidden_views_and_says_when_nothing_matches(tab: Tab, quick_server: str):
    tab.open(quick_server)
    tab.find("layers.3.attention/view/fwd#0")
    assert not tab.page.get_by_label("hide views").is_checked()
    tab.page.get_by_label("Find op, module or placement").fill("no such op")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_text('Nothing matches "no such op"').wait_for()


def test_keys(tab: Tab, quick_server: str):
    tab.open(quick_server)
    tab.page.locator(".canvas").focus()
    tab.page.keyboard.press(".")
    tab.page.locator(".box.op.selected").wait_for()
    first = tab.page.locator(".box.op.selected").get_attribute("data-key")
    tab.page.keyboard.press(".")
    tab.page.locator(f'.box.op.selected:not([data-key="{first}"])').wait_for()
    tab.page.keyboard.press("Escape")
    assert tab.page.locator(".box.op.selected").count() == 0
    tab.page.keyboard.press("Home")
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("?")
    tab.page.get_by_text("next, previous redistribution").wait_for()
    tab.page.keyboard.press("/")
    assert tab.page.evaluate("() => document.activeElement.shadowRoot?.activeElement?.className") == "search"


def test_the_graph_can_be_walked_and_opened_by_keyboard_alone(tab: Tab, quick_server: str):
    tab.open(quick_server)
    tab.page.locator(".canvas").focus()
    for _ in range(12):
        tab.page.keyboard.press("ArrowDown")
        tab.page.wait_for_timeout(30)
        if tab.page.evaluate("() => document.activeElement.shadowRoot.activeElement?.dataset.id") == "run:forward/layers.0":
            break
    tab.page.keyboard.press("Enter")
    tab.box("layers.1 … layers.31 ×31").wait_for()


def test_shift_click_selects_several(tab: Tab, quick_server: str):
    tab.open(quick_server + "/?op=layers.0.attention.wq/linear/fwd%230")
    tab.page.locator(".box.op.selected").wait_for()
    tab.page.locator('.box.op[data-key="layers.0.attention.wq/cast/fwd#0"]').click(modifiers=["Shift"])
    tab.page.get_by_text("2 ops selected").wait_for()


def test_the_box_limit_refuses_and_says_so(tab: Tab, quick_server: str):
    tab.open(quick_server)
    tab.page.get_by_label("group layers").uncheck()
    tab.page.locator('.box.module[data-id="backward"]').focus()
    tab.page.keyboard.press("e")
    tab.page.get_by_text("Open a smaller module").wait_for()
    assert tab.page.locator(".box").count() <= 1500


@pytest.mark.parametrize("dark", [False, True])
def test_text_on_boxes_has_contrast_in_both_themes(new_tab, quick_server: str, dark: bool):
    tab = new_tab(dark=dark)
    tab.open(quick_server)
    colours = tab.page.evaluate(
        """() => {
          const root = [...document.querySelectorAll('*')].find((e) => e.shadowRoot?.querySelector('.plan-graph')).shadowRoot;
          const name = getComputedStyle(root.querySelector('.module .name')).fill;
          return [name, getComputedStyle(root.querySelector('.module .frame')).fill];
        }"""
    )
    text, ground = ([int(float(part)) for part in re.findall(r"[\d.]+", colour)[:3]] for colour in colours)
    assert contrast(text, ground) > 4.5
    assert (sum(ground) < 300) is dark


def contrast(a: list[int], b: list[int]) -> float:
    """WCAG 2 contrast ratio of two sRGB colours."""

    def luminance(colour: list[int]) -> float:
        linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [1280, 1920, 2560])
def test_nothing_runs_over_the_edge(new_tab, quick_server: str, width: int):
    tab = new_tab(width=width)
    tab.open(quick_server + LINK)
    tab.page.locator(".box.op.selected").wait_for()
    assert tab.page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_a_table_row_selects_like_a_click(tab: Tab, quick_server: str):
    tab.open(quick_server)
    tab.page.get_by_text("Op table").click()
    table = tab.page.locator("[data-testid=stDataFrame]")
    table.wait_for()
    table.scroll_into_view_if_needed()
    table.locator("canvas").first.wait_for()
    tab.settled()
    frame = table.bounding_box()
    tab.page.mouse.click(frame["x"] + 20, frame["y"] + 52)
    tab.page.locator(".box.op.selected").wait_for()


def test_budgets(tab: Tab, quick_server: str):
    """Printed, not asserted: times of a shared machine. Payloads are asserted."""
    tab.open(quick_server)
    tab.settled()
    tab.received_bytes = 0
    warm = tab.open(quick_server)
    tab.settled()
    load_mb = tab.received_bytes / 1e6
    tab.box("layers.0 … layers.31 ×32").click()
    opened_ms = tab.page.locator(".plan-graph").get_attribute("data-draw-ms")
    tab.find(WQ)
    tab.legal()
    clicks, per_click = [], 0
    for key in ("layers.0.attention.wq/cast/fwd#0", WQ, "param:layers.0.attention.wq.weight"):
        tab.received_bytes = 0
        start = time.perf_counter()
        tab.page.locator(f'.box.op[data-key="{key}"]').click()
        tab.page.get_by_text(key, exact=True).first.wait_for()
        clicks.append(round(1000 * (time.perf_counter() - start)))
        tab.legal()
        per_click = max(per_click, tab.received_bytes)
    print(
        f"\nwarm paint {warm:.2f} s, load {load_mb:.2f} MB, open a module {opened_ms} ms, "
        f"click to inspector {sorted(clicks)[1]} ms (of {clicks}), click {per_click / 1e3:.1f} kB"
    )
    assert load_mb < 1.4 and per_click < 100_000
