"""What users meet: pins that are refused and why, conflicts, budgets, shared placements, reports."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.constraint import BoundaryPlacement, MemoryBudget, Pin
from planner.cost import CostTable
from planner.errors import InfeasibleError, InvalidConstraintError, SolverError
from planner.graph import BACKWARD, FORWARD, Node, TensorMeta, TensorRef
from planner.mesh import Mesh
from planner.placement import P, parse
from planner.solving.solve import Progress, Solver
from planner.strategy import BannedRow, Lattice, Strategies
from tests.oracles.small_spaces import costs_of, full_lattice, graph_of, leaf, op, strategies

MESH = Mesh.parse("dp=2,tp=4")
ACTIVATION = TensorMeta((24, 8), "float32")
WEIGHT = TensorMeta((8, 8), "float32")


def mlp(mesh: Mesh = MESH, batch: int = 24) -> CostTable:
    """x -> fc1 -> relu -> fc2 -> loss, with gradients of both weights. Every op takes every whole placement (same in and out);
    fc ops also leave a pending sum over tp."""
    activation = TensorMeta((batch, 8), "float32")
    nodes = [
        leaf("input", "x", activation),
        leaf("param", "fc1.weight", WEIGHT),
        leaf("param", "fc2.weight", WEIGHT),
        op("fc1/linear/fwd#0", (TensorRef(0, 0), TensorRef(1, 0)), meta=activation),
        op("relu/relu/fwd#0", (TensorRef(3, 0),), meta=activation),
        op("fc2/linear/fwd#0", (TensorRef(4, 0), TensorRef(2, 0)), meta=activation),
        op("fc1/linear/bwd#0", (TensorRef(0, 0), TensorRef(5, 0)), phase=BACKWARD, meta=WEIGHT),
        op("fc2/linear/bwd#0", (TensorRef(4, 0), TensorRef(5, 0)), phase=BACKWARD, meta=WEIGHT),
        Node(
            key="output:loss", op="output", name="output", kind="output", phase=FORWARD,
            operands=(TensorRef(5, 0),), outputs=(activation,),
        ),
    ]  # fmt: skip
    graph = graph_of(nodes, gradients={1: TensorRef(6, 0), 2: TensorRef(7, 0)}, loss=TensorRef(5, 0))
    lattices = {activation: full_lattice(activation, mesh), WEIGHT: full_lattice(WEIGHT, mesh)}
    options = [_options(node, lattices) for node in nodes]
    rng = np.random.default_rng(0)
    weight = lattices[WEIGHT]
    num_bytes = {i: 4 * weight.local_bytes[options[i].output(0)] for i in (1, 2)}
    return costs_of(graph, mesh, options, [rng.uniform(1, 20, len(s)) for s in options], lattices=lattices, num_bytes=num_bytes)


def _options(node: Node, lattices: dict[TensorMeta, Lattice]) -> Strategies:
    meta = node.outputs[0]
    assert meta is not None
    whole = np.flatnonzero(~lattices[meta].is_partial)
    rows = [(int(p), *[0] * len(node.operands)) for p in whole]  # operands replicated
    if node.name == "op" and meta != WEIGHT and node.key.startswith("relu"):
        rows += [(int(p), int(p)) for p in whole]
    if node.key.startswith("fc"):
        pending = [0] * (lattices[meta].mesh.num_axes - 1) + [P]
        rows += [(int(lattices[meta].index(np.array(pending))), *[0] * len(node.operands))]
    return strategies(sorted(set(rows)), len(node.operands))


def pin(where: str, placements: str, mesh: Mesh = MESH) -> Pin:
    return Pin(where=where, placements=parse(placements, mesh))


@pytest.fixture(scope="module")
def solver() -> Solver:
    return Solver(mlp())


def placements_of(solver: Solver, strategy: np.ndarray, node: int) -> str:
    space = solver.costs.space
    return space.lattice(TensorRef(node, 0)).text(int(space.strategies[node].output(0)[strategy[node]]))


def test_plan_without_constraints_is_proved(solver: Solver) -> None:
    found = solver.solve()
    assert found.report.status == "optimal" and found.report.gap <= 1e-6
    assert len(found.strategy) == len(solver.costs.space.graph.nodes)
    # x and the output of relu are read once forward and once backward, the loss tensor once forward and twice backward
    assert set(found.shared) == {(TensorRef(5, 0), BACKWARD)}


def test_pin_holds_and_unpinning_restores(solver: Solver) -> None:
    before = solver.solve()
    pinned = solver.solve((pin("fc1.weight", "S(0)S(1)"),))
    assert placements_of(solver, pinned.strategy, 1) == "S(0)S(1)"
    assert pinned.report.objective_us >= before.report.objective_us
    after = solver.solve()
    assert after.report.objective_us == before.report.objective_us and (after.strategy == before.strategy).all()


def test_pattern_pins_everything_it_matches(solver: Solver) -> None:
    found = solver.solve((pin("*.weight", "RS(0)"),))
    assert [placements_of(solver, found.strategy, node) for node in (1, 2)] == ["RS(0)", "RS(0)"]


def test_pin_on_a_module_is_its_last_forward_output(solver: Solver) -> None:
    found = solver.solve((pin("fc1", "RS(1)"),))
    assert placements_of(solver, found.strategy, 3) == "RS(1)"


def test_legal_placements_can_all_be_pinned_and_others_are_refused(solver: Solver) -> None:
    space = solver.costs.space
    for node in (1, 4):
        ref = TensorRef(node, 0)
        legal = solver.legal(ref)
        key = space.graph.nodes[node].key.removeprefix("param:")
        for number in range(len(space.lattice(ref))):
            asked = Pin(where=key, placements=space.lattice(ref).placements(number))
            if number in legal:
                assert solver.solve((asked,)).report.status == "optimal"
            else:
                with pytest.raises(InvalidConstraintError):
                    solver.solve((asked,))


@pytest.mark.parametrize(
    ("where", "placements", "reason"),
    [
        ("fc1.weight", "S(2)R", "dim 2 does not exist"),
        ("relu", "PR", "no strategy of relu/relu/fwd#0"),
        ("nothing.*", "RR", "matches no"),
    ],
)
def test_impossible_pins_say_why_and_list_what_is_legal(solver: Solver, where: str, placements: str, reason: str) -> None:
    with pytest.raises(InvalidConstraintError) as refused:
        solver.solve((pin(where, placements),))
    assert reason in refused.value.message
    assert refused.value.hint
    if "nothing" not in where:
        assert "Legal placements" in refused.value.hint and "RR" in refused.value.hint


def test_wrong_number_of_placements_is_refused(solver: Solver) -> None:
    with pytest.raises(InvalidConstraintError, match="1 placements for the 2 axes"):
        solver.solve((Pin(where="fc1.weight", placements=parse("S(0)")),))


def test_indivisible_dim_names_sizes_that_work() -> None:
    mesh = Mesh.parse("dp=8")
    solver = Solver(mlp(mesh, batch=30))
    boundary = BoundaryPlacement(where="input:x", placements=parse("S(0)", mesh))
    with pytest.raises(InvalidConstraintError) as refused:
        solver.solve((boundary,))
    assert "batch 30 does not divide over dp=8" in refused.value.message
    assert "24, 32" in refused.value.message


def test_reasons_of_banned_rows_are_shown() -> None:
    costs = mlp()
    banned = BannedRow(axis=1, row="S(1) -> S(1)", reason="30 heads over tp=4")
    relu = costs.space.strategies[4]
    plain = [s for s in range(len(relu)) if relu.output(0)[s] == 0]
    narrowed = Strategies(relu.columns[plain], 1, (0,), relu.kernel, relu.rule, (banned,))
    options = [narrowed if i == 4 else s for i, s in enumerate(costs.space.strategies)]
    compute = [us[plain] if i == 4 else us for i, us in enumerate(costs.compute_us)]
    lattices = {lattice.meta: lattice for lattice in costs.space.lattices}
    solver = Solver(costs_of(costs.space.graph, MESH, options, compute, lattices=lattices))
    with pytest.raises(InvalidConstraintError, match="30 heads over tp=4"):
        solver.solve((pin("relu", "RS(1)"),))


def test_shard_on_an_axis_of_size_one_means_replicate() -> None:
    mesh = Mesh.parse("dp=1,tp=4")
    solver = Solver(mlp(mesh))
    found = solver.solve((pin("fc1.weight", "S(0)S(1)", mesh),))
    assert placements_of(solver, found.strategy, 1) == "RS(1)"


# ---- conflicts ----------------------------------------------------------------------------------------------------------
def test_two_pins_on_one_tensor_are_both_named(solver: Solver) -> None:
    with pytest.raises(InfeasibleError) as refused:
        solver.solve((pin("fc1.weight", "RS(0)"), pin("fc1.weight", "RS(1)")))
    assert set(refused.value.conflicts) == {"pin fc1.weight = RS(0)", "pin fc1.weight = RS(1)"}


def test_smallest_conflict_among_ten_pins(solver: Solver) -> None:
    harmless = [pin(w, p) for w, p in (("fc2.weight", "RR"), ("relu", "RS(0)"), ("input:x", "RR"), ("fc2", "RR"))]
    harmless += [pin(f"{m}/linear/bwd#0", p) for m in ("fc1", "fc2") for p in ("RR",)]
    harmless += [BoundaryPlacement(where="output:loss", placements=parse("RR", MESH)), pin("*2.weight", "RR")]  # type: ignore[list-item]
    clash = [pin("fc1", "RR"), pin("fc1/linear/fwd#0", "S(0)R")]
    with pytest.raises(InfeasibleError) as refused:
        solver.solve((*harmless[:5], clash[0], *harmless[5:], clash[1]))
    assert set(refused.value.conflicts) == {c.describe() for c in clash}
    for left_out in range(2):
        assert solver.solve((*harmless, clash[left_out])).report.objective_us > 0


# ---- memory -------------------------------------------------------------------------------------------------------------
def test_budget_in_bytes_is_exact_at_the_limit(solver: Solver) -> None:
    least = 2 * 4 * WEIGHT.num_bytes // 8
    found = solver.solve((MemoryBudget(num_bytes=least),))
    assert found.used_bytes == least
    with pytest.raises(InfeasibleError) as refused:
        solver.solve((MemoryBudget(num_bytes=least - 1),))
    assert refused.value.shortfall_bytes == 1
    assert f"{least} B" in refused.value.message and f"{least - 1} B" in refused.value.message
    assert refused.value.conflicts == (MemoryBudget(num_bytes=least - 1).describe(),)


def test_pin_and_budget_that_clash_are_both_named_with_bytes(solver: Solver) -> None:
    whole, eighth = 4 * WEIGHT.num_bytes, 4 * WEIGHT.num_bytes // 8
    budget, wanted = MemoryBudget(num_bytes=whole), pin("fc1.weight", "RR")
    with pytest.raises(InfeasibleError) as refused:
        solver.solve((wanted, budget, pin("relu", "RR")))
    assert set(refused.value.conflicts) == {budget.describe(), wanted.describe()}
    assert refused.value.shortfall_bytes == eighth
    assert f"pin fc1.weight = RR keeps {whole} B" in refused.value.message
    assert str(whole + eighth) in refused.value.hint
    assert solver.solve((budget,)).used_bytes is not None
    fits = MemoryBudget(num_bytes=whole + eighth)
    first, second = solver.solve((wanted, fits)), solver.solve((fits, wanted))
    assert (first.strategy == second.strategy).all()
    assert first.report.objective_us == second.report.objective_us


def test_more_memory_never_costs_time(solver: Solver) -> None:
    whole = 4 * WEIGHT.num_bytes
    values = [
        solver.solve((MemoryBudget(num_bytes=b),)).report.objective_us for b in range(whole // 4, 2 * whole + 1, whole // 8)
    ]
    assert all(later <= earlier * (1 + 2e-6) for earlier, later in itertools.pairwise(values))


def test_budget_of_nothing_is_refused(solver: Solver) -> None:
    with pytest.raises(InvalidConstraintError):
        solver.solve((MemoryBudget(num_bytes=0),))


# ---- running ------------------------------------------------------------------------------------------------------------
def test_progress_is_told() -> None:
    told: list[Progress] = []
    Solver(mlp()).solve(progress=told.append)
    assert told and told[-1].value_us >= told[-1].bound_us > 0


def test_cancelled_solve_leaves_the_solver_as_it_was(solver: Solver) -> None:
    fresh = Solver(solver.costs)
    with pytest.raises(SolverError, match="no plan was found"):
        fresh.solve(cancelled=lambda: True)
    expected, found = solver.solve(), fresh.solve()
    assert (found.strategy == expected.strategy).all()
    assert found.report.objective_us == expected.report.objective_us


def test_bound_is_below_value_without_the_exact_step(solver: Solver) -> None:
    found = solver.solve((pin("relu", "RS(1)"), MemoryBudget(num_bytes=700)), exact=False)
    assert found.report.bound_us <= found.report.objective_us
    assert found.report.status == ("optimal" if found.report.gap <= 1e-6 else "feasible")
