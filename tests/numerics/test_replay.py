"""A saved plan, read and priced again on the same model, is the same plan and the same file, to the byte."""

from __future__ import annotations

import json

import pytest

from planner.constraint import Pin
from planner.exporting.script import write_script
from planner.matching import planned_graph
from planner.placement import parse
from planner.plan import Plan
from planner.workbench import Workbench
from tests.numerics.exported import Model, any_plan, optimum, recipe


def plan_of(bench: Workbench, what: str) -> Plan:
    if what == "pinned":
        pins = {"layers.*.attention.wq.weight": "S(0)R", "layers.0": "S(0)S(1)"}
        return bench.solve(
            [*bench.default_constraints(), *(Pin(where=where, placements=parse(text)) for where, text in pins.items())],
            exact=False,
        )
    if what == "checkpointed":
        return bench.solve(bench.default_constraints(), exact=False, checkpoint="full:1")
    made = {"optimum": optimum, "recipe": lambda bench: recipe(bench, "fsdp_tp_sp"), "random": lambda bench: any_plan(bench, 1)}
    return made[what](bench)


@pytest.mark.parametrize("what", ["optimum", "recipe", "pinned", "checkpointed", "random"])
def test_a_replayed_plan_gives_the_same_bytes(llama: Model, bench: Workbench, what: str) -> None:
    plan = plan_of(bench, what)
    again = bench.replay(Plan.from_json(json.loads(plan.dumps())))
    assert again.dumps() == plan.dumps(), "the plan beside the file"
    texts = [write_script(p, planned_graph(p, llama.full), planned_graph(p, llama.tiny)) for p in (plan, again)]
    assert texts[0] == texts[1]
