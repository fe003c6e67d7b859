"""A real server with the real planner, a real browser. Without one the tests skip, or fail if REQUIRE_BROWSER=1."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from app.view_models.pins import plan_event
from app.workspace import Workspace, project_id
from tests.app.synthetic import make_plan, small_graph

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs a browser. One that fails is tried up to four times more, and reported as rerun: on a
    loaded machine anything can take longer than a test waits."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.flaky(reruns=4))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that fails shows what the reader of each of its pages would see."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    tabs = [one for one in getattr(item, "funcargs", {}).get("all_tabs", []) if report.failed and report.when == "call"]
    for tab in tabs:
        with contextlib.suppress(Exception):  # the browser itself may be gone
            report.sections.append(("Page", f"{tab.page.url}\n{tab.page.inner_text('body', timeout=5000)}"))


@dataclass
class Tab:
    """A page and what went over its wires."""

    page: Any
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    received_bytes: int = 0

    def watch(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname or ""))
        self.page.on("websocket", self._socket)

    def _socket(self, socket: Any) -> None:
        self.hosts.add(urlsplit(socket.url).hostname or "")
        socket.on("framereceived", self._frame)

    def _frame(self, frame: Any) -> None:
        self.received_bytes += len(frame)

    # ---- what a user does ---------------------------------------------------------------------------------------------
    def open(self, url: str) -> float:
        """Seconds until the graph is drawn."""
        start = time.perf_counter()
        self.page.goto(url)
        self.page.locator(".box.module").first.wait_for(timeout=60_000)
        return time.perf_counter() - start

    def box(self, name: str) -> Any:
        """A module box by how its spoken name begins."""
        return self.page.get_by_role("button", name=re.compile("^" + re.escape(name)))

    def find(self, text: str) -> None:
        self.page.get_by_label("Find op, module or placement").fill(text)
        self.page.keyboard.press("Enter")
        self.page.locator(".box.op.selected").wait_for()

    def choose(self, placement: str) -> None:
        self.page.locator("[class*='st-key-place']").get_by_role("radio", name=placement, exact=True).click()

    def press(self, name: str | re.Pattern[str]) -> None:
        self.page.get_by_role("button", name=name).click()

    def radio(self, name: str) -> None:
        self.page.get_by_role("radio", name=name, exact=True).click()

    def legal(self) -> None:
        """Waits until the worker has said which placements are legal."""
        self.page.get_by_text("To, per axis").first.wait_for(timeout=120_000)
        self.settled()

    def settled(self) -> None:
        """Waits until no run is under way: what an earlier page left behind is gone then."""
        self.page.locator("[data-test-script-state=notRunning]").wait_for(timeout=60_000)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, compiled: None) -> Iterator[str]:
    """Address of `streamlit run app/main.py` with an empty workspace and the real planner."""
    yield from serve(tmp_path_factory.mktemp("real"), {})


@pytest.fixture(scope="session")
def quick_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same with a made-up planner, for tests of what the browser does by itself."""
    yield from serve(tmp_path_factory.mktemp("quick"), {"PLAN_EXPLORER_ENGINE": "tests.app.fake_engine:FakeEngine"})


@pytest.fixture(scope="session")
def late_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same as `quick_server`, with an event loop that is late (see late_server.py)."""
    environment = {"PLAN_EXPLORER_ENGINE": "tests.app.fake_engine:FakeEngine"}
    yield from serve(tmp_path_factory.mktemp("late"), environment, [str(Path(__file__).parent / "late_server.py")])


class SmallServer:
    """A server with a made-up planner whose workspace holds a small plan of four layers: a page of it is drawn in no time. It can
    be killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        graph = small_graph()
        plan = make_plan(graph)
        self.project, self.plan_id = project_id(plan.request.model, plan.mesh, graph.fingerprint), plan.plan_id
        workspace = Workspace(folder / "workspace")
        workspace.save_project(self.project, {"schema": 1, "name": "small", "graph": graph.fingerprint})
        workspace.save_graph(self.project, graph)
        workspace.save_plan(self.project, plan)
        workspace.append_event(self.project, "first", plan_event(plan, None, graph, None))
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def link(self, page: str = "", op: str = "") -> str:
        """The small plan as a draft of one's own, whatever others did before."""
        return f"{self.address}/{page}?project={self.project}&plan={self.plan_id}" + (f"&op={quote(op, safe='/')}" if op else "")

    def start(self) -> None:
        environment = {**os.environ, "PLAN_EXPLORER_ENGINE": "tests.app.fake_engine:FakeEngine"}
        log = self.folder / "server.log"
        with log.open("a") as out:
            command = command_line(self.folder, self.port)
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        wait_for(self.address, self.process, log)

    def kill(self) -> None:
        """Without a word to anyone, as a crash would."""
        self.process.kill()
        self.process.wait(20)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    found = SmallServer(tmp_path_factory.mktemp("small"))
    yield found
    found.kill()


def command_line(folder: Path, port: int, program: Sequence[str] = ("-m", "streamlit")) -> list[str]:
    return [
        sys.executable, *program, "run", "app/main.py", "--server.port", str(port),
        "--", "--workspace", str(folder / "workspace"),
    ]  # fmt: skip


def serve(folder: Path, environment: dict[str, str], program: Sequence[str] = ("-m", "streamlit")) -> Iterator[str]:
    port = free_port()
    command = command_line(folder, port, program)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield wait_for(f"http://127.0.0.1:{port}", process, folder / "server.log")
        finally:
            process.terminate()
            process.wait(20)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        try:
            urllib.request.urlopen(f"{address}/_stcore/health", timeout=1)
            return address
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not answer:\n{log.read_text()}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    required = os.environ.get("REQUIRE_BROWSER") == "1"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        if required:
            raise
        pytest.skip("Playwright is not installed")
    if CHROMIUM is None:
        assert not required, "REQUIRE_BROWSER=1, and there is no chromium on the PATH"
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def all_tabs() -> list[Tab]:
    """Every tab that a test has opened."""
    return []


@pytest.fixture
def new_tab(browser: Any, all_tabs: list[Tab]) -> Iterator[Callable[..., Tab]]:
    """Opens tabs of their own; at the end no page may have met an error or asked another machine for anything."""

    def start(*, dark: bool = False, width: int = 1600, height: int = 950) -> Tab:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", accept_downloads=True
        )
        tab = Tab(context.new_page())
        tab.page.set_default_timeout(60_000)
        tab.watch()
        all_tabs.append(tab)
        return tab

    yield start
    for tab in all_tabs:
        tab.page.context.close()
        assert tab.errors == []
        assert tab.hosts <= {"127.0.0.1", ""}, tab.hosts


@pytest.fixture
def tab(new_tab: Callable[..., Tab]) -> Tab:
    return new_tab()
