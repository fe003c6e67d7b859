"""Ties and forbidden collectives on a real model: what they cost, that they hold, how conflicts are named, undo, replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.constraint import (
    Allow,
    Constraint,
    Forbid,
    ForbidCollective,
    MemoryBudget,
    Pin,
    SamePlacement,
    holds,
    parse_forbid,
)
from planner.errors import InfeasibleError, InvalidConstraintError, InvalidMeshError, PlanFormatError
from planner.graph import TensorRef
from planner.placement import parse, text
from planner.plan import Plan
from planner.solving.assemble import facts_of
from planner.workbench import Workbench
from tests.planner.recipes_common import ROOMY, bench

MODEL, MESH = "llama3-tiny", "dp=2,tp=2"
NO_EXCHANGE = ForbidCollective(collective="all_to_all", axis="*")
WQ = "layers.*.attention.wq.weight"


def workbench() -> Workbench:
    return bench(MODEL, MESH)


def solve(*constraints: Constraint) -> Plan:
    found = workbench()
    return found.solve([*found.default_constraints(ROOMY), *constraints])


def pin(where: str, placements: str) -> Pin:
    return Pin(where=where, placements=parse(placements))


def stored(plan: Plan, layer: int) -> str:
    placements = plan.choices[f"param:layers.{layer}.attention.wq.weight"].outputs[0]
    assert placements is not None
    return text(placements)


def test_a_tie_carries_a_pin_from_one_layer_to_all() -> None:
    free = solve()
    alone = solve(pin("layers.0.attention.wq.weight", "S(1)S(0)"))
    both = solve(pin("layers.0.attention.wq.weight", "S(1)S(0)"), SamePlacement(where=WQ))
    assert stored(both, 0) == stored(both, 1) == "S(1)S(0)"
    assert stored(alone, 1) == stored(free, 1)
    assert free.objective_us <= alone.objective_us <= both.objective_us
    pinned = solve(pin(WQ, "S(1)S(0)"))
    assert both.report.status == pinned.report.status == "optimal"
    assert both.objective_us == pytest.approx(pinned.objective_us, rel=2e-6)


def test_a_tie_is_between_tensors_of_any_shape() -> None:
    found = workbench()
    tie = SamePlacement(where="layers.*.feed_forward.*.weight")
    plan = found.solver.solve([tie, pin("layers.1.feed_forward.w2.weight", "S(0)S(1)")])
    assert holds(tie, facts_of(found.costs, plan)) and plan.report.status == "optimal"


def test_two_pins_that_a_tie_joins_are_named_with_it() -> None:
    pins = pin("layers.0.attention.wq.weight", "S(1)S(0)"), pin("layers.1.attention.wq.weight", "RR")
    innocent = pin("layers.1.ffn_norm.weight", "RR")
    with pytest.raises(InfeasibleError) as refused:
        solve(*pins, innocent, SamePlacement(where=WQ, note="shorter"))
    assert set(refused.value.conflicts) == {*(p.describe() for p in pins), f"tie {WQ}"}
    assert f"tie {WQ}" in refused.value.message


def test_a_forbidden_collective_is_not_in_the_plan_and_costs_no_less() -> None:
    free = solve()
    kinds = {kind.partition("@")[0] for counts in free.collective_counts.values() for kind in counts}
    for kind in sorted(kinds):
        try:
            plan = solve(ForbidCollective(collective=kind, axis="*"))
        except InfeasibleError as refused:
            assert refused.conflicts == (f"forbid {kind}@*", "boundary output:loss = RR") or kind == "all_reduce"
            continue
        assert not any(label.startswith(kind) for counts in plan.collective_counts.values() for label in counts)
        assert plan.objective_us >= free.objective_us * (1 - 1e-6) and plan.report.status == "optimal"


def test_the_loss_cannot_be_reduced_without_collectives() -> None:
    with pytest.raises(InfeasibleError) as refused:
        solve(ForbidCollective(collective="*", axis="dp"), NO_EXCHANGE)
    assert "forbid *@dp" in refused.value.conflicts and "forbid all_to_all@*" not in refused.value.conflicts
    assert any(name.startswith("boundary input") for name in refused.value.conflicts)


def test_a_budget_below_the_least_memory_of_tied_plans_is_named_with_the_tie() -> None:
    with pytest.raises(InfeasibleError) as refused:
        solve(SamePlacement(where=WQ), NO_EXCHANGE, MemoryBudget(num_bytes=2**20))
    assert any(name.startswith("memory budget") for name in refused.value.conflicts)
    assert f"tie {WQ}" not in refused.value.conflicts and (refused.value.shortfall_bytes or 0) > 0


def test_undo_is_exact() -> None:
    """Any of the constraints taken away again, in any order: the former optimum, to the last choice."""
    every: list[Constraint] = [
        pin("layers.0.attention.wo", "S(0)R"), SamePlacement(where=WQ), NO_EXCHANGE,
        Allow(where="output.weight", options=(parse("S(0)S(1)"), parse("RS(0)"))),
        Forbid(where="tok_embeddings.weight", options=(parse("RR"),)),
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    before = {count: solve(*every[:count]) for count in range(len(every) + 1)}
    for count in (*rng.permutation(len(every)), 0):
        again = solve(*every[:count])
        assert again.to_json()["choices"] == before[count].to_json()["choices"]
        assert again.objective_us == before[count].objective_us and again.plan_id == before[count].plan_id


def test_a_saved_plan_keeps_constraints_and_replays() -> None:
    found = workbench()
    plan = solve(NO_EXCHANGE, SamePlacement(where=WQ, note="uniform"), Forbid(where="norm.weight", options=(parse("S(0)R"),)))
    loaded = Plan.from_json(plan.to_json())
    assert loaded.constraints == plan.constraints
    again = found.replay(loaded)
    assert again.objective_us == pytest.approx(plan.objective_us) and again.collective_counts == plan.collective_counts


def test_a_plan_that_breaks_its_own_constraints_is_refused() -> None:
    found = workbench()
    plan = solve()
    other = "RR" if stored(plan, 0) != "RR" else "S(0)S(1)"
    claims = pin("layers.0.attention.wq.weight", other), ForbidCollective(collective="*", axis="*"), MemoryBudget(num_bytes=1)
    for claim in claims:
        with pytest.raises(PlanFormatError, match="does not keep its own constraints") as refused:
            found.replay(replace(plan, constraints=(claim,)))
        assert claim.describe() in refused.value.message or "with the collectives that it allows" in refused.value.message


def test_options_that_cannot_be() -> None:
    with pytest.raises(InvalidConstraintError, match="none of these is among its placements") as refused:
        solve(Allow(where="norm.weight", options=(parse("S(3)R"),)))
    assert "Legal placements" in refused.value.hint
    found = workbench()
    legal = found.legal("param:norm.weight")
    with pytest.raises(InvalidConstraintError, match="no other placement"):
        solve(Forbid(where="norm.weight", options=legal))
    with pytest.raises(InvalidConstraintError, match="matches no parameter"):
        solve(SamePlacement(where="layers.*.nothing"))
    with pytest.raises(InvalidMeshError, match="no axis 'pp'"):
        solve(ForbidCollective(collective="all_gather", axis="dp+pp"))
    with pytest.raises(InvalidConstraintError, match="1 placements for the 2 axes"):
        solve(Forbid(where="norm.weight", options=(parse("R"),)))


def test_forbid_leaves_the_rest() -> None:
    free = solve()
    used = free.choices["param:norm.weight"].outputs[0]
    assert used is not None
    plan = solve(parse_forbid(f"norm.weight={text(used)}", workbench().mesh))
    other = plan.choices["param:norm.weight"].outputs[0]
    assert other is not None and text(other) != text(used)
    assert TensorRef(workbench().graph.node_by_key["param:norm.weight"], 0) in workbench().space.lattice_of
