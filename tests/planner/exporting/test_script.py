import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import ExportError
from planner.exporting.lower import lower
from planner.exporting.parts import schedule_of
from planner.exporting.script import Outlook, write_script
from planner.exporting.slurm import slurm_script
from planner.graph import DtypeRef, JointGraph, Node, TensorMeta
from planner.plan import Plan
from planner.schedule import EventKind
from planner.units import GIB
from tests.planner.exporting.small_plan import small_graph, small_plan

GOLDEN = Path(__file__).parents[2] / "golden" / "small_train.py.txt"
TINY = {"batch": 20, "dim": 12, "size": "tiny"}


def script(layers: int = 2) -> str:
    graph = small_graph(layers=layers)
    return write_script(small_plan(graph), graph, small_graph(layers=layers, **TINY))


def test_the_file_is_what_it_was() -> None:
    """The plan-dependent part of a hand-made plan's file. After a wanted change: write the new text to the golden file."""
    text = script()
    assert _plan_part(text) == GOLDEN.read_text()


def _plan_part(text: str) -> str:
    """Docstring and constants, tables, blocks and step: everything that is not the same in every file."""
    begin, middle = text.index("# ---- redistribution: the helper"), text.index("# ---- the planned computation")
    return text[:begin] + text[middle : text.index("# ---- the model: parameters")]


def test_the_same_plan_gives_the_same_bytes() -> None:
    assert script() == script()


def test_the_number_of_lines_does_not_depend_on_depth() -> None:
    """Layer 0 has no input gradient, and layer 1's input is the batch's first result. The first and last layer's neighbours have
    other parameters to gather and gradients to collect; from five layers on nothing is added."""
    lines = {layers: len(script(layers).splitlines()) for layers in (5, 6, 12)}
    assert len(set(lines.values())) == 1, lines


def test_the_file_imports_torch_and_the_standard_library_only() -> None:
    imported = set()
    for node in ast.walk(ast.parse(script())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= {"torch"} | set(sys.stdlib_module_names)


def test_lines_are_readable_and_names_defined() -> None:
    text = script()
    assert max(map(len, text.splitlines())) <= 130
    assert max(map(len, script(12).splitlines())) <= 130
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_every_redistribution_of_a_block_is_one_line() -> None:
    """Six of the plan; what both layers do stands in functions that both share. Only the loss is not begun ahead of time."""
    text = script()
    assert text.count(" = redistribute(") == 1
    assert text.count(" = redistribute_begin(") == text.count(" = redistribute_end(") == 3
    assert "fc__r = redistribute_begin(fc, S0, R)" in text and "fc__r = redistribute_end(fc__r, S0, R)" in text


def test_the_step_gathers_one_block_ahead_and_collects_one_block_behind() -> None:
    text = script(3)
    step = text[text.index("class PlannedStep") : text.index("# ---- the model: parameters")]
    order = re.findall(r"\b(\w+_(?:unshard_fwd|unshard_bwd|fwd|bwd|bwd_v2|reduce|collect))\(", step)
    assert order == [
        "block_unshard_fwd", "block_unshard_fwd", "block_fwd", "block_unshard_fwd", "block_fwd", "block_fwd", "after_fwd",
        "block_unshard_bwd", "after_bwd", "block_unshard_bwd", "block_bwd", "block_reduce",
        "block_bwd", "block_collect", "block_reduce", "block_bwd_v2", "block_collect", "block_reduce", "block_collect",
    ]  # fmt: skip
    ahead, block = step.index("w[1] = block_unshard_fwd("), step.index("f[0], saved[0] = block_fwd(")
    assert step.index("w[0] = block_unshard_fwd(") < ahead < block
    assert "*w.pop(0))" in step, "nothing else keeps the gathered weights"


def test_the_schedule_is_the_order_of_the_text() -> None:
    """Calls of the begin and end functions, block by block as the step calls them, are the schedule's issues and waits."""
    graph = small_graph(layers=4)
    plan = small_plan(graph)
    schedule = schedule_of(lower(plan, graph))
    schedule.check(plan, graph)
    text = script(4)
    bodies = dict(re.findall(r"^def (\w+)\((?:.|\n)*?\):\n((?:    .*\n)+)", text, flags=re.M))
    step = text[text.index("class PlannedStep") : text.index("# ---- the model: parameters")]
    spoken = [mark for name in _executed(step, bodies) for mark in re.findall(r" = redistribute(_begin|_end|)\(", bodies[name])]
    wanted: list[str] = []
    for event in schedule.events:
        if event.kind is EventKind.COMPUTE:
            continue
        issue, wait = (schedule.events[at[event.number]] for at in (schedule.issued, schedule.awaited))
        whole = issue.part is wait.part
        if event is issue:
            wanted.append("" if whole else "_begin")
        elif not whole:
            wanted.append("_end")
    assert spoken == wanted


def _executed(step: str, bodies: dict[str, str]) -> list[str]:
    """Names of the block functions in the order in which the step calls them, loops unrolled."""
    names: list[str] = []
    loop: list[str] | None = None
    times = 0
    for line in step.splitlines():
        indent = len(line) - len(line.lstrip())
        if loop is not None and line.strip() and indent <= 8:
            names, loop = names + loop * times, None
        head = re.match(r" {8}for i in (range\(.*\)):", line)
        if head:
            loop, times = [], len(eval(head[1]))
        found = [name for name in re.findall(r"\b(\w+_(?:fwd|bwd|reduce|collect)\w*)\(", line) if name in bodies]
        (names if loop is None else loop).extend(found)
    return names


def test_prices_and_counts_are_in_the_docstring() -> None:
    text = script()
    doc = ast.get_docstring(ast.parse(text))
    assert doc is not None
    graph = small_graph()
    plan = small_plan(graph)
    for part in (
        plan.plan_id,
        "dp=2",
        "serial, no overlap",
        "2 all_gather@dp, 1 all_reduce@dp",
        "1 all_gather@dp, 2 reduce_scatter@dp",
    ):
        assert part in doc


def test_commands_of_the_docstring_start_as_many_ranks_as_their_mesh_has() -> None:
    doc = ast.get_docstring(ast.parse(script())) or ""
    assert "torchrun --standalone --nproc_per_node=2 train.py --device cpu --tiny --mesh 2 --steps 3" in doc
    assert "torchrun --standalone --nproc_per_node=2 train.py --compile" in doc
    graph = small_graph()
    apart = ast.get_docstring(ast.parse(write_script(replace(small_plan(graph), gpus_per_node=1), graph, None))) or ""
    assert "--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 --nproc_per_node=1 train.py" in apart
    assert "--tiny" not in apart, "there is no such size"


def test_a_forecast_is_told_and_measured_against() -> None:
    graph = small_graph()
    outlook = Outlook(step_us=1234.0, allocated_bytes=3 * GIB, reserved_bytes=5 * GIB)
    text = write_script(small_plan(graph), graph, None, outlook=outlook)
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert "1.23 ms per step as this file runs it" in doc and "3.000 GiB allocated at the most, 5.000 GiB" in doc
    assert "PREDICTED_MS, PREDICTED_GIB = 1.234, 3.000  # the step, update included; the most that is allocated" in text


def test_the_batch_file_gives_the_script_time_to_save() -> None:
    graph = small_graph()
    text = slurm_script(replace(small_plan(graph), gpus_per_node=1), "my train.py")
    assert "#SBATCH --nodes=2" in text and "'my train.py' --compile" in text
    warned, waited = (int(re.findall(pattern, text)[0]) for pattern in (r"TERM@(\d+)", r"--shutdown-timeout=(\d+)"))
    assert 60 < waited < warned
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_without_a_tiny_version_sizes_are_numbers() -> None:
    graph = small_graph()
    text = write_script(small_plan(graph), graph, None)
    assert "FULL = {}" in text and ".expand([64//DP, 48])" in text


def test_text_of_the_user_is_never_code() -> None:
    graph = small_graph()
    evil = 'x"""\nimport os\n"""'
    request = replace(graph.request, model=evil)
    hostile = replace(graph, request=request, class_name=evil)
    text = write_script(small_plan(hostile), hostile, replace(small_graph(**TINY), request=request))
    assert next(n for n in ast.parse(text).body if isinstance(n, ast.Import)).names[0].name == "argparse"


def _with_node(graph: JointGraph, **changes: object) -> tuple[JointGraph, Plan]:
    nodes = list(graph.nodes)
    at = graph.node_by_key["mul/fwd#0"]
    nodes[at] = replace(nodes[at], **changes)  # type: ignore[arg-type]
    changed = replace(graph, nodes=tuple(nodes))
    return changed, replace(small_plan(changed), structure_fingerprint=changed.structure_fingerprint)


def test_an_op_without_a_lowering_is_named() -> None:
    graph, plan = _with_node(small_graph(), op="aten.cross.default")
    with pytest.raises(ExportError, match=r"aten\.cross\.default .*toy\.py:7"):
        write_script(plan, graph, None)


def test_a_tiny_version_of_another_structure_is_refused() -> None:
    graph = small_graph()
    tiny, _ = _with_node(small_graph(**TINY), op="aten.add.Tensor")
    with pytest.raises(ExportError, match="no counterpart of mul/fwd#0"):
        write_script(small_plan(graph), graph, tiny)


def test_tiny_names_must_be_those_of_the_model() -> None:
    graph = small_graph()
    with pytest.raises(ExportError, match="names other sizes"):
        write_script(small_plan(graph), graph, replace(small_graph(**TINY), symbols=(("B", 20),)))


def test_a_buffer_is_refused_by_name() -> None:
    graph = small_graph()
    plan = small_plan(graph)
    buffer = Node(
        key="buffer:table", op="buffer", name="buffer", kind="buffer", phase="forward", outputs=(TensorMeta((4,), "float32"),)
    )
    changed = replace(graph, nodes=(*graph.nodes, buffer))
    choices = {**plan.choices, "buffer:table": plan.choices["param:layers.0.fc.weight"]}
    changed_plan = replace(plan, choices=choices, structure_fingerprint=changed.structure_fingerprint)
    with pytest.raises(ExportError, match="how buffer:table is made"):
        write_script(changed_plan, changed, None)


def test_low_precision_is_a_name() -> None:
    graph, plan = _with_node(
        small_graph(),
        op="aten._to_copy.default",
        kwargs=(("dtype", DtypeRef("bfloat16")),),
        outputs=(TensorMeta((64, 48), "bfloat16"),),
    )
    assert ".to(LOWP)" in write_script(plan, graph, None)
