"""Sizes, meshes, pins, budgets, saved plans and equal layers: what a plan may depend on, and what it must not."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from planner.constraint import Constraint, MemoryBudget, Pin, SamePlacement
from planner.errors import InfeasibleError, InvalidConstraintError, PlanFormatError
from planner.graph import JointGraph, ModelRequest
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.placement import parse
from planner.plan import Plan
from planner.workbench import Workbench

MODELS = Path(__file__).with_name("planning_models.py")


@cache
def case(name: str) -> JointGraph:
    return trace(ModelRequest(model=f"{MODELS}:{name}", precision="as-traced"))


@cache
def bench_of(name: str, mesh: str) -> Workbench:
    return Workbench.build(case(name), Mesh.parse(mesh))


def solve(name: str, mesh: str, *constraints: Constraint) -> Plan:
    return bench_of(name, mesh).solve(constraints)


def pin(where: str, placed: str, mesh: str) -> Pin:
    return Pin(where=where, placements=parse(placed, Mesh.parse(mesh)))


# ---- sizes that do not divide ------------------------------------------------------------------------------------------------
def test_every_piece_is_even() -> None:
    for name, mesh in (("nine_outputs", "tp=8"), ("nine_outputs", "dp=6,tp=8"), ("sizes_of_two", "dp=3,tp=6")):
        for lattice in bench_of(name, mesh).space.lattices:
            shape, sizes = np.array(lattice.meta.shape), np.array(lattice.mesh.axis_sizes)
            for codes, local in zip(lattice.codes, lattice.local_shapes, strict=True):
                pieces = [int(np.prod(sizes[codes == 3 + dim])) for dim in range(len(shape))]
                assert (local * pieces == shape).all()


@pytest.mark.parametrize(
    ("where", "placed", "mesh", "said"),
    [
        ("down.weight", "S(0)", "tp=8", ("9", "tp=8", "nearest sizes that work: 8, 16")),
        ("input:x", "S(0)S(0)", "dp=6,tp=8", ("24", "48")),
        ("up.weight", "S(1)", "tp=3", ("16", "tp=3", "15, 18")),
    ],
)
def test_a_pin_that_does_not_divide_is_refused_with_sizes_that_do(where: str, placed: str, mesh: str, said: tuple[str]) -> None:
    with pytest.raises(InvalidConstraintError) as refused:
        solve("nine_outputs", mesh, pin(where, placed, mesh))
    assert all(part in refused.value.message for part in (where.removeprefix("input:"), *said))


def test_the_same_pins_work_where_they_divide() -> None:
    assert solve("nine_outputs", "tp=3", pin("down.weight", "S(0)", "tp=3")).report.status == "optimal"
    for placed in ("S(0)R", "RS(0)"):
        assert solve("nine_outputs", "dp=6,tp=8", pin("input:x", placed, "dp=6,tp=8")).report.status == "optimal"


def test_meshes_of_threes_and_sixes() -> None:
    plan = solve("sizes_of_three", "dp=3,tp=6", pin("input:x", "S(0)R", "dp=3,tp=6"), pin("up.weight", "RS(0)", "dp=3,tp=6"))
    assert plan.report.status == "optimal"
    bench = bench_of("sizes_of_two", "dp=3,tp=6")
    assert bench.solve(()).report.status == "optimal"
    product = next(node.key for node in bench.graph.nodes if node.name == "linear")
    assert any("does not divide" in row.reason for row in bench.banned(product))


# ---- axes --------------------------------------------------------------------------------------------------------------------
def test_an_axis_of_size_one_changes_nothing() -> None:
    plans = [solve("sizes_of_two", mesh) for mesh in ("tp=8", "dp=1,tp=8", "tp=8,cp=1", "dp=1,x=1,tp=8")]
    for plan in plans:
        assert plan.objective_us == pytest.approx(plans[0].objective_us, rel=1e-6)
        for r in plan.redistributions:
            for step in r.steps:
                axes = () if step.collective is None else step.collective.axes
                assert all(plan.mesh.axis_sizes[axis] > 1 for axis in axes)
    assert len({plan.memory.peak_bytes for plan in plans}) == 1


def test_one_device_moves_nothing() -> None:
    plan = solve("sizes_of_two", "dp=1", pin("up.weight", "S(0)", "dp=1"))
    assert plan.comm_us == 0 and not any(step.collective for r in plan.redistributions for step in r.steps)
    assert plan.memory.parameter_bytes == 4 * (32 * 64 + 64 * 32)


def test_plans_do_not_depend_on_what_was_planned_before() -> None:
    def fresh(mesh: str, hardware: str = "h100_sxm") -> tuple[float, int]:
        bench = Workbench.build(case("sizes_of_two"), Mesh.parse(mesh), hardware)
        plan = bench.solve(bench.default_constraints())
        return plan.objective_us, plan.memory.peak_bytes

    meshes = ["dp=2,tp=4", "dp=4,tp=2", "dp=8", "dp=2,cp=4"]
    there, back = [fresh(mesh) for mesh in meshes], [fresh(mesh) for mesh in reversed(meshes)]
    assert there == back[::-1] and there[0] == there[3]


def test_three_axes_do_not_cost_more_than_one() -> None:
    """Every placement over one axis of 8 is one over three axes of 2, and a reduction over all of them is one step."""
    assert solve("sizes_of_two", "a=2,b=2,c=2").objective_us <= solve("sizes_of_two", "a=8").objective_us * (1 + 1e-6)
    four = solve("sizes_of_two", "a=2,b=2,c=2,d=2")
    assert four.report.gap <= 1e-6


def test_a_reduction_over_two_axes_counts_its_bytes_once() -> None:
    bench = bench_of("sizes_of_two", "a=2,b=2,c=2")
    lattice, routes = next(
        (r.lattice, r) for r in bench.costs.routes if r.lattice.meta.shape == (64, 32) and r.lattice.is_partial.any()
    )

    def us(source: str, target: str) -> float:
        return float(routes.table_us[lattice.find(parse(source)), lattice.find(parse(target))])

    both, first, second = us("PS(0)P", "RS(0)R"), us("PS(0)P", "RS(0)P"), us("RS(0)P", "RS(0)R")
    assert max(first, second) - 1e-9 <= both <= first + second + 1e-9
    assert us("PPP", "S(0)S(0)S(0)") <= us("PPP", "RRR") + 1e-9


# ---- memory ------------------------------------------------------------------------------------------------------------------
def least_budget(name: str, mesh: str, *constraints: Constraint) -> int:
    with pytest.raises(InfeasibleError) as refused:
        solve(name, mesh, MemoryBudget(num_bytes=1), *constraints)
    assert refused.value.shortfall_bytes is not None
    return 1 + refused.value.shortfall_bytes


@pytest.mark.parametrize(("name", "mesh"), [("short_offset", "dp=8"), ("large_and_small", "dp=8"), ("nine_outputs", "dp=2,tp=4")])
def test_the_least_budget_works_and_a_byte_less_is_refused(name: str, mesh: str) -> None:
    least = least_budget(name, mesh)
    plans = [solve(name, mesh, MemoryBudget(num_bytes=size)) for size in (least, least + least // 3, 2 * least, 2**40)]
    assert all(a.objective_us >= b.objective_us * (1 - 1e-6) for a, b in itertools.pairwise(plans))
    assert plans[0].memory.peak_bytes == least
    assert plans[-1].objective_us == pytest.approx(solve(name, mesh).objective_us, rel=1e-6)
    with pytest.raises(InfeasibleError) as refused:
        solve(name, mesh, MemoryBudget(num_bytes=least - 1))
    assert str(least) in refused.value.message and str(least - 1) in refused.value.message


def test_a_parameter_shorter_than_the_mesh_is_never_split() -> None:
    for constraints in ((), (MemoryBudget(num_bytes=least_budget("short_offset", "dp=8")),)):
        plan = solve("short_offset", "dp=8", *constraints)
        assert "".join(map(str, plan.choices["param:offset"].outputs[0] or ())) == "R"


def test_half_the_memory_splits_what_is_large() -> None:
    whole = solve("large_and_small", "dp=8", pin("large.weight", "R", "dp=8"))
    plan = solve("large_and_small", "dp=8", MemoryBudget(num_bytes=whole.memory.peak_bytes // 2))
    assert "".join(map(str, plan.choices["param:large.weight"].outputs[0] or ())) != "R"


def test_pin_and_budget_in_either_order_and_both_named_when_they_clash() -> None:
    held, least = pin("large.weight", "R", "dp=8"), least_budget("large_and_small", "dp=8")
    with pytest.raises(InfeasibleError) as refused:
        solve("large_and_small", "dp=8", held, MemoryBudget(num_bytes=least))
    assert refused.value.shortfall_bytes is not None
    with_pin = least + refused.value.shortfall_bytes
    assert with_pin >= 256 * 256 * 16 > least  # the weight, its gradient and two moments, whole
    budget = MemoryBudget(num_bytes=with_pin)
    one, other = solve("large_and_small", "dp=8", held, budget), solve("large_and_small", "dp=8", budget, held)
    assert one.choices == other.choices and one.objective_us == other.objective_us
    with pytest.raises(InfeasibleError) as refused:
        solve("large_and_small", "dp=8", held, MemoryBudget(num_bytes=with_pin - 1))
    assert "large.weight" in refused.value.message and str(with_pin) in refused.value.message
    assert solve("large_and_small", "dp=8", MemoryBudget(num_bytes=with_pin - 1)).report.status in ("optimal", "feasible")


# ---- pins --------------------------------------------------------------------------------------------------------------------
def test_the_smallest_clash_among_ten_pins_is_named() -> None:
    mesh = "dp=2,tp=4"
    (up, *_) = [node.key for node in case("sizes_of_two").nodes if node.name == "linear"]
    harmless = [pin(where, "RR", mesh) for where in ("input:x", "up.weight", "down.weight")]
    clash = [pin(up, "RR", mesh), pin("up", "S(0)R", mesh)]
    with pytest.raises(InfeasibleError) as refused:
        solve("sizes_of_two", mesh, harmless[0], clash[0], *harmless[1:], clash[1])
    assert sorted(refused.value.conflicts) == sorted(c.describe() for c in clash)
    for left in clash:
        assert solve("sizes_of_two", mesh, *harmless, left).report.status == "optimal"


def test_pins_never_help_and_taking_them_back_restores() -> None:
    mesh = "dp=2,tp=4"
    bench = bench_of("sizes_of_two", mesh)
    free = bench.solve(())
    rng = np.random.default_rng(0)
    for _ in range(12):
        node = rng.choice([n.key for n in bench.graph.nodes if n.is_op or n.kind == "param"])
        legal = bench.legal(str(node))
        asked = Pin(where=str(node).removeprefix("param:"), placements=legal[int(rng.integers(len(legal)))])
        pinned = bench.solve((asked,))
        assert pinned.objective_us >= free.objective_us * (1 - 1e-6)
        if str(node).startswith("param:"):
            parameter = next(p for p in bench.graph.parameters if bench.graph.nodes[p.node].key == str(node))
            assert parameter.gradient is not None and pinned.choices[str(node)].outputs[0] == asked.placements
    again = bench.solve(())
    assert again.choices == free.choices and again.objective_us == free.objective_us
    fresh = Workbench.build(bench.graph, bench.mesh).solve(())
    assert fresh.objective_us == free.objective_us and fresh.choices == free.choices


# ---- saved plans -------------------------------------------------------------------------------------------------------------
def test_a_saved_plan_comes_back_and_saves_the_same_bytes(tmp_path: Path) -> None:
    mesh = "dp=2,tp=4"
    kept = pin("down.weight", "RS(0)", mesh)
    solve("sizes_of_two", mesh, pin("up.weight", "S(0)R", mesh))
    plan = solve("sizes_of_two", mesh, kept, MemoryBudget(num_bytes=2**30))
    plan.save(tmp_path / "one.json")
    loaded = Plan.load(tmp_path / "one.json")
    loaded.save(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert [c.describe() for c in loaded.constraints] == [c.describe() for c in plan.constraints]
    replayed = bench_of("sizes_of_two", mesh).replay(loaded)
    assert replayed.objective_us == pytest.approx(plan.objective_us, rel=1e-9) and replayed.choices == plan.choices
    for name, other in (("sizes_of_two", "dp=4,tp=2"), ("sizes_of_two", "tp=4,dp=2"), ("short_offset", mesh)):
        with pytest.raises(PlanFormatError):
            bench_of(name, other).replay(loaded)


# ---- equal layers ------------------------------------------------------------------------------------------------------------
def test_free_layers_are_never_dearer_than_tied_ones() -> None:
    mesh = "dp=2,tp=4"
    free = solve("deep_4", mesh)
    tied = solve("deep_4", mesh, SamePlacement(where="layers.*.up.weight"), SamePlacement(where="layers.*.down.weight"))
    assert free.objective_us <= tied.objective_us * (1 + 1e-6)
    placed = {str(tied.choices[f"param:layers.{layer}.up.weight"].outputs[0]) for layer in range(4)}
    assert len(placed) == 1


def test_a_pin_on_one_layer_acts_on_it_alone() -> None:
    mesh = "dp=2,tp=4"
    bench = bench_of("deep_4", mesh)
    free = bench.solve(())
    usual = free.choices["param:layers.2.up.weight"].outputs[0]
    other = next(p for p in bench.legal("param:layers.2.up.weight") if p != usual)
    plan = bench.solve((Pin(where="layers.2.up.weight", placements=other),))
    assert plan.choices["param:layers.2.up.weight"].outputs[0] == other
    everywhere = bench.solve((Pin(where="layers.*.up.weight", placements=other),))
    assert free.objective_us <= plan.objective_us * (1 + 1e-6) <= everywhere.objective_us * (1 + 2e-6)


def test_the_objective_grows_by_the_layer() -> None:
    two, four, eight = (solve(name, "dp=2,tp=4").objective_us for name in ("deep_2", "deep_4", "deep_8"))
    assert two < four < eight
    assert eight - four == pytest.approx(2 * (four - two), rel=0.2)
