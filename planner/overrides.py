"""The price of every override: for each legal placement of a tensor, the best plan that has it.

Each row is one warm solve that starts from the settled state of the plan at hand; rows are solved side by side on several cores.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from planner.address import resolve
from planner.constraint import BoundaryPlacement, Constraint, Pin
from planner.errors import InfeasibleError, InvalidConstraintError, SolverError
from planner.graph import TensorRef
from planner.placement import Placements
from planner.reasons import IMPOSSIBLE, UNDECIDED, Override

if TYPE_CHECKING:
    from planner.solving.restrictions import Restriction
    from planner.solving.solve import Solution, Solver
    from planner.strategy import StrategySpace
    from planner.workbench import Workbench

MOST_THREADS = 8


def solve_with(
    solver: Solver,
    pinned: Restriction,
    kept: Sequence[Constraint],
    *,
    exact: bool | None,
    time_limit_s: float,
    cancelled: Callable[[], bool] | None,
) -> Solution:
    """One warm solve with a demand more than the constraints that are settled."""
    return solver.solve(kept, exact=exact, time_limit_s=time_limit_s, cancelled=cancelled, settled=kept, also=(pinned,))


def others_than(pinned: Restriction, error: InfeasibleError) -> tuple[str, ...]:
    """The conflict less the demand that was tried."""
    return tuple(c for c in error.conflicts if c != pinned.text)


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """The tensors that a question is about.

    Attributes:
        solver: the one that answers for the constraints in force.
        where: as a pin names them.
        refs: the tensors; several have one placement in common.
        legal: placements that all of them can have.
    """

    solver: Solver
    where: str
    refs: tuple[TensorRef, ...]
    legal: tuple[Placements, ...]

    @classmethod
    def find(cls, bench: Workbench, key: str, output: int = 0, constraints: Sequence[Constraint] = ()) -> Place:
        """`key` is a node key or anything that a pin can name.

        Raises:
            InvalidConstraintError: it matches nothing, or the op has no such output.
        """
        graph, solver = bench.graph, bench.solver.under(constraints)
        if key in graph.node_by_key:
            node = graph.nodes[graph.node_by_key[key]]
            if not (0 <= output < len(node.outputs)) or node.outputs[output] is None:
                used = ", ".join(str(i) for i, meta in enumerate(node.outputs) if meta is not None)
                raise InvalidConstraintError(f"{key} has no output {output} that is used", hint=f"Its outputs: {used or 'none'}.")
            refs: tuple[TensorRef, ...] = (TensorRef(graph.node_by_key[key], output),)
        else:
            refs = resolve(key, graph)
        legal: list[Placements] = []
        for number, ref in enumerate(refs):
            lattice = solver.costs.space.lattice(ref)
            here = [lattice.placements(p) for p in solver.legal(ref)]
            legal = here if number == 0 else [p for p in legal if p in set(here)]
        return cls(solver=solver, where=_pin_name(key, output), refs=refs, legal=tuple(legal))

    @property
    def space(self) -> StrategySpace:
        return self.solver.costs.space

    def chosen(self, strategy: np.ndarray) -> tuple[Placements, ...]:
        """Placements that the tensors have under these strategies, each once."""
        found = []
        for ref in self.refs:
            number = int(self.space.strategies[ref.node].output(ref.output)[strategy[ref.node]])
            found.append(self.space.lattice(ref).placements(number))
        return tuple(dict.fromkeys(found))

    def pinned_to(self, placements: Placements) -> Restriction:
        """The demand that all tensors have these placements, which must be legal."""
        from planner.solving.restrictions import Restriction

        problem = self.solver.problem
        masks: dict[int, np.ndarray] = {}
        for ref in self.refs:
            node = int(problem.node_of[ref.node])
            made = self.space.strategies[ref.node].output(ref.output)[problem.numbers_at(node)]
            mask = made == self.space.lattice(ref).find(placements)
            masks[node] = masks[node] & mask if node in masks else mask
        return Restriction(Pin(where=self.where, placements=placements), masks)

    def without_own(self, constraints: Sequence[Constraint]) -> tuple[Constraint, ...]:
        """The constraints less pins and boundaries on exactly these tensors: an override takes their place."""

        def own(constraint: Constraint) -> bool:
            if not isinstance(constraint, Pin | BoundaryPlacement):
                return False
            return set(resolve(constraint.where, self.space.graph)) == set(self.refs)

        return tuple(c for c in constraints if not own(c))


def _pin_name(key: str, output: int) -> str:
    """`param:NAME` and `buffer:NAME` are pinned by name; an output other than the first has no name of its own."""
    name = key.removeprefix("param:").removeprefix("buffer:")
    return name if output == 0 else f"{name} output {output}"


def overrides(
    place: Place,
    constraints: Sequence[Constraint],
    *,
    exact: bool | None = False,
    time_limit_s: float = 60.0,
    row: Callable[[Override], None] = lambda override: None,
    cancelled: Callable[[], bool] | None = None,
    threads: int | None = None,
) -> tuple[Override, ...]:
    """One row per legal placement, cheapest first, impossible ones last.

    `exact` False: message passing alone, rows that it does not prove are `feasible` with their gap; otherwise those go on to the
    integer program afterwards (None: if small enough). `row` is called whenever a row is known or better known, from any thread.
    """
    table = _Table(place, tuple(constraints), time.monotonic() + time_limit_s, row, cancelled)
    table.fill(False, threads)
    if exact is not False:
        table.fill(exact, threads)
    order = {"infeasible": 2, "time_limit": 1}
    return tuple(sorted(table.rows.values(), key=lambda r: (order.get(r.status, 0), r.objective_us or 0.0)))


@dataclass(eq=False)
class _Table:
    """One table while it is being filled."""

    place: Place
    constraints: tuple[Constraint, ...]
    deadline: float
    row: Callable[[Override], None]
    cancelled: Callable[[], bool] | None
    rows: dict[Placements, Override] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = self.place.without_own(self.constraints)
        self.now = self.place.solver.solve(
            self.constraints, exact=False, time_limit_s=self.seconds_left, settled=self.kept, cancelled=self.cancelled
        )
        found = self.place.chosen(self.now.strategy)
        self.chosen = found[0] if len(found) == 1 else None
        if len(self.kept) < len(self.constraints):  # an own pin goes: what is settled is the problem without it
            self.place.solver.solve(self.kept, exact=False, time_limit_s=self.seconds_left, settled=self.kept)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def fill(self, exact: bool | None, threads: int | None) -> None:
        """Every row that is not known for certain."""
        wanted = [p for p in self.place.legal if p not in self.rows or self.rows[p].status in ("feasible", UNDECIDED)]
        count = min(threads or os.cpu_count() or 1, MOST_THREADS, max(1, len(wanted)))
        solvers: queue.SimpleQueue[Solver] = queue.SimpleQueue()
        for solver in (self.place.solver, *(self.place.solver.twin() for _ in range(count - 1))):
            solvers.put(solver)

        def work(placements: Placements) -> None:
            solver = solvers.get()
            try:
                self.set(self._solve(solver, placements, exact))
            finally:
                solvers.put(solver)

        with ThreadPoolExecutor(count) as executor:
            for _ in executor.map(work, wanted):
                pass

    def set(self, override: Override) -> None:
        """Keeps the better of two answers."""
        known = self.rows.get(override.placements)
        if known is not None and known.objective_us is not None:
            if override.objective_us is None:
                return
            bound = max(known.bound_us or 0.0, override.bound_us or 0.0)
            better = override if override.objective_us <= known.objective_us else known
            override = replace(better, bound_us=bound, status=override.status if override.certified else better.status)
        self.rows[override.placements] = override
        self.row(override)

    def _solve(self, solver: Solver, placements: Placements, exact: bool | None) -> Override:
        is_chosen = placements == self.chosen
        if is_chosen and exact is False:
            return self._override(placements, self.now)
        if self.seconds_left <= 0.0 or (self.cancelled is not None and self.cancelled()):
            return Override(placements=placements, status=UNDECIDED, chosen=is_chosen)
        pinned = self.place.pinned_to(placements)
        try:
            found = solve_with(solver, pinned, self.kept, exact=exact, time_limit_s=self.seconds_left, cancelled=self.cancelled)
        except InfeasibleError as error:
            others = others_than(pinned, error)
            return Override(placements=placements, status=IMPOSSIBLE, chosen=is_chosen, conflicts=others)
        except SolverError:
            return Override(placements=placements, status=UNDECIDED, chosen=is_chosen)
        return self._override(placements, found)

    def _override(self, placements: Placements, found: Solution) -> Override:
        report, now = found.report, self.now
        return Override(
            placements=placements,
            status=report.status,
            objective_us=report.objective_us,
            bound_us=report.bound_us,
            peak_bytes=found.used_bytes,
            delta_us=report.objective_us - now.report.objective_us,
            delta_bytes=(found.used_bytes or 0) - (now.used_bytes or 0),
            chosen=placements == self.chosen,
        )
