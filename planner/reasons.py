"""Answers to "what if" and "why not": what an override would cost, where a difference comes from, why something is impossible.

Plain data; made by `overrides.py`, `explain.py` and `relaxations.py`. Times in µs of the objective (serial, no overlap), memory
in bytes per device.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner.placement import Placements, text

CERTIFIED, OPEN, IMPOSSIBLE, UNDECIDED = "optimal", "feasible", "infeasible", "time_limit"


@dataclass(frozen=True, kw_only=True)
class Override:
    """What the best plan comes to if a tensor is pinned to a placement and everything else may move.

    Attributes:
        status: `optimal` (proved), `feasible` (best found; the truth is between bound and objective), `infeasible` (cannot be
            together with the other constraints, which `conflicts` names), `time_limit` (no answer in time).
        objective_us, bound_us, peak_bytes: None without a plan.
        delta_us, delta_bytes: against the plan without the override.
        chosen: the plan without the override has this placement.
    """

    placements: Placements
    status: str
    objective_us: float | None = None
    bound_us: float | None = None
    peak_bytes: int | None = None
    delta_us: float | None = None
    delta_bytes: int | None = None
    chosen: bool = False
    conflicts: tuple[str, ...] = ()

    @property
    def certified(self) -> bool:
        return self.status == CERTIFIED

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; `inf` without a plan."""
        if self.objective_us is None or self.bound_us is None:
            return float("inf")
        return max(0.0, (self.objective_us - self.bound_us) / (self.objective_us or 1.0))

    def to_json(self) -> dict[str, Any]:
        gap = None if self.objective_us is None else self.gap
        return {**asdict(self), "placements": text(self.placements), "conflicts": list(self.conflicts), "gap": gap}


@dataclass(frozen=True)
class Reason:
    """Why a placement cannot be had. `kind`: `divisibility` (a size does not divide; the text names sizes that work), `rule`
    (the op's rule has no such row), `neighbours` (nothing around the op can serve it), `constraint` (other demands of the user
    stand against it), `budget` (it does not fit the memory budget)."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of the difference between two plans; equal changes of repeated layers are one term.

    Attributes:
        what: `compute` (of the op `key`) or `redistribution` (of the tensor that `key` makes).
        key: node key, with `*` for the number of the layer if `count` > 1 or the op lies in a repeated layer.
        phase: `forward` or `backward`.
        count: how many ops or tensors.
        us: of all of them together; what the second plan pays more.
        before, after: the op's placements (`S(0)R, RS(0) -> S(0)S(2)`) or the tensor's ways (`S(0)R > RR: all_gather@dp`).
        here: it concerns the op or tensor that was asked about: its own work and the ways of its inputs and outputs.
    """

    what: str
    key: str
    phase: str
    count: int
    us: float
    before: str
    after: str
    here: bool


@dataclass(frozen=True, kw_only=True)
class LocalPrice:
    """What a placement costs at the op itself while all other ops stay as they are, µs; None where a neighbour cannot serve it.

    `inputs_us` and `outputs_us` are the ways of its operands and of its results (once where several ops share them).
    """

    placements: Placements
    compute_us: float | None
    inputs_us: float | None
    outputs_us: float | None
    chosen: bool = False

    @property
    def total_us(self) -> float | None:
        if self.compute_us is None or self.inputs_us is None or self.outputs_us is None:
            return None
        return self.compute_us + self.inputs_us + self.outputs_us

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "placements": text(self.placements), "total_us": self.total_us}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan does not have a placement.

    Attributes:
        where: what was asked about; `count` tensors match it.
        chosen: the placements that the plan has there (several if the matched tensors differ).
        asked: the placement in question.
        verdict: `chosen` · `unavailable` (see `reasons`) · `dearer here` · `dearer elsewhere` (most of what it costs more, or
            all, is paid by other ops) · `tie` · `cheaper` (the plan at hand is not the best one).
        override: what the plan with this placement comes to.
        replaces: own pins and boundaries of exactly these tensors, which the override takes the place of.
        terms: parts of the difference, largest first; they add up to `override.delta_us`.
        memory: bytes per device by category, what the other plan has more.
        us_per_byte: what a byte more of memory would save in the plan with this placement; 0 if the budget does not bind.
        reasons: only with `unavailable`; `relaxations` then say what could be given up.
    """

    where: str
    count: int
    chosen: tuple[Placements, ...]
    asked: Placements
    verdict: str
    override: Override
    replaces: tuple[str, ...] = ()
    terms: tuple[Term, ...] = ()
    memory: tuple[tuple[str, int], ...] = ()
    us_per_byte: float = 0.0
    reasons: tuple[Reason, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()

    @property
    def here_us(self) -> float:
        return sum(term.us for term in self.terms if term.here)

    @property
    def elsewhere_us(self) -> float:
        return sum(term.us for term in self.terms if not term.here)

    def to_json(self) -> dict[str, Any]:
        return {
            "where": self.where, "count": self.count, "chosen": [text(p) for p in self.chosen], "asked": text(self.asked),
            "verdict": self.verdict, "override": self.override.to_json(),
            "replaces": list(self.replaces), "here_us": self.here_us,
            "elsewhere_us": self.elsewhere_us, "terms": [asdict(term) for term in self.terms], "memory": dict(self.memory),
            "us_per_byte": self.us_per_byte, "reasons": [asdict(reason) for reason in self.reasons],
            "relaxations": [relaxation.to_json() for relaxation in self.relaxations],
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """What becomes possible if one constraint of a conflict is given up and all others stay.

    Attributes:
        constraint: in the user's words.
        status: as in `Override`; `infeasible`: it alone is not enough, `conflicts` names what still stands in the way.
    """

    constraint: str
    status: str
    objective_us: float | None = None
    bound_us: float | None = None
    peak_bytes: int | None = None
    conflicts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "conflicts": list(self.conflicts)}
