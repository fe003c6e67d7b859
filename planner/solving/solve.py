"""Solver: prices + constraints -> the cheapest plan with a proven bound.

Everyday path: message passing. Without pins it starts from a shallow model of the same layers (`folding`), with pins from the
messages of the same problem without them. If that does not prove the plan, what the gap leaves open goes to the exact integer
program if it is small enough and time allows; otherwise the plan is `feasible` and the gap is said. The same input gives the
same plan, whatever was solved before.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.constraint import Allow, Constraint, Forbid, Pin
from planner.cost import CostTable
from planner.errors import InfeasibleError, SolverError
from planner.graph import TensorRef
from planner.plan import SolveReport
from planner.recipes import Recipe
from planner.solving import message_passing
from planner.solving.budget import CLOSE_ENOUGH, BudgetOutcome, solve_within_budget
from planner.solving.conflicts import explain_budget, explain_placements, has_plan, living
from planner.solving.consistency import make_consistent
from planner.solving.core import solve_core
from planner.solving.demands import Demand, costs_under, demands_of, ties_of
from planner.solving.folding import OUTSIDE, Places, fold
from planner.solving.ilp import Watch
from planner.solving.kernels import Messages
from planner.solving.least_memory import least_memory
from planner.solving.message_passing import TOLERANCE, Effort, MessagePassing, Outcome
from planner.solving.nudges import nudge_prices
from planner.solving.problem import PairwiseProblem, SharedKey, build_problem
from planner.solving.restrictions import Restriction, legal_numbers, restrict, tightest_budget
from planner.solving.variants import Variants

MAX_CORE_COLUMNS = 100_000
"""A core with more variables than this is not given to the integer program."""

OVERRIDES = (Pin, Allow, Forbid)
"""Constraints that come and go: a solve with them starts from the same problem without them."""

_BUDGET_SWEEPS, _BUDGET_SWEEPS_PINNED = 32, 8
_PRICES, _PRICES_PINNED = 14, 3
_CLOSE_ENOUGH_PINNED = 1e-3
_STRATEGIES_PINNED, _SWEEPS_PINNED = 15_000_000, (72, 300)
"""After a pin: whole sweeps at most, so many that about this number of strategies is looked at, between two limits."""

_AT_ONCE_S, _SHORTEST_S, _LONGEST_S = 3.5e-6, 0.8, 3.0
"""After a pin: how long a solve may search, per strategy, that shall answer at once; two limits. The proof is asked for apart."""

_WINDOW_WIDTHS = (1, 2, 4)
"""Layers on each side of a pinned one, where messages settle before those of the whole model."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a solve stands."""

    value_us: float
    bound_us: float
    seconds: float
    method: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """A plan in numbers.

    Attributes:
        strategy: int64 [graph nodes], strategy number of each node.
        shared: placement number of every shared placement, by (tensor, phase).
        report: status, value and bound.
        used_bytes: memory on a device, as the budget counts it; None if the plan was not solved but replayed.
        us_per_byte: what a byte more of memory would be worth; 0 if the budget does not bind.
        costs: the prices it was found with, those without forbidden collectives; None means as given.
    """

    strategy: np.ndarray
    shared: Mapping[SharedKey, int]
    report: SolveReport
    used_bytes: int | None = None
    us_per_byte: float = 0.0
    costs: CostTable | None = None


@dataclass(eq=False)
class _Base:
    """The problem without pins, solved: where every solve with pins starts, and what unpinning gives back."""

    outcome: Outcome
    method: str
    price: float
    corners: tuple[np.ndarray, ...]
    state: tuple[np.ndarray, Messages]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Start:
    """Where a search begins: plans, a price per byte and the gap of a similar problem, and where it differs."""

    effort: Effort
    plan: np.ndarray | None = None
    corners: tuple[np.ndarray, ...] = ()
    price: float = 0.0
    gap: float = 0.0
    windows: Sequence[np.ndarray] = ()


@dataclass(eq=False)
class _Run:
    """One call of `solve`: its limits and its listeners."""

    began: float
    deadline: float
    exact: bool | None
    progress: Callable[[Progress], None] | None
    cancelled: Callable[[], bool] | None
    restrictions: Sequence[Restriction] = field(default=())
    based_on: frozenset[Constraint] = frozenset()

    def effort(self, **how: float) -> Effort:
        tell = None if self.progress is None else self._tell_round
        return Effort(deadline=self.deadline, cancelled=self.cancelled, tell=tell, **how)  # type: ignore[arg-type]

    def bound_only(self, effort: Effort) -> Effort:
        """The same effort on a problem with fewer constraints: its plans are none, its bounds hold."""
        tell = effort.tell
        return effort if tell is None else replace(effort, tell=lambda value, bound: tell(math.inf, bound))

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def tell(self, value_us: float, bound_us: float, method: str) -> None:
        if self.progress is not None:
            seconds = time.monotonic() - self.began
            self.progress(Progress(value_us=value_us, bound_us=bound_us, seconds=seconds, method=method))

    def watch(self, outcome: Outcome) -> Watch:
        """For the integer program on what a solve left open: the better of both values, and the bound of the whole."""

        def tell(value: float, bound: float) -> None:
            best = min(value, outcome.value_us)
            self.tell(best, min(best, max(bound, outcome.bound_us)), "integer program")

        return Watch(self.cancelled, tell)

    def _tell_round(self, value_us: float, bound_us: float) -> None:
        self.tell(value_us, bound_us, "message passing")


class Solver:
    """All solves of one cost table. Keeps messages warm; changes nothing it was given."""

    def __init__(self, costs: CostTable, demands: tuple[Demand, ...] = ()) -> None:
        self.costs = costs_under(costs, demands)
        self.problem: PairwiseProblem = build_problem(self.costs, ties_of(costs, demands))
        self._demands = demands
        self._variants = Variants(self, demands)
        self._recipes: dict[Recipe, Restriction] = {}
        places = Places.of(self.costs, self.problem)
        self._layer = places.layer
        self._folding = fold(self.problem, places)
        self._passing = MessagePassing(self.problem, nudge_prices(self.problem, places.address))
        self._fresh = self._passing.save()
        self._bases: dict[tuple[Constraint, ...], _Base] = {}

    def twin(self) -> Solver:
        """A solver of the same problem that can work beside this one, in another thread; what is settled here is known there."""
        other = copy.copy(self)
        other._passing = MessagePassing(self.problem, self._passing.nudges_us)
        other._bases = dict(self._bases)
        return other

    def under(self, constraints: Sequence[Constraint]) -> Solver:
        """The solver that answers for these constraints: forbidden collectives and ties make another problem."""
        return self._variants.solver(demands_of(tuple(constraints), self.costs.space.mesh))

    def warm_up(self) -> float:
        """Compile all loops. -> seconds it took"""
        return message_passing.warm_up()

    def restrict(self, constraint: Constraint) -> Restriction:
        """What a constraint rules out here; recipes, which look at the whole graph, are remembered.

        Raises:
            InvalidConstraintError: it cannot be meant for this model and mesh.
        """
        if not isinstance(constraint, Recipe):
            return restrict(constraint, self.costs, self.problem)
        if constraint not in self._recipes:
            self._recipes[constraint] = restrict(constraint, self.costs, self.problem)
        return self._recipes[constraint]

    def legal(self, ref: TensorRef) -> tuple[int, ...]:
        """Placement numbers that can be pinned at a tensor."""
        return tuple(map(int, legal_numbers(ref, self.costs, self.problem)))

    def solve(
        self,
        constraints: Sequence[Constraint] = (),
        *,
        time_limit_s: float = 60.0,
        exact: bool | None = None,
        progress: Callable[[Progress], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        settled: Sequence[Constraint] = (),
        also: Sequence[Restriction] = (),
    ) -> Solution:
        """The cheapest plan that satisfies all constraints.

        `exact`: None = use the integer program if the plan is not proved and the core is small; True = whatever its size;
        False = never, and after a change of pins no more than a few seconds (`_AT_ONCE_S`) are spent on what is still open.
        `cancelled` is polled; a cancelled solve returns the best plan so far. Of several solves with the same
        pins and one more each, the `settled` pins are solved once and each starts from there. `also` are restrictions that no
        constraint can say.

        Raises:
            InvalidConstraintError: a constraint cannot be meant for this model and mesh.
            InfeasibleError: no plan satisfies all constraints; names the smallest conflicting set.
            SolverError: no plan was found within the time limit.
        """
        began = time.monotonic()
        run = _Run(began, began + time_limit_s, exact, progress, cancelled)
        constraints = tuple(dict.fromkeys(constraints))
        demands = demands_of(constraints, self.costs.space.mesh)
        if demands != self._demands:
            return self._variants.solve(
                demands, constraints, time_limit_s=time_limit_s, exact=exact, progress=progress, cancelled=cancelled
            )
        run.restrictions = [*map(self.restrict, constraints), *also]
        unpinned = tuple(c for c in constraints if not isinstance(c, OVERRIDES) or c in settled)
        run.based_on = frozenset(unpinned)
        alive = living(self.problem, run.restrictions)
        if alive is None:
            raise explain_placements(self.problem, run.restrictions, time_limit_s=max(1.0, run.seconds_left))
        base = self._base(unpinned, run)
        if len(unpinned) == len(run.restrictions):
            return self._solution(base.outcome, base.method, run, base.price)
        found, method = self._pinned(base, alive, run)
        return self._solution(found.outcome, method, run, found.price)

    # ---- without pins ---------------------------------------------------------------------------------------------
    def _base(self, unpinned: tuple[Constraint, ...], run: _Run) -> _Base:
        if unpinned in self._bases:
            return self._bases[unpinned]
        restrictions = [r for r in run.restrictions if r.constraint in run.based_on]
        alive = living(self.problem, restrictions)
        assert alive is not None, "fewer restrictions leave more"
        self._passing.restore(self._fresh)
        inner = replace(run, restrictions=restrictions)
        if len(restrictions) < len(run.restrictions):
            inner.progress = None  # its values and bounds are those of another problem
        found, method = self._search(alive, inner, _Start(effort=inner.effort()))
        base = _Base(found.outcome, method, found.price, found.corners, self._passing.save())
        if not run.effort().expired():
            self._keep(unpinned, base)
        return base

    def _keep(self, unpinned: tuple[Constraint, ...], base: _Base) -> None:
        """Of the bases with pins in them only the last one stays: their messages take memory."""
        for known in [known for known in self._bases if any(isinstance(c, OVERRIDES) for c in known)]:
            del self._bases[known]
        self._bases[unpinned] = base

    def _search(self, alive: np.ndarray, run: _Run, start: _Start) -> tuple[BudgetOutcome, str]:
        """Message passing, then the exact step if that is needed and possible. -> result, method"""
        cost = np.where(alive, self.problem.unary_us, np.inf)
        budget = tightest_budget(run.restrictions)
        limit = None if budget is None else budget.budget_bytes
        found = BudgetOutcome(self._from(cost, start)) if limit is None else self._within(cost, limit, run, start)
        run.tell(found.outcome.value_us, found.outcome.bound_us, "message passing")
        outcome, method = self._finish(found, alive, limit, run)
        return replace(found, outcome=outcome), method

    def _from(self, cost: np.ndarray, start: _Start) -> Outcome:
        """Message passing at these prices; without a plan to begin with, from a shallow model of the same layers."""
        self._passing.set_costs(cost)
        plan = start.plan
        if plan is None and self._folding is not None:
            plan = self._folding.start(self._passing, replace(start.effort, tell=None))
        return self._passing.run(start.effort, plan, start.windows)

    def _within(self, cost: np.ndarray, limit: int, run: _Run, start: _Start) -> BudgetOutcome:
        """As `_search` under a memory budget: without it first, unless a price per byte is known."""
        corners, again = start.corners, start.price > 0.0
        if not again:
            free = self._from(cost, replace(start, effort=run.bound_only(start.effort)))
            if math.isfinite(free.value_us) and self.problem.used_bytes(free.choice) <= limit:
                return BudgetOutcome(free)
            corners = (free.choice,) if math.isfinite(free.value_us) else ()

        def smallest() -> np.ndarray | None:
            least = least_memory(self.problem, np.isfinite(cost), run.effort(max_sweeps=100))
            if least.bound_bytes > limit:
                raise explain_budget(self.problem, run.restrictions, least, run.effort(max_sweeps=100))
            return least.choice if math.isfinite(least.num_bytes) else None

        return solve_within_budget(
            self._passing,
            cost,
            limit,
            replace(start.effort, max_sweeps=_BUDGET_SWEEPS_PINNED if again else _BUDGET_SWEEPS),
            layers=self._layer,
            price=start.price,
            plans=() if start.plan is None else (start.plan,),
            corners=corners,
            windows=start.windows,
            smallest=smallest,
            close_enough=max(_CLOSE_ENOUGH_PINNED, 1.3 * start.gap) if again else CLOSE_ENOUGH,
            few_prices=_PRICES_PINNED if again else _PRICES,
        )

    # ---- with pins ------------------------------------------------------------------------------------------------
    def _pinned(self, base: _Base, alive: np.ndarray, run: _Run) -> tuple[BudgetOutcome, str]:
        self._passing.restore(base.state)
        sweeps = int(np.clip(_STRATEGIES_PINNED // self.problem.num_strategies, *_SWEEPS_PINNED))
        effort = run.effort(max_sweeps=sweeps, patience=6, round_sweeps=4, mend_every=2, eps_us=1e-5, ahead=True)
        if run.exact is False:
            seconds = float(np.clip(_AT_ONCE_S * self.problem.num_strategies, _SHORTEST_S, _LONGEST_S))
            effort = replace(effort, deadline=min(effort.deadline, time.monotonic() + seconds))
        cost = np.where(alive, self.problem.unary_us, np.inf)
        windows = self._windows([r for r in run.restrictions if r.constraint not in run.based_on])
        start = _Start(
            effort=effort,
            plan=self._adapt(base.outcome.choice, cost),
            corners=tuple(self._adapt(plan, cost) for plan in base.corners),
            price=base.price,
            gap=base.outcome.gap,
            windows=windows,
        )
        return self._search(alive, run, start)

    def _adapt(self, plan: np.ndarray, cost: np.ndarray) -> np.ndarray:
        """A plan for other restrictions: strategies that are ruled out are replaced by living ones."""
        lay = self.problem.layout
        adapted = plan.copy()
        for node in np.flatnonzero(~np.isfinite(cost[lay.first[:-1] + plan])):
            adapted[node] = int(np.argmin(cost[lay.span(int(node))]))
        return adapted

    def _windows(self, restrictions: Sequence[Restriction]) -> tuple[np.ndarray, ...]:
        """Nodes of the layers around the restrictions, nearer and farther; none if these are not in a few layers. What lies
        outside of the layers is near the first and the last one."""
        pinned = [node for r in restrictions for node in r.masks]
        layers, last = {int(self._layer[node]) for node in pinned}, int(self._layer.max(initial=OUTSIDE))
        outside = OUTSIDE in layers
        if outside:
            layers = layers - {OUTSIDE} | {0, last}
        if len(layers) > 3 or not layers or last == OUTSIDE:
            return ()
        found: list[np.ndarray] = []
        for width in _WINDOW_WIDTHS:
            near = {layer + step for layer in layers for step in range(-width, width + 1)}
            at_an_end = min(near) <= 0 or max(near) >= last
            if outside or (found and at_an_end):  # what comes before the first layer and after the last one is near too
                near.add(OUTSIDE)
            found.append(np.isin(self._layer, sorted(near)))
        return tuple(found)

    # ---- exact step, result ---------------------------------------------------------------------------------------
    def _finish(self, found: BudgetOutcome, alive: np.ndarray, limit: int | None, run: _Run) -> tuple[Outcome, str]:
        outcome = found.outcome
        if outcome.proved or run.exact is False or run.effort().expired():
            return outcome, "message passing"
        if not math.isfinite(outcome.value_us):
            left = max(1.0, run.seconds_left)
            if has_plan(self.problem, alive, time_limit_s=left) is False:
                raise explain_placements(self.problem, run.restrictions, time_limit_s=left)
        open_cost = self._open_strategies(found, alive)
        exact = solve_core(
            self.problem.layout, open_cost, self.problem.num_bytes, budget_bytes=limit,
            max_columns=10**9 if run.exact else MAX_CORE_COLUMNS, time_limit_s=run.seconds_left,
            gap_us=0.2 * TOLERANCE * abs(outcome.value_us) if math.isfinite(outcome.value_us) else 1e-6,
            watch=run.watch(outcome),
        )  # fmt: skip
        if exact is None:
            return outcome, "message passing"
        if exact.status == "infeasible" and not math.isfinite(outcome.value_us):
            names = [r.text for r in run.restrictions]
            raise InfeasibleError("no plan satisfies all constraints", hint="Remove one of them.", conflicts=names)
        improved = self._better(outcome, exact.choice, exact.value_us, exact.bound_us)
        run.tell(improved.value_us, improved.bound_us, "integer program")
        return improved, "message passing + integer program"

    def _open_strategies(self, found: BudgetOutcome, alive: np.ndarray) -> np.ndarray:
        """Prices with every strategy ruled out that cannot be part of a better plan."""
        outcome = found.outcome
        cost = np.where(alive, self.problem.unary_us, np.inf)
        if not math.isfinite(outcome.value_us):
            return cost
        reduced = self._passing.reduced_costs()
        bound = self._passing.bound_now() - found.offset_us
        margin = 1e-9 * abs(outcome.value_us)
        still = alive & (bound + reduced <= outcome.value_us + margin)
        still[self.problem.layout.first[:-1] + outcome.choice] = True
        make_consistent(self.problem.layout, still)
        return np.where(still, self.problem.unary_us, np.inf)

    @staticmethod
    def _better(outcome: Outcome, choice: np.ndarray | None, value: float, bound: float) -> Outcome:
        """The better of both plans. The exact bound speaks for what was left open; everything else is at least `value_us`."""
        if choice is not None and value < outcome.value_us:
            outcome = replace(outcome, choice=choice, value_us=value)
        proven = min(outcome.value_us, max(outcome.bound_us, bound))
        return replace(outcome, bound_us=proven)

    def _solution(self, outcome: Outcome, method: str, run: _Run, price: float) -> Solution:
        seconds = time.monotonic() - run.began
        if not math.isfinite(outcome.value_us):
            raise SolverError(
                f"no plan was found within {seconds:.1f} s", hint="Give more time, or remove some pins."
            )  # fmt: skip
        number = self.problem.chosen_numbers(outcome.choice)
        chosen = number[self.problem.node_of]
        at = np.fromiter(self.problem.shared_of.values(), np.int64, len(self.problem.shared_of))
        shared = dict(zip(self.problem.shared_of, number[at].tolist(), strict=True))
        report = SolveReport(
            status="optimal" if outcome.proved else "feasible",
            objective_us=outcome.value_us,
            bound_us=outcome.bound_us,
            method=method,
            seconds=seconds,
        )
        used = self.problem.used_bytes(outcome.choice)
        return Solution(strategy=chosen, shared=shared, report=report, used_bytes=used, us_per_byte=price, costs=self.costs)
