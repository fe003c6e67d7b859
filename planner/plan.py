"""A plan: the chosen strategy of every op, the redistributions between them, and the evidence. JSON in, JSON out.

Loading a plan needs neither torch nor a solver.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from planner import constraint as constraints_module
from planner.constraint import Constraint, Pin
from planner.errors import PlanFormatError
from planner.graph import ModelRequest
from planner.memory import MemoryBreakdown, MemoryPolicy
from planner.mesh import Mesh
from planner.placement import Placements, parse, text
from planner.redistribution import Collective, CollectiveKind

PLAN_SCHEMA = 1
STATUSES = ("optimal", "feasible", "infeasible", "time_limit", "error")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One move of a redistribution: placements after it, the collective (None: local) and its price."""

    target: Placements
    collective: Collective | None
    us: float


@dataclass(frozen=True, kw_only=True)
class Redistribution:
    """A change of placement that the program carries out once.

    Attributes:
        tensor: (node key, output number) of the tensor.
        phase: the phase in which it happens.
        source: placement it starts from. That of the producer, or of `shared` redistribution of the same tensor and phase.
        shared: the one redistribution whose result several consumers take; the others of this tensor and phase start from it.
        consumers: (node key, operand slot) of each use that reads the result; slot -1 = stored as the gradient of the
            parameter node with that key. A private redistribution has several if they want the same of the same start.
        steps: at least one.
    """

    tensor: tuple[str, int]
    phase: str
    source: Placements
    shared: bool
    consumers: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]

    @property
    def target(self) -> Placements:
        return self.steps[-1].target

    @property
    def us(self) -> float:
        return sum(step.us for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The strategy of one node: required placement per operand, placement per output (None: unused output), and its time.

    `kept`: it does not run. Its result is what the forward pass read of the same tensor (`JointGraph.kept_from`), in that
    placement, kept until here; it reads no operand.
    """

    operands: tuple[Placements | None, ...]
    outputs: tuple[Placements | None, ...]
    compute_us: float
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class SolveReport:
    """How a plan was found. `optimal` only if value and bound agree to 1e-6 (relative).

    `objective_us` and `bound_us` are of the objective that is solved for, which counts a private redistribution for each use
    (`solving/problem.py`). `merged_us` is what the plan takes less than that, because equal ones are carried out once; it is 0
    for nearly all plans.
    """

    status: str
    objective_us: float
    bound_us: float
    method: str
    seconds: float
    merged_us: float = 0.0

    @property
    def gap(self) -> float:
        """(objective - bound) / objective, 0 when proved."""
        return max(0.0, (self.objective_us - self.bound_us) / self.objective_us) if self.objective_us else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """See module docstring. `choices` follows the graph's node order; keys are stable names.

    Attributes:
        checkpoint: how activation checkpointing was asked for: `auto`, `none`, `full` or `full:16`.
        checkpointed: the layers whose forward pass runs again in backward.
        regions: key of each forward op that is a user-controlled region -> its contract in one line.
    """

    request: ModelRequest
    structure_fingerprint: str
    fingerprint: str
    mesh: Mesh
    hardware_name: str
    hardware_hash: str
    memory_policy: MemoryPolicy
    constraints: tuple[Constraint, ...]
    choices: Mapping[str, Choice]
    redistributions: tuple[Redistribution, ...]
    memory: MemoryBreakdown
    report: SolveReport
    num_ops: int
    replicated_for_lack_of_a_rule: tuple[str, ...]
    gpus_per_node: int = 8
    checkpoint: str = "auto"
    checkpointed: tuple[str, ...] = ()
    regions: Mapping[str, str] = field(default_factory=dict)

    # ---- derived --------------------------------------------------------------------------------------------------
    @cached_property
    def compute_us(self) -> float:
        return sum(choice.compute_us for choice in self.choices.values())

    @cached_property
    def comm_us(self) -> float:
        """All redistributions, including local narrows and re-layout copies."""
        return sum(r.us for r in self.redistributions)

    @property
    def objective_us(self) -> float:
        """What is emitted, once each: `compute_us` and `comm_us` together."""
        return self.report.objective_us - self.report.merged_us

    @property
    def pins(self) -> tuple[Pin, ...]:
        return tuple(c for c in self.constraints if isinstance(c, Pin))

    @cached_property
    def comm_bytes(self) -> dict[str, dict[str, int]]:
        """axis names (`dp`, or `dp+tp` for a flattened group) -> collective kind -> full bytes, summed over the step."""
        found: dict[str, dict[str, int]] = {}
        for r in self.redistributions:
            for step in r.steps:
                if step.collective is not None:
                    kinds = found.setdefault(self.axes_text(step.collective.axes), {})
                    kind = str(step.collective.kind)
                    kinds[kind] = kinds.get(kind, 0) + step.collective.full_bytes
        return {axis: dict(sorted(kinds.items())) for axis, kinds in sorted(found.items())}

    @cached_property
    def collective_counts(self) -> dict[str, dict[str, int]]:
        """phase -> `kind@axes` -> number of calls per step."""
        found: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
        for r in self.redistributions:
            for step in r.steps:
                if step.collective is not None:
                    label = f"{step.collective.kind}@{self.axes_text(step.collective.axes)}"
                    found[r.phase][label] = found[r.phase].get(label, 0) + 1
        return {phase: dict(sorted(counts.items())) for phase, counts in found.items()}

    def axes_text(self, axes: tuple[int, ...]) -> str:
        return "+".join(self.mesh.axis_names[axis] for axis in axes)

    @property
    def kept_text(self) -> str:
        """`backward reads 225 parameters as forward read them, kept until then`; "" if none is kept."""
        count = sum(choice.kept for choice in self.choices.values())
        return f"backward reads {count} parameter{'s' * (count > 1)} as forward read them, kept until then" if count else ""

    @property
    def checkpointed_text(self) -> str:
        """`forward of 12 layers runs again in backward: layers.0 ... layers.11`; "" if no layer is checkpointed."""
        names = self.checkpointed
        if not names:
            return ""
        listed = ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"
        return f"forward of {len(names)} layer{'s' * (len(names) > 1)} runs again in backward: {listed}"

    @cached_property
    def plan_id(self) -> str:
        """Hash of the decisions only: structure, shapes, mesh, hardware, constraints, choices."""
        data = self.to_json()
        decisions = [data[k] for k in ("structure_fingerprint", "fingerprint", "mesh", "hardware", "constraints", "choices")]
        return hashlib.sha256(json.dumps(decisions, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]

    # ---- files ----------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        return {
            "schema": PLAN_SCHEMA,
            "request": self.request.to_json(),
            "structure_fingerprint": self.structure_fingerprint,
            "fingerprint": self.fingerprint,
            "mesh": self.mesh.to_json(),
            "hardware": {"name": self.hardware_name, "hash": self.hardware_hash, "gpus_per_node": self.gpus_per_node},
            "optimizer": self.memory_policy.optimizer,
            "constraints": [c.to_json() for c in self.constraints],
            "checkpoint": {"asked": self.checkpoint, "layers": list(self.checkpointed)},
            "choices": self._choices_to_json(),
            "redistributions": [_redistribution_to_json(r) for r in self.redistributions],
            "memory": self.memory.to_json(),
            "report": {
                "status": self.report.status, "objective_us": self.report.objective_us, "bound_us": self.report.bound_us,
                "method": self.report.method, "seconds": self.report.seconds,
                **({"merged_us": self.report.merged_us} if self.report.merged_us else {}),
            },
            "num_ops": self.num_ops,
            "replicated_for_lack_of_a_rule": list(self.replicated_for_lack_of_a_rule),
            **({"regions": dict(self.regions)} if self.regions else {}),
        }  # fmt: skip

    def _choices_to_json(self) -> dict[str, Any]:
        """Placements and whole choices are shared by many ops: each object is written out once."""
        texts = _Texts()
        made: dict[int, list[Any]] = {}
        for choice in self.choices.values():
            if id(choice) not in made:
                kept = [True] * choice.kept
                lists = [texts.all_of(choice.operands), texts.all_of(choice.outputs)]
                made[id(choice)] = [*lists, round(choice.compute_us, 6), *kept]
        return {key: made[id(choice)] for key, choice in self.choices.items()}

    @cached_property
    def output_texts(self) -> dict[str, str]:
        """Node key -> placement of its first output as text, "" if that is unused."""
        texts = _Texts()
        return {key: (texts.of(c.outputs[0]) if c.outputs else None) or "" for key, c in self.choices.items()}

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Raises PlanFormatError naming the first thing that is wrong."""
        if not isinstance(data, dict) or "schema" not in data:
            raise PlanFormatError(
                "this is not a plan file: it has no field 'schema'", hint="Give the plan.json that `plan -o` wrote."
            )
        if data["schema"] != PLAN_SCHEMA:
            raise PlanFormatError(
                f"the plan file has schema version {data['schema']!r}, this program reads version {PLAN_SCHEMA}",
                hint="Plan again with this version; pins can be copied over by hand.",
            )
        try:
            mesh = Mesh.from_json(data["mesh"])
            return cls(
                request=ModelRequest.from_json(data["request"]),
                structure_fingerprint=data["structure_fingerprint"],
                fingerprint=data["fingerprint"],
                mesh=mesh,
                hardware_name=data["hardware"]["name"],
                hardware_hash=data["hardware"]["hash"],
                memory_policy=MemoryPolicy(optimizer=data["optimizer"]),
                constraints=tuple(constraints_module.from_json(c, mesh) for c in data["constraints"]),
                choices=_choices_from_json(data["choices"], mesh),
                redistributions=tuple(_redistribution_from_json(r, mesh) for r in data["redistributions"]),
                memory=MemoryBreakdown.from_json(data["memory"]),
                report=SolveReport(**data["report"]),
                num_ops=int(data["num_ops"]),
                replicated_for_lack_of_a_rule=tuple(data["replicated_for_lack_of_a_rule"]),
                regions={str(key): str(line) for key, line in data.get("regions", {}).items()},
                gpus_per_node=int(data["hardware"].get("gpus_per_node", 8)),
                checkpoint=str(data.get("checkpoint", {}).get("asked", "auto")),
                checkpointed=tuple(map(str, data.get("checkpoint", {}).get("layers", ()))),
            )
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise PlanFormatError(f"the plan file is damaged: {error!r}", hint="Plan again, or restore the file.") from error

    def dumps(self) -> str:
        """Strictly valid JSON, one top-level field a line; the same plan gives the same bytes."""
        fields = [f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'), allow_nan=False)}" for k, v in self.to_json().items()]
        return "{\n" + ",\n".join(fields) + "\n}\n"

    def save(self, path: Path) -> None:
        """Atomic: an old file keeps its bytes if anything fails."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(self.dumps())
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Also reads `.json.gz`. Raises PlanFormatError if the file is missing, not JSON, or not a plan."""
        try:
            data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        except FileNotFoundError as error:
            raise PlanFormatError(f"there is no file {path}", hint="Check the path.") from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PlanFormatError(
                f"{path} cannot be read as JSON: {error}", hint="Give the plan.json that `plan -o` wrote."
            ) from error
        return cls.from_json(data)


class _Texts:
    """Placements as texts, each object once, while whatever holds them lives."""

    def __init__(self) -> None:
        self._known: dict[int, str | None] = {id(None): None}

    def of(self, placements: Placements | None) -> str | None:
        if id(placements) not in self._known:
            assert placements is not None
            self._known[id(placements)] = text(placements)
        return self._known[id(placements)]

    def all_of(self, several: tuple[Placements | None, ...]) -> list[str | None]:
        return [self.of(placements) for placements in several]


def _parse(written: str | None, mesh: Mesh) -> Placements | None:
    return None if written is None else parse(written, mesh)


def _choices_from_json(data: Mapping[str, Any], mesh: Mesh) -> dict[str, Choice]:
    """Equal choices (repeated layers) become one object."""
    made: dict[tuple[Any, ...], Choice] = {}
    choices: dict[str, Choice] = {}
    for key, (operands, outputs, compute_us, *kept) in data.items():
        same = (tuple(operands), tuple(outputs), compute_us, *kept)
        if same not in made:
            made[same] = Choice(
                operands=tuple(_parse(p, mesh) for p in operands),
                outputs=tuple(_parse(p, mesh) for p in outputs),
                compute_us=float(compute_us),
                kept=bool(kept and kept[0]),
            )
        choices[key] = made[same]
    return choices


def _redistribution_to_json(r: Redistribution) -> dict[str, Any]:
    return {
        "tensor": list(r.tensor), "phase": r.phase, "source": text(r.source), "shared": r.shared,
        "consumers": [list(c) for c in r.consumers],
        "steps": [
            [
                text(s.target), round(s.us, 6),
                None if (c := s.collective) is None else [str(c.kind), list(c.axes), c.full_bytes, c.dtype, c.reduce_op],
            ]
            for s in r.steps
        ],
    }  # fmt: skip


def _redistribution_from_json(data: Any, mesh: Mesh) -> Redistribution:
    steps = []
    for target, us, collective in data["steps"]:
        found = None
        if collective is not None:
            kind, axes, full_bytes, dtype, reduce_op = collective
            found = Collective(
                kind=CollectiveKind(kind), axes=tuple(axes), full_bytes=int(full_bytes), dtype=dtype, reduce_op=reduce_op
            )
        steps.append(Step(target=parse(target, mesh), collective=found, us=float(us)))
    key, output = data["tensor"]
    return Redistribution(
        tensor=(key, int(output)), phase=data["phase"], source=parse(data["source"], mesh), shared=bool(data["shared"]),
        consumers=tuple((k, int(slot)) for k, slot in data["consumers"]), steps=tuple(steps),
    )  # fmt: skip
