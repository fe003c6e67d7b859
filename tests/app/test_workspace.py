"""The workspace folder: what is stored comes back, ids cannot leave it, a crash loses at most a half-written line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app import workspace as workspace_module
from app.workspace import Workspace
from planner import InputError, Mesh
from tests.app.synthetic import make_plan, small_graph

GRAPH = small_graph(1)
PLAN = make_plan(GRAPH)


@pytest.fixture
def store(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_graphs_and_plans_come_back(store):
    store.save_graph("p", GRAPH)
    store.save_plan("p", PLAN)
    assert store.load_graph("p", GRAPH.fingerprint).fingerprint == GRAPH.fingerprint
    assert store.load_plan("p", PLAN.plan_id).dumps() == PLAN.dumps()


def test_a_stored_plan_is_never_rewritten(store):
    store.save_plan("p", PLAN)
    path = next(store.root.rglob(f"{PLAN.plan_id}.json"))
    before = path.stat().st_mtime_ns
    store.save_plan("p", PLAN)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("text", ["..", "../x", "a/b", "a\\b", "", ".hidden", "x" * 65, "a\nb", "C:"])
def test_ids_that_are_no_plain_names_are_refused(store, text):
    for call in (lambda: store.load_plan(text, "a"), lambda: store.load_plan("p", text), lambda: list(store.events("p", text)),
                 lambda: store.load_graph("p", text), lambda: store.load_project(text)):  # fmt: skip
        with pytest.raises(InputError):
            call()


def test_a_half_written_last_line_is_dropped_and_the_log_goes_on(store):
    store.append_event("p", "d", {"event": "undo"})
    path = store.root / "projects/p/drafts/d.jsonl"
    path.write_bytes(path.read_bytes() + b'{"event": "pi')
    assert list(store.events("p", "d")) == [{"event": "undo"}]
    store.append_event("p", "d", {"event": "redo"})
    assert list(store.events("p", "d")) == [{"event": "undo"}, {"event": "redo"}]


def test_damage_in_the_middle_is_an_error_that_names_the_line(store):
    store.append_event("p", "d", {"event": "undo"})
    path = store.root / "projects/p/drafts/d.jsonl"
    path.write_bytes(b"{broken\n" + path.read_bytes())
    with pytest.raises(InputError, match="line 1"):
        list(store.events("p", "d"))


def test_oversized_and_malformed_files_are_refused(store, monkeypatch):
    store.save_plan("p", PLAN)
    path = next(store.root.rglob(f"{PLAN.plan_id}.json"))
    monkeypatch.setattr(workspace_module, "MAX_JSON_BYTES", 10)
    with pytest.raises(InputError, match="larger"):
        store.load_plan("p", PLAN.plan_id)
    monkeypatch.undo()
    for broken in (b"{", b"\xff\xfe", b"[]", b"[" * 100_000):
        path.write_bytes(broken)
        with pytest.raises(InputError):
            store.load_plan("p", PLAN.plan_id)


def test_a_failed_write_leaves_the_old_bytes(store, monkeypatch):
    path = store.root / "file"
    workspace_module.write_atomically(path, b"old")
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        workspace_module.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in store.root.iterdir()] == ["file"]


def test_recent_projects_are_listed_last_used_first(store):
    for name in ("a", "b"):
        store.save_project(name, {"name": f"project {name}", "graph": GRAPH.fingerprint})
        store.append_event(name, "d", {"event": "undo"})
    os.utime(store.root / "projects/a/drafts/d.jsonl", (1, 1))
    assert [recent.name for recent in store.recent()] == ["project b", "project a"]
    assert Workspace(store.root / "nothing").recent() == ()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        Workspace(tmp_path / "file" / "inside").check_writable()


def test_project_ids_are_plain_names_that_tell_meshes_apart():
    one = workspace_module.project_id("/a b/my model.py:make", Mesh.parse("dp=2,tp=2"), GRAPH.fingerprint)
    two = workspace_module.project_id("/a b/my model.py:make", Mesh.parse("tp=4"), GRAPH.fingerprint)
    assert one != two and one.startswith("my-model-py-make-dp2-tp2-")
    assert workspace_module.project_id("../..", Mesh.parse("dp=2"), GRAPH.fingerprint).startswith("model-dp2-")
