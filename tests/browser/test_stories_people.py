"""Several people, and a server that dies: nobody sees or loses what is not theirs to see or to lose."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import expect

from tests.app.synthetic import WQ
from tests.browser.conftest import SmallServer, Tab


def pin(tab: Tab, placement: str, *, everywhere: bool) -> None:
    """At what is selected."""
    tab.legal()
    tab.choose(placement)
    if everywhere:
        tab.radio("all layers")
    tab.press(re.compile(r"^Pin \d+$"))


def pins_are(tab: Tab, count: int) -> None:
    expect(tab.page.get_by_text(f"Pins ({count})")).to_be_visible(timeout=60_000)


def named(tab: Tab) -> dict[str, str]:
    """What the address bar says."""
    return {name: values[0] for name, values in parse_qs(urlsplit(tab.page.url).query).items()}


def plan_name(tab: Tab) -> str:
    found = re.search(r"/ plan (\w+)", tab.page.get_by_role("status", name="Plan status").inner_text())
    assert found
    return found[1]


def test_two_people_work_on_one_project_without_meeting(new_tab: Callable[..., Tab], small: SmallServer):
    ann, bob = new_tab(), new_tab()
    for who in (ann, bob):
        who.open(small.link(op=WQ))
        pins_are(who, 0)
    pin(ann, "S(0)R", everywhere=True)
    pins_are(ann, 1)
    ann.page.locator(f'.box.op.pinned[data-key="{WQ}"]').wait_for()
    before = plan_name(ann)
    ann.press("Re-solve")
    ann.page.get_by_text(f"base plan {before}").first.wait_for()

    bob.settled()
    pins_are(bob, 0)
    assert plan_name(bob) == before and bob.page.locator(".box.op.pinned").count() == 0
    pin(bob, "RR", everywhere=False)
    pins_are(bob, 1)
    assert named(ann)["draft"] != named(bob)["draft"] and named(ann)["project"] == named(bob)["project"]

    ann.page.reload()
    ann.page.locator(f'.box.op.pinned.changed[data-key="{WQ}"]').wait_for(timeout=60_000)
    pins_are(ann, 1)
    assert "S(0)R" in ann.page.locator(".st-key-pins").inner_text().replace("\n", "").replace(" ", "")


def test_a_link_to_somebody_elses_draft_opens_a_copy(new_tab: Callable[..., Tab], small: SmallServer):
    ann, bob = new_tab(), new_tab()
    ann.open(small.link(op=WQ))
    pin(ann, "S(0)R", everywhere=True)
    pins_are(ann, 1)
    ann.settled()
    link = ann.page.url

    bob.open(link)
    pins_are(bob, 1)  # sees what was sent
    bob.press("Clear")
    pins_are(bob, 0)
    bob.settled()
    assert named(bob)["draft"] != named(ann)["draft"]
    ann.page.reload()
    ann.page.locator(f'.box.op.pinned[data-key="{WQ}"]').wait_for(timeout=60_000)
    pins_are(ann, 1)
    assert ann.page.url == link


def test_a_killed_server_comes_back_with_plan_pins_and_undo(tab: Tab, small: SmallServer):
    tab.open(small.link(op=WQ))
    pin(tab, "S(0)R", everywhere=True)
    pins_are(tab, 1)
    base = plan_name(tab)
    tab.press("Re-solve")
    tab.page.get_by_text(f"base plan {base}").first.wait_for()
    tab.press("Clear")
    pins_are(tab, 0)
    tab.page.get_by_text("stale: 1 pin changed").wait_for()
    tab.settled()
    plan, address = plan_name(tab), tab.page.url

    small.kill()
    small.start()
    tab.page.goto(address)
    tab.page.get_by_text("stale: 1 pin changed").wait_for(timeout=60_000)
    assert plan_name(tab) == plan and tab.page.get_by_text(f"base plan {base}").first.is_visible()
    pins_are(tab, 0)
    tab.page.locator(f'.box.op.selected[data-key="{WQ}"]').wait_for()
    tab.press("Undo")  # of what was done before the crash
    tab.page.locator(f'.box.op.pinned[data-key="{WQ}"]').wait_for()
    pins_are(tab, 1)


def test_undo_and_redo_move_the_marks_of_the_graph(tab: Tab, small: SmallServer):
    tab.open(small.link(op=WQ))
    pin(tab, "S(0)R", everywhere=False)
    pinned = tab.page.locator(f'.box.op.pinned[data-key="{WQ}"]')
    pinned.wait_for()
    expect(tab.page.get_by_role("button", name="Redo")).to_be_disabled()
    tab.press("Undo")
    expect(pinned).to_have_count(0)
    expect(tab.page.get_by_role("button", name="Undo")).to_be_disabled()
    tab.press("Redo")
    pinned.wait_for()
    tab.page.reload()  # and the history is kept
    pinned.wait_for(timeout=60_000)
    tab.press("Undo")
    expect(pinned).to_have_count(0)


def test_a_link_names_plan_and_op_and_survives_a_walk_through_the_pages(tab: Tab, small: SmallServer):
    op = "layers.2.attention.wo/linear/fwd#0"
    tab.open(small.link(op=op))
    tab.page.locator(f'.box.op.selected[data-key="{op}"]').wait_for()
    tab.page.get_by_text(op, exact=True).first.wait_for()
    for page in ("Memory", "Compare", "Explorer"):
        tab.page.get_by_role("link", name=page, exact=True).click()
        expect(tab.page).to_have_url(re.compile(f"/{page.lower() if page != 'Explorer' else ''}\\?"), timeout=60_000)
        tab.settled()
        assert named(tab)["op"] == op
    tab.page.locator(f'.box.op.selected[data-key="{op}"]').wait_for()
