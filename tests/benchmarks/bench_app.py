"""How long the app's pages take in Chromium on the demo (Llama-3-8B, all layers) or on the last project of a workspace.

    python -m tests.benchmarks.bench_app [--repeats 3] [--seconds 100] [--workspace FOLDER]

Wall times are medians with their least value; beside them the CPU time of the server process, which a busy machine stretches
less, and the load. A warm-up round comes first; no round begins when the seconds are over. The plan is opened, ops are clicked,
a layer is opened and closed, a pin is set, another one in each round, and the plan is solved again by the real planner.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner.solving import message_passing
from tests.browser.conftest import CHROMIUM, FLAGS, ROOT, Tab, free_port, wait_for

WQ = "layers.0.attention.wq/linear/fwd#0"
WK = "layers.0.attention.wk/linear/fwd#0"
PATIENCE_MS = 600_000
BUDGETS = {
    "warm paint": 1500, "click to inspector": 300, "open a layer": 100, "close a layer": 100, "pin click to mark": 500,
    "pin to new plan": 1000,
}  # fmt: skip
"""ms of wall time on a quiet machine of two cores."""


class Meter:
    """Wall and server CPU times by name, ms."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def _cpu_ms(self) -> float:
        fields = self._stat.read_text().rpartition(")")[2].split()
        return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def measure(self, name: str, do: Callable[[], Any], settle: Callable[[], Any]) -> None:
        """`do` ends when the user sees the result; the CPU is counted until nothing runs any more."""
        cpu, start = self._cpu_ms(), time.perf_counter()
        do()
        self.wall.setdefault(name, []).append(1000 * (time.perf_counter() - start))
        settle()
        self.cpu.setdefault(name, []).append(self._cpu_ms() - cpu)

    def print(self) -> None:
        print(f"{'':22}{'budget':>9}{'median':>9}{'least':>9}   ms; {'server CPU':>10} ms")
        for name, walls in self.wall.items():
            budget = f"{BUDGETS[name]:>9}" if name in BUDGETS else f"{'':>9}"
            cpu = statistics.median(self.cpu[name])
            print(f"{name:22}{budget}{statistics.median(walls):9.0f}{min(walls):9.0f}   {'':4}{cpu:10.0f}")


@contextmanager
def serving(workspace: Path) -> Any:
    port = free_port()
    options = ["--server.port", str(port), "--", "--workspace", str(workspace)]
    command = [sys.executable, "-m", "streamlit", "run", "app/main.py", *options]
    log = workspace.parent / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield wait_for(f"http://127.0.0.1:{port}", process, log), process.pid
        finally:
            process.terminate()
            process.wait(60)


def round_of(tab: Tab, address: str, meter: Meter, number: int) -> int:
    """Bytes that the page took. `number` of the round chooses what is pinned."""
    page = tab.page

    def settled() -> None:
        page.locator("[data-test-script-state=notRunning]").wait_for()

    def paint() -> None:
        page.goto(address)
        page.locator(".box.module").first.wait_for()

    received = tab.received_bytes
    meter.measure("warm paint", paint, settled)
    payload = tab.received_bytes - received
    closed = page.locator(".box").count()

    frame = tab.box("layers.0 … ").bounding_box()
    middle = frame["x"] + frame["width"] / 2, frame["y"] + frame["height"] / 2

    def opened() -> None:
        page.mouse.click(*middle)  # as a hand does, which does not wait for the box to stand still first
        page.locator(".box").nth(closed).wait_for()

    def close() -> None:
        page.keyboard.press("Home")
        page.locator(".box").nth(closed).wait_for(state="detached")

    meter.measure("open a layer", opened, settled)
    meter.measure("close a layer", close, settled)
    tab.find(WQ)
    tab.page.get_by_text(WQ, exact=True).first.wait_for()
    tab.legal()

    def click(key: str) -> None:
        page.locator(f'.box.op[data-key="{key}"]').dispatch_event("click")  # it may lie outside of the canvas
        page.locator("code", has_text=key).first.wait_for()

    tab.find(WK)
    for key in (WQ, WK, WQ):
        meter.measure("click to inspector", lambda key=key: click(key), settled)  # type: ignore[misc]
    tab.legal()
    pin_and_solve(tab, meter, settled, number)
    return payload


def pin_and_solve(tab: Tab, meter: Meter, settled: Callable[[], None], number: int) -> None:
    page = tab.page
    names = page.locator("[class*='st-key-place']").get_by_role("radio").all_inner_texts()
    others = [name for name in ("S(0)S(2)", "S(0)R", "S(0)S(1)", "RR") if name in names]  # that of the plan is `S(0)R (now)`
    placement = others[number % len(others)]
    tab.choose(placement)
    tab.settled()

    def pin() -> None:
        tab.press("Pin 1")
        page.locator(f'.box.op.pinned[data-key="{WQ}"][aria-label*="{placement}"]').wait_for()

    def solve() -> None:
        tab.press("Re-solve")
        page.get_by_text("stale:").wait_for(state="hidden")

    meter.measure("pin click to mark", pin, settled)
    meter.measure("pin to new plan", solve, settled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=100, help="no round begins after them")
    parser.add_argument("--workspace", type=Path, help="a project in it is opened instead of the demo")
    asked = parser.parse_args()
    from playwright.sync_api import sync_playwright

    began = time.monotonic()
    message_passing.warm_up()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        workspace = asked.workspace or Path(folder) / "workspace"
        workspace.mkdir(parents=True, exist_ok=True)
        with serving(workspace) as (address, pid):
            chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
            tab = Tab(chromium.new_page(viewport={"width": 1600, "height": 950}))
            tab.page.set_default_timeout(PATIENCE_MS)
            tab.watch()
            meter = Meter(pid)
            payloads = [round_of(tab, address, meter, 0)]
            while len(payloads) <= asked.repeats and time.monotonic() - began < asked.seconds:
                if len(payloads) == 1:
                    meter = Meter(pid)  # the first round warms up, and counts only if it is the only one
                payloads.append(round_of(tab, address, meter, len(payloads)))
            rounds = f"{len(payloads) - 1} of {asked.repeats} rounds" if len(payloads) > 1 else "the first round, not warm"
            print(f"{rounds} in {time.monotonic() - began:.0f} s")
            meter.print()
            print(f"{'payload of a page':22}{0.7:>9}{statistics.median(payloads) / 1e6:9.2f}   MB")
            print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
            chromium.close()


if __name__ == "__main__":
    main()
