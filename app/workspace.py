"""The workspace folder: projects with their graphs, plans and pin drafts. Everything is JSON, written at once and atomically.

    projects/<project>/project.json            name and what it was opened with
                      /graphs/<fingerprint>.json.gz
                      /plans/<plan id>.json    named by its decisions, which are never rewritten
                      /drafts/<draft>.jsonl    append-only log of pin changes and plan changes (this is also undo)

Ids come from addresses that anyone can type, so each is matched against a strict pattern before it touches a path.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from planner import InputError, JointGraph, Mesh, Plan

MAX_JSON_BYTES = 64 * 2**20
MAX_DRAFT_BYTES = 8 * 2**20
MAX_EVENT_BYTES = 2**20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def default_folder() -> Path:
    """`plan-explorer` in the user's data folder."""
    base = os.environ.get("XDG_DATA_HOME") or os.environ.get("LOCALAPPDATA") or "~/.local/share"
    return Path(base).expanduser() / "plan-explorer"


def checked_id(text: str) -> str:
    """Raises InputError if the text could be anything but a plain name."""
    if not _ID.fullmatch(text):
        raise InputError(f"{text[:80]!r} is not an id", hint="Ids are letters, digits, - and _. Copy the whole address.")
    return text


def new_id() -> str:
    return secrets.token_hex(4)


def project_id(model: str, mesh: Mesh, fingerprint: str) -> str:
    """`llama3-8b-dp8-tp8-0123abcd`: the same model at the same sizes on the same mesh."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", model.rpartition("/")[2])[:24].strip("-") or "model"
    axes = "-".join(f"{axis[:6]}{size}" for axis, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return checked_id(f"{name}-{re.sub(r'[^A-Za-z0-9-]', '', axes)[:28]}-{fingerprint[:8]}")


def write_atomically(path: Path, data: bytes) -> None:
    """Temporary file, fsync, rename: a reader sees the old bytes or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Raises InputError if the file is missing, over the size limit or not JSON."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise InputError(
                f"{path.name} is larger than {MAX_JSON_BYTES // 2**20} MiB", hint="It was not written by this program."
            )
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{path.name} is not in the workspace", hint="Open a recent plan or the demo.") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path.name} is damaged: {error}", hint="Open another plan; the file was left as it is.") from error


def _drop_torn_line(file: BinaryIO) -> None:
    """Cuts off what follows the last newline: a line that a crash left half written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_EVENT_BYTES))
    tail = file.read()
    if tail and not tail.endswith(b"\n"):
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


@dataclass(frozen=True, kw_only=True)
class Recent:
    """A project as the start page lists it."""

    project: str
    name: str
    draft: str
    changed: float


@dataclass(frozen=True)
class Workspace:
    """See module docstring. Methods take ids, never paths."""

    root: Path

    def check_writable(self) -> None:
        """Raises InputError if nothing can be stored there."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise InputError(
                f"the workspace {self.root} cannot be written: {error.strerror}",
                hint="Start with -- --workspace FOLDER. Until then export what you want to keep.",
            ) from error

    def _project(self, project: str) -> Path:
        return self.root / "projects" / checked_id(project)

    # ---- graphs and plans -----------------------------------------------------------------------------------------
    def graph_path(self, project: str, fingerprint: str) -> Path:
        return self._project(project) / "graphs" / f"{checked_id(fingerprint)}.json.gz"

    def save_graph(self, project: str, graph: JointGraph) -> Path:
        path = self.graph_path(project, graph.fingerprint)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            graph.save(path)
        return path

    def load_graph(self, project: str, fingerprint: str, read: Callable[[Path], JointGraph] = JointGraph.load) -> JointGraph:
        path = self.graph_path(project, fingerprint)
        if not path.exists():
            raise InputError(f"graph {fingerprint} is not in the workspace", hint="Trace the model again on Setup.")
        return read(path)

    def save_plan(self, project: str, plan: Plan, *, better_proof: bool = False) -> None:
        """Decisions are never rewritten; what is known about them is, with `better_proof`."""
        path = self._project(project) / "plans" / f"{checked_id(plan.plan_id)}.json"
        if better_proof or not path.exists():
            write_atomically(path, plan.dumps().encode())

    def load_plan(self, project: str, plan_id: str) -> Plan:
        return Plan.from_json(read_json(self._project(project) / "plans" / f"{checked_id(plan_id)}.json"))

    def plan_written(self, project: str, plan_id: str) -> float:
        """When a plan was written last, 0 if it is not there."""
        path = self._project(project) / "plans" / f"{checked_id(plan_id)}.json"
        return path.stat().st_mtime if path.exists() else 0.0

    def plans(self, project: str) -> tuple[tuple[str, float], ...]:
        """(plan id, when it was written) of every plan of a project, the newest first."""
        paths = [path for path in (self._project(project) / "plans").glob("*.json") if _ID.fullmatch(path.stem)]
        return tuple((path.stem, path.stat().st_mtime) for path in sorted(paths, key=lambda path: -path.stat().st_mtime))

    def graphs(self, project: str) -> tuple[Path, ...]:
        """Files of the graphs of a project."""
        return tuple(sorted((self._project(project) / "graphs").glob("*.json.gz")))

    # ---- projects -------------------------------------------------------------------------------------------------
    def save_project(self, project: str, data: dict[str, Any]) -> None:
        write_atomically(self._project(project) / "project.json", json.dumps(data, indent=1).encode())

    def load_project(self, project: str) -> dict[str, Any]:
        data = read_json(self._project(project) / "project.json")
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            raise InputError(f"project {project} is damaged", hint="Open another one.")
        return data

    def recent(self) -> tuple[Recent, ...]:
        """Projects with at least one draft, the last used first. Folders that are no projects are left out."""
        found = []
        for folder in sorted((self.root / "projects").glob("*")):
            drafts = sorted((folder / "drafts").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
            if drafts and _ID.fullmatch(folder.name) and (folder / "project.json").is_file():
                name = str(self.load_project(folder.name)["name"])
                found.append(Recent(project=folder.name, name=name, draft=drafts[-1].stem, changed=drafts[-1].stat().st_mtime))
        return tuple(sorted(found, key=lambda recent: -recent.changed))

    # ---- drafts ---------------------------------------------------------------------------------------------------
    def append_event(self, project: str, draft: str, event: dict[str, Any]) -> None:
        """One line, flushed to disk before this returns."""
        path = self._draft(project, draft)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _drop_torn_line(file)
            file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def events(self, project: str, draft: str) -> Iterator[dict[str, Any]]:
        """The log of a draft. A last line that was cut off by a crash is left out; damage elsewhere is an error."""
        path = self._draft(project, draft)
        if not path.exists():
            raise InputError(f"draft {draft} is not in the workspace", hint="Open the project from Setup.")
        if path.stat().st_size > MAX_DRAFT_BYTES:
            raise InputError(f"draft {draft} is larger than {MAX_DRAFT_BYTES // 2**20} MiB", hint="Open the plan again on Setup.")
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                if number == len(lines) - 1:
                    return
                raise InputError(
                    f"line {number + 1} of draft {draft} is damaged", hint="Open the plan again on Setup."
                ) from error

    def drafts(self, project: str) -> tuple[str, ...]:
        """Ids of the drafts of a project."""
        return tuple(sorted(p.stem for p in (self._project(project) / "drafts").glob("*.jsonl") if _ID.fullmatch(p.stem)))

    def _draft(self, project: str, draft: str) -> Path:
        return self._project(project) / "drafts" / f"{checked_id(draft)}.jsonl"
