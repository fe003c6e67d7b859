"""What a user does with the real planner on Llama-3-8B: look, pin, solve again, see what changed, leave with a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import expect

from tests.browser.conftest import Tab

WQ = "layers.0.attention.wq/linear/fwd#0"
SOLVE_MS = 180_000


def open_wq(tab: Tab) -> None:
    """Layer 0, attention, wq, click by click."""
    tab.box("layers.0 … layers.31 ×32").click()
    tab.box("attention,").first.click()
    tab.box("wq,").first.click()
    tab.page.locator(f'.box.op.selected[data-key="{WQ}"]').wait_for()
    tab.page.get_by_text(WQ, exact=True).first.wait_for()


def pin_all_layers(tab: Tab, placement: str) -> None:
    tab.legal()
    tab.choose(placement)
    tab.radio("all layers")
    tab.press("Pin 32")
    tab.page.locator(f'.box.op.pinned[data-key="{WQ}"]').wait_for()


def other_placement(tab: Tab) -> str:
    """One that the plan does not have now."""
    names = tab.page.locator("[class*='st-key-place']").get_by_role("radio").all_inner_texts()
    return next(name for name in ("S(0)S(2)", "S(0)R", "S(0)S(1)") if name in names)


def test_pin_wq_in_all_layers_solve_again_compare_and_export(tab: Tab, server: str, tmp_path: Path):
    tab.open(server)
    open_wq(tab)
    tab.legal()
    placement = other_placement(tab)
    pin_all_layers(tab, placement)
    tab.page.get_by_text("stale: 1 pin changed").wait_for()

    start = time.perf_counter()
    tab.press("Re-solve")
    tab.page.locator(f'.box.changed[data-key="{WQ}"]').wait_for(timeout=SOLVE_MS)
    print(f"\npin to new plan {time.perf_counter() - start:.1f} s")
    assert re.fullmatch(r"linear, .*, was .*", tab.page.locator(f'[data-key="{WQ}"]').get_attribute("aria-label"))
    tab.page.get_by_text("base plan").first.wait_for()
    assert tab.page.get_by_text("stale:").count() == 0
    tab.radio("Changes")
    tab.page.get_by_text(re.compile(r"tensors changed")).wait_for()
    tab.page.get_by_text("layers.*.attention.wq/linear/fwd#0").wait_for()

    tab.radio("Export")
    start = time.perf_counter()
    tab.press("Write and check")
    tab.page.get_by_text(re.compile(r"^(Checks|Dismiss)$")).first.wait_for(timeout=900_000)
    assert tab.page.get_by_role("button", name="Dismiss").count() == 0, tab.page.locator("[class*=st-key-error]").inner_text()
    print(f"write and check {time.perf_counter() - start:.1f} s")
    for name, file in (("Download train.py", "train.py"), ("Download plan", "train.plan.json")):
        with tab.page.expect_download() as download:
            tab.press(name)
        download.value.save_as(tmp_path / file)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    dry_run = [sys.executable, "train.py", "--dry-run"]
    done = subprocess.run(dry_run, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0 and "PASS" in done.stdout, done.stdout + done.stderr

    tab.page.reload()  # a refresh keeps plan, base and pins
    tab.page.locator(f'.box.op.pinned.changed[data-key="{WQ}"]').wait_for(timeout=60_000)
    tab.page.get_by_text("Pins (1)").wait_for()


def test_pins_that_cannot_hold_together_are_named_and_nothing_is_lost(tab: Tab, server: str):
    tab.open(server)
    tab.find(WQ)
    tab.legal()
    tab.choose(other_placement(tab))
    tab.press("Pin 1")
    tab.page.get_by_text("Pins (").wait_for()
    tab.page.get_by_text("stale:").wait_for()
    tab.radio("glob")
    tab.page.get_by_role("textbox", name="Glob").fill("layers.0.attention.w*")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("button", name="Pin 4").wait_for()
    tab.choose("RR")
    tab.press("Pin 4")
    tab.page.locator(".box.op.pinned").first.wait_for()
    tab.press("Re-solve")
    tab.page.get_by_role("button", name="Dismiss").wait_for(timeout=SOLVE_MS)
    tab.press("Dismiss")
    assert tab.page.locator(".box.op.pinned").count() > 0
    tab.page.get_by_text("stale:").wait_for()
    tab.press("Clear")
    tab.page.get_by_text("Pins (0)").wait_for()
    tab.press("Undo")
    tab.page.locator(".box.op.pinned").first.wait_for()


def test_setup_says_what_is_wrong_before_anything_runs(tab: Tab, server: str):
    tab.open(server)
    tab.page.get_by_role("link", name="Setup").click()
    field = tab.page.get_by_label("Mesh axes, outermost first")
    field.fill("dp8,tp=8")
    field.press("Enter")
    tab.page.get_by_text("is not axis=size").wait_for()
    assert tab.page.get_by_role("button", name="Trace and solve").is_disabled()
    field.fill("dp=8,tp=8")
    field.press("Enter")
    tab.page.get_by_label("Global batch, sequences").fill("12")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_text("Nearest batch sizes").wait_for()


def test_an_unknown_model_is_an_error_and_the_next_one_is_planned(tab: Tab, server: str):
    tab.open(server)
    tab.page.get_by_role("link", name="Setup").click()
    custom = tab.page.get_by_label("Or your own model")
    custom.fill("llama9-900b")
    custom.press("Enter")
    tab.page.get_by_label("Mesh axes, outermost first").fill("dp=2,tp=2")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_text("4 devices, global batch 64").wait_for()
    tab.settled()
    tab.press("Trace and solve")
    tab.page.get_by_text("There is no model 'llama9-900b'").wait_for(timeout=60_000)
    tab.settled()
    tab.press("Dismiss")
    tab.page.get_by_text("There is no model 'llama9-900b'").wait_for(state="hidden")
    tab.settled()
    expect(custom).to_have_count(1, timeout=60_000)  # a run under way shows a moment of the old page beside the new one
    expect(custom).to_have_value("llama9-900b", timeout=60_000)
    custom.fill("")
    custom.press("Enter")
    tab.page.get_by_role("combobox", name=re.compile("Sample model")).click()
    tab.page.get_by_role("option", name="llama3-tiny").click()
    tab.page.get_by_text("the Llama 3 structure with small sizes").wait_for()
    tab.settled()
    tab.press("Trace and solve")
    tab.page.get_by_text(re.compile("llama3-tiny / plan")).wait_for(timeout=SOLVE_MS)
    tab.page.locator(".box.module").first.wait_for()
