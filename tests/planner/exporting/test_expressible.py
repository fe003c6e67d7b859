"""Which plans can be said as a recipe of modules, in which words, and every reason why others cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli import main
from planner.errors import ExportError
from planner.exporting.expressible import expressible
from planner.exporting.module_recipe import ModuleRecipe, Reason
from planner.exporting.recipe_file import LABEL, FactorySource, write_recipe
from planner.graph import JointGraph
from planner.pipeline import not_expressible
from planner.placement import parse
from planner.plan import Choice, Plan
from planner.recipes import Recipe
from tests.oracles.random_plan import random_plan
from tests.planner.exporting.small_plan import MESH, small_graph, small_plan
from tests.planner.recipes_common import ROOMY, bench, planned

GOLDEN = Path(__file__).parents[2] / "golden" / "small_recipe.py.txt"
SOURCE = FactorySource(module="sample_models.llama3", function="llama3_tiny", full={"batch": 16}, tiny={"size": "tiny"})


def read(model: str, mesh: str, recipe: str) -> ModuleRecipe:
    found = bench(model, mesh)
    plan = planned(found, recipe)
    said = expressible(plan, found.graph)
    assert isinstance(said, ModuleRecipe), said
    return said


@pytest.mark.parametrize(
    ("recipe", "uses", "sequence"),
    [
        ("ddp", ((0, 1), (), ()), None),
        ("fsdp", ((), (0, 1), ()), None),
        ("hsdp", ((0,), (1,), ()), None),
        ("tp", ((0,), (), (1,)), None),
        ("tp_sp", ((0,), (), (1,)), 1),
        ("fsdp_tp_sp", ((), (0,), (1,)), 1),
    ],
)
def test_the_recipes_of_llama(recipe: str, uses: tuple[tuple[int, ...], ...], sequence: int | None) -> None:
    said = read("llama3-tiny", "dp=2,tp=2", recipe)
    assert (said.replicate, said.shard, said.tensor) == uses
    assert said.sequence_dim == sequence
    assert said.blocks == ("layers.0", "layers.1")
    if said.tensor:
        into = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
        assert set(said.column) == {*(f"layers.*.{name}" for name in into), "output"}
        assert set(said.row) == {"layers.*.attention.wo", "layers.*.feed_forward.w2"}
        assert said.embeddings == (("tok_embeddings", "rows"),)
        assert said.sources == ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")
        assert said.norms == (said.sources if sequence else ())
    else:
        assert not (said.column or said.row or said.norms or said.sources)
    split = dict.fromkeys((*said.column, "tok_embeddings"), 1) if said.tensor and said.shard else {}
    assert dict(said.shard_dims) == {f"{name}.weight": dim for name, dim in split.items()}


def test_biases_and_tied_tables_of_gpt2() -> None:
    said = read("gpt2-tiny", "dp=2,tp=2", "fsdp_tp_sp")
    assert "head" in said.column and said.embeddings == (("wte", "rows"),)
    assert any("attn.query.bias is stored RS(0)" in note for note in said.notes)


# ---- refusals ------------------------------------------------------------------------------------------------------------


def reasons(plan: Plan, graph: JointGraph) -> list[str]:
    found = expressible(plan, graph)
    assert isinstance(found, list), found
    return [str(reason) for reason in found]


@pytest.fixture
def small() -> tuple[Plan, JointGraph]:
    graph = small_graph()
    return small_plan(graph), graph


def changed(plan: Plan, key: str, operands: tuple[str, ...], output: str) -> Plan:
    choice = Choice(operands=tuple(parse(text, MESH) for text in operands), outputs=(parse(output, MESH),), compute_us=1.0)
    return replace(plan, choices={**plan.choices, key: choice})


def test_a_small_plan_is_fsdp(small: tuple[Plan, JointGraph]) -> None:
    said = expressible(*small)
    assert isinstance(said, ModuleRecipe)
    assert said.shard == (0,) and said.reshard


def test_layers_that_differ_are_named(small: tuple[Plan, JointGraph]) -> None:
    plan, graph = small
    found = reasons(changed(plan, "layers.1.fc/linear/fwd#0", ("R", "S(0)"), "S(1)"), graph)
    assert any(" on dp, where most products are " in reason for reason in found)
    assert any(r.startswith("layers.1.fc/linear/fwd#0: is laid out R S(0) -> S(1), layers.0.fc/linear/fwd#0") for r in found)


def test_a_product_split_in_no_known_way_is_named(small: tuple[Plan, JointGraph]) -> None:
    plan, graph = small
    for key in ("layers.0.fc/linear/fwd#0", "layers.1.fc/linear/fwd#0"):
        plan = changed(plan, key, ("P", "R"), "P")
    assert any("neither column-, row-, data-parallel nor replicated" in reason for reason in reasons(plan, graph))


def test_a_matrix_stored_unlike_the_others_is_named() -> None:
    graph = small_graph(layers=3)
    plan = changed(small_plan(graph), "param:layers.2.fc.weight", (), "R")
    assert [r for r in reasons(plan, graph) if r.startswith("param:layers.2.fc.weight: is stored R")]


def test_an_activation_that_moves_is_named(small: tuple[Plan, JointGraph]) -> None:
    plan, graph = small
    moved = replace(plan.redistributions[0], tensor=("layers.0.fc/linear/fwd#0", 0), consumers=(("layers.1.fc/linear/fwd#0", 0),))
    found = reasons(replace(plan, redistributions=(*plan.redistributions, moved)), graph)
    assert found == [
        "layers.0.fc/linear/fwd#0: is moved from S(0) to R on dp for layers.1.fc/linear/fwd#0; "
        "samples stay where they are in a recipe"
    ]


def test_models_that_a_recipe_cannot_call(small: tuple[Plan, JointGraph]) -> None:
    plan, graph = small
    assert any("returns no loss" in reason for reason in reasons(plan, replace(graph, stand_in_loss=True)))
    assert any("dropouts" in reason for reason in reasons(plan, replace(graph, dropouts=((0, 0),))))
    assert any("user-controlled region" in reason for reason in reasons(replace(plan, regions={"exchange": "dp"}), graph))


def test_random_plans_are_refused_by_op() -> None:
    found = bench("llama3-tiny", "dp=2,tp=2")
    for seed in (1, 2, 3):
        told = not_expressible(random_plan(found.costs, seed), found.graph)
        keys = [reason.partition(": ")[0] for reason in told]
        assert len(keys) > 50
        assert all(key in found.graph.node_by_key or key.startswith("axis ") for key in keys)


def test_layers_alike_but_not_a_recipe() -> None:
    """Every layer decides the same, and ops still differ from what modules imply."""
    found = bench("llama3-tiny", "dp=2,tp=2")
    assert not_expressible(random_plan(found.costs, 4, layers_alike=True), found.graph)


def test_axes_in_an_order_that_fsdp_cannot_have() -> None:
    found = bench("llama3-tiny", "tp=2,dp=2")
    plan = found.solve([*found.default_constraints(ROOMY), Recipe.parse("fsdp_tp_sp:dp,tp", found.mesh)], exact=False)
    assert [r for r in not_expressible(plan, found.graph) if r.startswith("axis tp") or r.startswith("axis dp")]


# ---- the file ------------------------------------------------------------------------------------------------------------


def test_the_file_says_that_it_is_approximate_and_the_recipe_is_readable() -> None:
    """After a wanted change: write the new text to the golden file."""
    found = bench("llama3-tiny", "dp=2,tp=2")
    plan = planned(found, "fsdp_tp_sp")
    text = write_recipe(plan, found.graph, None, SOURCE, ["forward: all_gather@dp 3 (plan 21)"])
    assert text.splitlines()[0] == f'"""RECIPE, {LABEL}.'
    assert "measured   forward: all_gather@dp 3 (plan 21)\n           fully_shard sends one message for all" in text
    assert text == write_recipe(Plan.from_json(plan.to_json()), found.graph, None, SOURCE, ["forward: all_gather@dp 3 (plan 21)"])
    begin, end = (text.index(mark) for mark in ("# ---- the recipe: edit here", "# ---- model, data, loss"))
    assert text[begin:end] == GOLDEN.read_text()
    assert max(map(len, text[begin:end].splitlines())) <= 130


def test_lines_of_the_head_fit_however_many_collectives_were_measured() -> None:
    found = bench("llama3-tiny", "dp=2,tp=2")
    counted = [f"{kind}@{axes} {number} (plan 7)" for number, kind in enumerate(KINDS) for axes in ("dp", "tp", "dp+tp")]
    text = write_recipe(planned(found, "fsdp_tp_sp"), found.graph, None, SOURCE, [f"backward: {', '.join(counted)}"])
    head = text[: text.index("import argparse")]
    assert max(map(len, head.splitlines())) <= 130 and all(item in head for item in counted)
    assert head.isascii() and "),\nverify" not in head


KINDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


def test_a_refusal_lists_reasons_and_says_what_to_do(small: tuple[Plan, JointGraph]) -> None:
    plan, graph = small
    with pytest.raises(ExportError, match="cannot be said as a recipe of modules") as refused:
        write_recipe(replace(plan, regions={"exchange": "dp"}), graph, None, SOURCE)
    assert "--format script" in refused.value.hint
    assert refused.value.details["reasons"] == [str(Reason("exchange", _REGION))]
    assert "or plan with --recipe first" in refused.value.hint
    with pytest.raises(ExportError, match="could not import this model"):
        write_recipe(plan, graph, None, None)


def test_a_refusal_names_the_axes_that_recipes_left_free() -> None:
    found = bench("llama3-tiny", "dp=2,tp=2")
    plan, graph = planned(found, "tp_sp"), found.graph
    for written, hint in (
        (["tp_sp:tp"], "all axes: dp is free in this plan (--recipe tp_sp:dp,tp)."),
        (["ddp:dp"], "all axes: tp is free in this plan (--recipe ddp:dp,tp)."),
        (["tp_sp:tp", "ddp:dp"], "which runs any plan exactly."),
    ):
        recipes = tuple(Recipe.parse(text, plan.mesh) for text in written)
        with pytest.raises(ExportError) as refused:
            write_recipe(replace(plan, regions={"exchange": "dp"}, constraints=recipes), graph, None, SOURCE)
        assert refused.value.hint.endswith(hint), written


_REGION = "a user-controlled region has a contract that the styles of modules cannot say"


def test_the_command_writes_a_recipe_and_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench("llama3-tiny", "dp=2,tp=2")
    plan, graph, out = tmp_path / "plan.json", tmp_path / "graph.json.gz", tmp_path / "recipe.py"
    planned(found, "tp_sp").save(plan)
    found.graph.save(graph)
    asked = ["export", str(plan), "--graph", str(graph), "-o", str(out), "--format", "recipe", "--no-verify"]
    assert main([*asked, "--slurm"]) != 0
    assert not out.exists() and "--slurm belongs to --format script" in capsys.readouterr().err
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert LABEL in said and "the loss is computed split on tp in the plan" in said and "not checked" in said
    text = out.read_text()
    assert "from sample_models.llama3 import llama3_tiny as factory" in text
    assert 'FULL, TINY = {"batch": 16}, {"size": "tiny", "layers": 2}' in text
    random_plan(found.costs, 1).save(plan)
    assert main(asked) != 0
    assert "cannot be said as a recipe of modules" in capsys.readouterr().err
