"""One model on every mesh shape of a number of devices that is worth trying: step time and memory of each, and which are best.

The model is traced once; each shape is priced and solved in this process. One that cannot be is an entry too, with its reason.

Names of axes: with one axis it is `dp`, the batch is split over it; with more the outermost is `dp`, the innermost `tp` and those
between are `mp`, `mp2`: the optimum says what they are used for, splitting the batch further included. Order matters, since the
last axis is the nearest devices. An axis must not run ragged over nodes: the devices inside it either fill nodes or divide one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import InfeasibleError, InputError, PlanFormatError, PlannerError
from planner.graph import JointGraph, ModelRequest
from planner.mesh import MAX_AXES, Mesh
from planner.plan import Plan

if TYPE_CHECKING:
    from planner.solving.solve import Progress as SolveProgress

SCHEMA = 1
SOLVED = ("optimal", "feasible")


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """Everything the entries of a sweep depend on. `model.batch` None means one sequence per device for a sample model."""

    model: ModelRequest
    devices: int
    axes: tuple[int, int] = (1, 3)
    hardware: str = "h100_sxm"
    memory_bytes: int | None = None
    optimizer: str = "adamw"
    gpus_per_node: int = 8
    checkpoint: str = "auto"
    time_limit_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one mesh came to.

    Attributes:
        status: `optimal` (proved), `feasible` (`gap` says how far it may be from the optimum), `infeasible` (nothing fits the
            memory), `indivisible` (batch or nodes do not divide), `time_limit`; the last three have a `reason` and no numbers.
        comm_bytes: full bytes of all collectives of a step, per axis.
        checkpointed: layers whose forward pass runs again in backward.
        seconds: what pricing and solving took.
    """

    mesh: str
    status: str
    objective_us: float | None = None
    bound_us: float | None = None
    gap: float | None = None
    compute_us: float | None = None
    comm_us: float | None = None
    peak_bytes: int | None = None
    comm_bytes: dict[str, int] = field(default_factory=dict)
    checkpointed: int = 0
    plan_id: str = ""
    reason: str = ""
    seconds: float = 0.0

    @property
    def solved(self) -> bool:
        return self.status in SOLVED

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, mesh: Mesh, plan: Plan, seconds: float) -> Entry:
        return cls(
            mesh=str(mesh), status=plan.report.status, objective_us=plan.objective_us, bound_us=plan.report.bound_us,
            gap=plan.report.gap, compute_us=plan.compute_us, comm_us=plan.comm_us, peak_bytes=plan.memory.peak_bytes,
            comm_bytes={axes: sum(kinds.values()) for axes, kinds in plan.comm_bytes.items()},
            checkpointed=len(plan.checkpointed), plan_id=plan.plan_id, seconds=seconds,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """Where a sweep stands: `done` of `total` meshes, what happens to `mesh` now; value and bound while it is solved."""

    done: int
    total: int
    mesh: str
    stage: str
    value_us: float = math.inf
    bound_us: float = -math.inf


def meshes(devices: int, axes: tuple[int, int] = (1, 3)) -> tuple[Mesh, ...]:
    """Every ordered way to write `devices` as a product of sizes over 1, fewest axes first.

    Raises:
        InputError: fewer than two devices, or a range of axes that is none.
    """
    fewest, most = axes
    if devices < 2:
        raise InputError(f"a sweep over {devices} devices has no mesh", hint="Give --devices 2 or more.")
    if not 1 <= fewest <= most <= MAX_AXES:
        raise InputError(f"{fewest}..{most} is no range of axes", hint=f"For example --axes 1..3; at most {MAX_AXES}.")
    found = [
        Mesh(axis_names=axis_names(len(sizes)), axis_sizes=sizes)
        for count in range(fewest, most + 1)
        for sizes in _products(devices, count)
    ]
    if not found:
        raise InputError(
            f"{devices} devices cannot be written as {fewest} sizes over 1", hint="Allow fewer axes, e.g. --axes 1..2."
        )
    return tuple(found)


def axis_names(count: int) -> tuple[str, ...]:
    """See module docstring."""
    between = ("mp", "mp2")[: max(0, count - 2)]
    return ("dp",) if count == 1 else ("dp", *between, "tp")


def _products(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations into `count` factors over 1, largest first factor first."""
    if count == 1:
        if total > 1:
            yield (total,)
        return
    for first in range(total // 2, 1, -1):
        if total % first == 0:
            for rest in _products(total // first, count - 1):
                yield (first, *rest)


def ragged(mesh: Mesh, gpus_per_node: int) -> str:
    """Why an axis runs ragged over nodes, "" if none does."""
    inside = 1
    for name, size in zip(reversed(mesh.axis_names), reversed(mesh.axis_sizes), strict=True):
        inside *= size
        if inside < mesh.num_devices and inside % gpus_per_node and gpus_per_node % inside:
            return f"groups of {inside} devices (axis {name} and those inside) run ragged over nodes of {gpus_per_node}"
    return ""


def sweep(
    request: SweepRequest,
    graph: JointGraph,
    *,
    done: Container[str] = (),
    progress: Callable[[SweepProgress], None] = lambda now: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Entry, Plan | None]]:
    """Entries one by one, each with its plan if there is one. Meshes whose text is in `done` are left out.

    A cancelled sweep ends after the entry at hand, which is then left out too unless it was proved.
    """
    wanted = [mesh for mesh in meshes(request.devices, request.axes) if str(mesh) not in done]
    total = len(meshes(request.devices, request.axes))
    for number, mesh in enumerate(wanted, total - len(wanted)):
        if cancelled():
            return
        now = SweepProgress(done=number, total=total, mesh=str(mesh), stage="begin")
        progress(now)
        found = _one(request, graph, mesh, now, progress, cancelled)
        if cancelled() and found[0].status != "optimal":
            return
        yield found


def _one(
    request: SweepRequest,
    graph: JointGraph,
    mesh: Mesh,
    now: SweepProgress,
    progress: Callable[[SweepProgress], None],
    cancelled: Callable[[], bool],
) -> tuple[Entry, Plan | None]:
    from planner import pipeline

    began = time.monotonic()

    def told(solve: SolveProgress) -> None:
        progress(replace(now, stage="solve", value_us=solve.value_us, bound_us=solve.bound_us))

    why = ragged(mesh, request.gpus_per_node)
    if why:
        return Entry(mesh=str(mesh), status="indivisible", reason=why), None
    asked = pipeline.PlanRequest(
        model=graph.request, mesh=mesh, hardware=request.hardware, memory_bytes=request.memory_bytes, optimizer=request.optimizer,
        gpus_per_node=request.gpus_per_node, time_limit_s=request.time_limit_s, checkpoint=request.checkpoint,
    )  # fmt: skip
    try:
        planned = pipeline.make_plan(
            asked, graph=graph, progress=lambda stage: progress(replace(now, stage=stage)), told=told, cancelled=cancelled
        )
    except InfeasibleError as error:
        status, reason = "infeasible", error.message
    except InputError as error:  # the batch or an input does not divide
        status, reason = "indivisible", error.message
    except PlannerError as error:
        status, reason = "time_limit", error.message
    else:
        return Entry.of(mesh, planned.plan, time.monotonic() - began), planned.plan
    return Entry(mesh=str(mesh), status=status, reason=reason, seconds=time.monotonic() - began), None


def pareto(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Meshes that no other beats in both step time and memory, fastest first; of equals the first stays."""
    solved = [e for e in entries if e.solved and e.objective_us is not None and e.peak_bytes is not None]
    front: list[Entry] = []
    for entry in sorted(solved, key=lambda e: (e.objective_us, e.peak_bytes)):
        assert entry.peak_bytes is not None
        if not front or entry.peak_bytes < (front[-1].peak_bytes or 0):
            front.append(entry)
    return tuple(entry.mesh for entry in front)


# ---- files ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, eq=False)
class SweepFile:
    """A sweep on disk: what it depends on, and the entries so far. Written whole after every entry."""

    identity: dict[str, Any]
    entries: tuple[Entry, ...] = ()

    @classmethod
    def begin(cls, request: SweepRequest, graph: JointGraph, hardware_hash: str) -> SweepFile:
        """What must agree for entries to be comparable. The range of axes may grow."""
        data = asdict(request)
        del data["axes"]
        data["model"] = graph.request.to_json()
        return cls(identity={**data, "fingerprint": graph.fingerprint, "hardware_hash": hardware_hash})

    def add(self, entry: Entry) -> SweepFile:
        return replace(self, entries=(*self.entries, entry))

    @property
    def meshes(self) -> frozenset[str]:
        return frozenset(entry.mesh for entry in self.entries)

    def save(self, path: Path) -> None:
        data = {
            "sweep": SCHEMA, "identity": self.identity, "pareto": list(pareto(self.entries)),
            "entries": [entry.to_json() for entry in self.entries],
        }  # fmt: skip
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(data, indent=1) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> SweepFile:
        """Raises PlanFormatError if the file is missing or not a sweep."""
        hint = "Give the file that `sweep -o` wrote, or begin anew under another name."
        try:
            data = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PlanFormatError(f"{path} cannot be read as a sweep: {error}", hint=hint) from error
        if not isinstance(data, dict) or data.get("sweep") != SCHEMA:
            raise PlanFormatError(f"{path} is not a sweep of version {SCHEMA}", hint=hint)
        try:
            known = {f.name for f in fields(Entry)}
            entries = tuple(Entry(**{k: v for k, v in entry.items() if k in known}) for entry in data["entries"])
            return cls(identity=dict(data["identity"]), entries=entries)
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanFormatError(f"the sweep in {path} is damaged: {error!r}", hint=hint) from error

    def resumed(self, asked: SweepFile, path: Path) -> SweepFile:
        """This file, to go on with.

        Raises:
            InputError: it is of another model, hardware or limit; says which.
        """
        known = json.loads(json.dumps(asked.identity))
        differs = [name for name in known if known[name] != self.identity.get(name)]
        if differs:
            before, now = (str(i.get(differs[0])) for i in (self.identity, known))
            raise InputError(
                f"{path} was made with another {differs[0]}: {before}, not {now}",
                hint="Give the same flags, or begin anew under another name.",
            )
        return self


def ordered(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Fastest first, those without a plan last."""
    return tuple(sorted(entries, key=lambda e: math.inf if e.objective_us is None else e.objective_us))
