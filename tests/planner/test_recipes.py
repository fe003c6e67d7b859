"""Recipes on the sample models: the collectives that their names promise, what cannot have them, and that no recipe beats the
free optimum."""

from __future__ import annotations

from collections import Counter

import pytest

from planner import models
from planner.constraint import Pin, holds
from planner.dims import DimRoles
from planner.errors import InfeasibleError, InvalidConstraintError
from planner.graph import BACKWARD, TensorRef, layer_of
from planner.mesh import Mesh
from planner.placement import parse
from planner.plan import Plan
from planner.recipes import RECIPES, Expansion, Recipe
from tests.planner.recipes_common import bench, planned

TINY = [info.name for info in models() if info.name.endswith("-tiny") and "region" not in info.name]
TRANSFORMERS = ["llama3-tiny", "gpt2-tiny"]
SCALAR = 16
"""Bytes of the largest tensor that is only reduced on the way to the loss."""

Counts = Counter[str]


def collectives(plan: Plan, phase: str, *, layer: int | None = None, larger_than: int = SCALAR) -> Counts:
    """`kind@axes` -> calls in a phase (of one layer), those on scalars left out."""
    found: Counts = Counter()
    for r in plan.redistributions:
        if r.phase == phase and (layer is None or layer_of(r.tensor[0]) == layer):
            for step in r.steps:
                if step.collective is not None and step.collective.full_bytes > larger_than:
                    found[f"{step.collective.kind}@{plan.axes_text(step.collective.axes)}"] += 1
    return found


def num_trained(model: str, mesh: str) -> int:
    return sum(p.gradient is not None for p in bench(model, mesh).graph.parameters)


def num_read(model: str, mesh: str, phase: str) -> int:
    """Parameters that ops of a phase read, directly or through ops on parameters alone."""
    graph = bench(model, mesh).graph
    roles = DimRoles.of(bench(model, mesh).space)
    readers: set[int] = set()
    of: dict[int, set[int]] = {p.node: {p.node} for p in graph.parameters}
    for index, node in enumerate(graph.nodes):
        made = set().union(*(of.get(ref.node, set()) for ref in node.operands if roles.is_weight(ref)))
        if node.is_op and roles.is_weight(TensorRef(index, 0)):
            of[index] = made
        elif node.is_op and node.phase == phase:
            readers |= made
    return len(readers)


@pytest.mark.parametrize("model", TINY)
def test_ddp_reduces_each_gradient_once_and_does_nothing_else(model: str) -> None:
    plan = planned(bench(model, "dp=4"), "ddp")
    assert collectives(plan, "forward") == {}
    assert collectives(plan, BACKWARD) == {"all_reduce@dp": num_trained(model, "dp=4")}
    on_two = planned(bench(model, "dp=2,tp=2"), "ddp")
    assert collectives(on_two, BACKWARD) == {"all_reduce@dp+tp": num_trained(model, "dp=4")}


@pytest.mark.parametrize("model", TINY)
def test_fsdp_gathers_parameters_in_both_phases_and_scatters_gradients(model: str) -> None:
    plan = planned(bench(model, "dp=4"), "fsdp")
    assert collectives(plan, "forward") == {"all_gather@dp": num_read(model, "dp=4", "forward")}
    assert collectives(plan, BACKWARD) == {
        "all_gather@dp": num_read(model, "dp=4", BACKWARD), "reduce_scatter@dp": num_trained(model, "dp=4"),
    }  # fmt: skip
    whole = planned(bench(model, "dp=4"), "ddp").memory
    assert 4 * plan.memory.parameter_bytes == whole.parameter_bytes


@pytest.mark.parametrize("model", TINY)
def test_hsdp_scatters_in_the_group_and_reduces_between_groups(model: str) -> None:
    plan = planned(bench(model, "dp=2,tp=2"), "hsdp")
    count = num_trained(model, "dp=2,tp=2")
    assert collectives(plan, BACKWARD) == {
        "reduce_scatter@tp": count, "all_reduce@dp": count, "all_gather@tp": num_read(model, "dp=2,tp=2", BACKWARD),
    }  # fmt: skip


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_tp_reduces_twice_per_layer_and_direction(model: str) -> None:
    plan = planned(bench(model, "dp=2,tp=2"), "tp")
    per_layer = num_trained(model, "dp=2,tp=2")
    for layer in (0, 1):
        assert collectives(plan, "forward", layer=layer) == {"all_reduce@tp": 2}
        backward = collectives(plan, BACKWARD, layer=layer)
        assert backward.pop("all_reduce@dp") <= per_layer
        assert backward == {"all_reduce@tp": 2}


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_tp_sp_gathers_and_scatters_in_pairs(model: str) -> None:
    """In backward what was gathered in forward is gathered again for the weights' gradients."""
    plan = planned(bench(model, "dp=2,tp=2"), "tp_sp")
    for layer in (0, 1):
        assert collectives(plan, "forward", layer=layer) == {"all_gather@tp": 2, "reduce_scatter@tp": 2}
        backward = collectives(plan, BACKWARD, layer=layer)
        assert (backward["all_gather@tp"], backward["reduce_scatter@tp"]) == (4, 2)
        assert not any(kind.startswith("all_to_all") for kind in backward)


def test_fsdp_tp_sp_is_both() -> None:
    plan = planned(bench("llama3-tiny", "dp=2,tp=2"), "fsdp_tp_sp")
    for layer in (0, 1):
        assert collectives(plan, "forward", layer=layer) == {"all_gather@dp": 9, "all_gather@tp": 2, "reduce_scatter@tp": 2}
    backward = collectives(plan, BACKWARD)
    assert backward["reduce_scatter@dp"] + backward["all_reduce@dp+tp"] >= num_trained("llama3-tiny", "dp=2,tp=2")


def test_recipes_on_axes_of_their_own_are_one_recipe() -> None:
    together = planned(bench("llama3-tiny", "dp=2,tp=2"), "fsdp_tp_sp:dp,tp")
    apart = planned(bench("llama3-tiny", "dp=2,tp=2"), "fsdp:dp", "tp_sp:tp")
    assert apart.objective_us == pytest.approx(together.objective_us, rel=1e-6)


def test_ep_exchanges_tokens() -> None:
    plan = planned(bench("moe-tiny", "dp=2,ep=2"), "ep")
    for layer in (0, 1):
        assert collectives(plan, "forward", layer=layer) == {"all_to_all@ep": 2}
        assert collectives(plan, BACKWARD, layer=layer)["all_to_all@ep"] == 2
    assert str(plan.choices["param:layers.0.moe.experts.w1"].outputs[0][1]) == "S(0)"  # type: ignore[index]


SLOW_MESHES = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("dp=4", "tp=2,dp=4", "dp=2,ep=2,tp=2")]


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", *SLOW_MESHES])
@pytest.mark.parametrize("model", TINY)
def test_no_recipe_beats_the_free_optimum(model: str, mesh: str) -> None:
    found = bench(model, mesh)
    free = planned(found)
    feasible = 0
    for recipe in RECIPES:
        try:
            plan = planned(found, recipe)
        except (InvalidConstraintError, InfeasibleError) as refused:
            assert refused.hint
            continue
        feasible += 1
        assert plan.objective_us >= free.objective_us * (1 - 1e-6), recipe
        assert free.report.bound_us <= plan.objective_us * (1 + 1e-9)
    assert feasible >= 2


def test_removing_a_recipe_gives_back_the_former_optimum() -> None:
    found = bench("llama3-tiny", "dp=2,tp=2")
    before = planned(found)
    planned(found, "tp_sp")
    after = planned(found)
    assert after.to_json()["choices"] == before.to_json()["choices"] and after.objective_us == before.objective_us


# ---- what cannot be had ---------------------------------------------------------------------------------------------
def test_no_experts() -> None:
    with pytest.raises(InvalidConstraintError, match="no experts"):
        planned(bench("llama3-tiny", "dp=2,tp=2"), "ep")


def test_heads_that_do_not_divide() -> None:
    found = bench("llama3-tiny", "dp=2,tp=3", 18)
    with pytest.raises(InvalidConstraintError, match=r"does not divide over tp=3; nearest sizes that work") as refused:
        planned(found, "tp")
    assert "recipe tp on dp, tp" in refused.value.message


def test_batch_that_does_not_divide() -> None:
    with pytest.raises(InvalidConstraintError, match=r"batch: dim 0 of size 18 .* dp=2 x tp=4"):
        planned(bench("llama3-tiny", "dp=2,tp=4", 18), "ddp")


def test_one_axis_is_too_few() -> None:
    for recipe in ("hsdp", "fsdp_tp_sp"):
        with pytest.raises(InvalidConstraintError, match="at least 2 mesh axes"):
            Recipe.parse(recipe, Mesh.parse("dp=4"))


def test_a_pin_against_a_recipe_is_named_with_it() -> None:
    found = bench("llama3-tiny", "dp=2,tp=2")
    pin = Pin(where="layers.0.attention.wq.weight", placements=parse("S(0)S(0)"))
    with pytest.raises(InfeasibleError) as refused:
        found.solve([Recipe.parse("ddp", found.mesh), pin])
    assert set(refused.value.conflicts) == {"recipe ddp on dp, tp", pin.describe()}


def test_a_plan_of_a_recipe_holds_it_and_another_does_not() -> None:
    from planner.solving.assemble import facts_of

    found = bench("llama3-tiny", "dp=2,tp=2")
    recipe = Recipe.parse("tp_sp", found.mesh)
    assert holds(recipe, facts_of(found.costs, found.solver.solve([recipe])))
    assert not holds(recipe, facts_of(found.costs, found.solver.solve([Recipe.parse("ddp", found.mesh)])))


# ---- what dims are ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", TINY)
def test_few_ops_cannot_follow_data_parallelism(model: str) -> None:
    found = bench(model, "dp=4")
    expansion = Expansion(Recipe.parse("ddp", found.mesh), DimRoles.of(found.space))
    expansion.masks()
    left = {found.graph.nodes[node].name for node, _ in expansion.left_free}
    assert left <= {"expand"}, left  # the gradient of a mean over samples, made of a scalar


def test_roles_of_dims() -> None:
    found = bench("moe-tiny", "dp=2,ep=2")
    roles = DimRoles.of(found.space)

    def colour(key: str, dim: int) -> int:
        return roles.colours[TensorRef(found.graph.node_by_key[key], 0)][dim]

    experts = "param:layers.0.moe.experts.w1"
    assert colour(experts, 0) in roles.experts and colour(experts, 1) in roles.inner and colour(experts, 2) in roles.outer
    assert colour("param:layers.0.attention.wq.weight", 0) in roles.inner
    assert colour("param:layers.0.attention.wo.weight", 0) in roles.outer
    assert colour("param:output.weight", 0) in roles.vocabulary and colour("param:tok_embeddings.weight", 0) in roles.vocabulary
    assert colour("input:tokens", 0) in roles.samples and colour("input:tokens", 1) in roles.sequence
