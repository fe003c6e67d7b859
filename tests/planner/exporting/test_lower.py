from dataclasses import replace

import pytest

from planner.errors import ExportError
from planner.exporting.lower import lower
from planner.exporting.program import Arrive, Block, Call, Move, Program, Statement, Value
from planner.graph import BACKWARD, FORWARD, TensorRef
from planner.plan import Plan
from planner.schedule import BlockKey
from tests.planner.exporting.small_plan import P, R, small_graph, small_plan


def lowered(layers: int = 2) -> Program:
    graph = small_graph(layers=layers)
    return lower(small_plan(graph), graph)


def every_statement(block: Block) -> tuple[Statement, ...]:
    return *block.unshard, *block.statements, *block.reduce


def test_blocks_run_in_order_forward_and_then_backward() -> None:
    keys = [block.key for block in lowered(3).blocks]
    assert keys == [BlockKey(FORWARD, i) for i in (0, 1, 2, 3)] + [BlockKey(BACKWARD, i) for i in (3, 2, 1, 0)]


def test_every_redistribution_is_carried_out_exactly_once() -> None:
    program = lowered(3)
    moves = [s.number for block in program.blocks for s in every_statement(block) if isinstance(s, Move)]
    assert sorted(moves) == list(range(len(program.plan.redistributions)))


def test_every_op_runs_exactly_once_after_what_it_reads() -> None:
    program = lowered(3)
    ready: set[Value] = {Value(TensorRef(n, 0)) for n, node in enumerate(program.graph.nodes) if not node.is_op}
    calls = []
    for block in program.blocks:
        for statement in every_statement(block):
            if isinstance(statement, Arrive):
                assert statement.result in ready
            elif isinstance(statement, Move):
                assert statement.source in ready
                ready.add(statement.result)
            else:
                assert all(value in ready for value in statement.operands if value is not None)
                ready.add(Value(TensorRef(statement.node, 0)))
                calls.append(statement.node)
    assert sorted(calls) == [n for n, node in enumerate(program.graph.nodes) if node.is_op]


def test_backward_reads_tensors_as_produced_and_no_gathered_parameter() -> None:
    program = lowered()
    for block in program.blocks:
        for value in block.saved:
            assert value.moved is None
            assert program.graph.nodes[value.ref.node].is_op
    assert any(block.saved for block in program.blocks)


def test_gradients_leave_in_the_layout_of_their_parameter() -> None:
    program = lowered()
    stored = {node: value for block in program.blocks for node, value in block.gradients}
    assert len(stored) == 2
    for node, value in stored.items():
        assert program.placements(value) == program.plan.choices[program.graph.nodes[node].key].outputs[0]


def test_parameters_are_gathered_ahead_and_gradients_reduced_behind() -> None:
    last = next(block for block in lowered().blocks if block.key == BlockKey(BACKWARD, 1))
    (gather,), (reduction,) = last.unshard, last.reduce
    assert isinstance(gather, Move) and gather.begun and reduction.begun
    kinds = [type(statement) for statement in last.statements]
    assert kinds == [Call, Arrive, Call], "the weight gradient; the weight arrives where the input gradient reads it"
    assert last.weights == (gather.result,) and last.handed == (reduction.source,)
    assert all(program_value.moved is None for program_value in last.handed)


@pytest.mark.parametrize("number", range(6))
def test_a_missing_redistribution_is_noticed(number: int) -> None:
    graph = small_graph()
    plan = small_plan(graph)
    kept = tuple(r for n, r in enumerate(plan.redistributions) if n != number)
    with pytest.raises(ExportError, match="the plan brings it as"):
        lower(replace(plan, redistributions=kept), graph)


def test_a_wrong_source_layout_is_noticed() -> None:
    graph = small_graph()
    plan = small_plan(graph)
    first = replace(plan.redistributions[0], source=P)
    with pytest.raises(ExportError, match="starts from P, but the tensor is S\\(0\\)"):
        lower(replace(plan, redistributions=(first, *plan.redistributions[1:])), graph)


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(ExportError, match="another model"):
        lower(small_plan(small_graph(layers=3)), small_graph(layers=2))


def shared_plan() -> tuple[Plan, object]:
    """The last hidden tensor is made once more `R` for both operands of the square: one shared redistribution."""
    graph = small_graph()
    plan = small_plan(graph)
    gather = replace(
        plan.redistributions[0],
        tensor=("layers.1.fc/linear/fwd#0", 0),
        shared=True,
        consumers=(("mul/fwd#0", 0), ("mul/fwd#0", 1)),
    )
    square = replace(plan.choices["mul/fwd#0"], operands=(R, R), outputs=(R,))
    total = replace(plan.choices["sum/fwd#0"], operands=(R,), outputs=(R,))
    loss = replace(plan.choices["div/fwd#0"], operands=(R,), outputs=(R,))
    kept = tuple(r for r in plan.redistributions if r.tensor[0] != "div/fwd#0")
    choices = {**plan.choices, "mul/fwd#0": square, "sum/fwd#0": total, "div/fwd#0": loss}
    return replace(plan, redistributions=(*kept, gather), choices=choices), graph


def test_a_shared_redistribution_serves_all_its_readers() -> None:
    plan, graph = shared_plan()
    program = lower(plan, graph)  # type: ignore[arg-type]
    after = next(block for block in program.blocks if block.key == BlockKey(FORWARD, 2))
    move, square = after.statements[:2]
    assert isinstance(move, Move) and isinstance(square, Call)
    assert square.operands == (move.result, move.result)


def test_two_shared_layouts_of_one_tensor_are_refused() -> None:
    plan, graph = shared_plan()
    twice = replace(plan, redistributions=(*plan.redistributions, plan.redistributions[-1]))
    with pytest.raises(ExportError, match="shares two layouts"):
        lower(twice, graph)  # type: ignore[arg-type]
