"""Memory over a step, computed by hand, exact to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.actions import ACTIVATION, COMPUTE, GATHERED, GRADIENT, OVERLAPPED, SCHEDULES, SERIAL, TEMPORARY, Actions
from planner.constants import CONSTANT_KINDS
from planner.costing.assumptions import CONSTANTS, Overhead
from planner.costing.live_memory import LiveMemory, lifetimes, walk
from planner.costing.timeline import simulate
from planner.forecast import forecast
from planner.graph import (
    BACKWARD,
    FORWARD,
    InitRule,
    Input,
    JointGraph,
    ModelRequest,
    Node,
    OperandRef,
    Parameter,
    TensorMeta,
    TensorRef,
)
from planner.hardware import load_profile
from planner.issuing import actions_of
from planner.memory import MemoryBreakdown, MemoryPolicy
from planner.mesh import Mesh
from planner.pipeline import trace
from planner.placement import Placements, parse
from planner.plan import Choice, Plan, Redistribution, SolveReport, Step
from planner.redistribution import Collective, CollectiveKind
from planner.workbench import Workbench
from tests.oracles.random_plan import random_plan

MESH = Mesh.parse("dp=2")
PROFILE = load_profile("h100_sxm")
EINSUM, CAST = "planner.einsum.default", "aten._to_copy.default"
SPLIT, WHOLE, PENDING = parse("S(0)"), parse("R"), parse("P")
STATIC = {"parameters": 24576, "optimizer state": 49152, "inputs": 1024}
OVERHEAD = Overhead(slack=0.03, workspace_bytes=1000, context_bytes=7)


class Model:
    """Two fully sharded layers on two devices: h = x w1, y = h w2, loss = sum y; parameters fp32, compute bf16."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.choices: dict[str, Choice] = {}
        self.changes: list[Redistribution] = []
        w1, w2 = self.leaf("param:w1", (64, 128), "float32"), self.leaf("param:w2", (128, 32), "float32")
        x = self.leaf("input:x", (16, 64), "bfloat16")
        low1 = self.op("layers.0", CAST, (w1,), (SPLIT,), (64, 128), "bfloat16", SPLIT)
        h = self.op("layers.0", EINSUM, (x, low1), (SPLIT, WHOLE), (16, 128), "bfloat16", SPLIT)
        self.gather(low1, h, 1)
        low2 = self.op("layers.1", CAST, (w2,), (SPLIT,), (128, 32), "bfloat16", SPLIT)
        y = self.op("layers.1", EINSUM, (h, low2), (SPLIT, WHOLE), (16, 32), "bfloat16", SPLIT)
        self.gather(low2, y, 1)
        loss = self.op("", "aten.sum.default", (y,), (SPLIT,), (), "float32", PENDING)
        self.nodes.append(
            Node(
                key="output:loss", op="output", name="output", kind="output", phase=FORWARD, operands=(loss,),
                outputs=self.nodes[-1].outputs,
            )
        )  # fmt: skip
        self.choices["output:loss"] = Choice(operands=(WHOLE,), outputs=(WHOLE,), compute_us=0.0)
        self.change(loss, FORWARD, PENDING, WHOLE, CollectiveKind.ALL_REDUCE, 4, ("output:loss", 0))
        gy = self.op("layers.1", "aten.neg.default", (y,), (SPLIT,), (16, 32), "bfloat16", SPLIT, BACKWARD)
        g2 = self.gradient("layers.1", h, gy, (128, 32), "param:w2")
        again = self.op("layers.1", CAST, (w2,), (SPLIT,), (128, 32), "bfloat16", SPLIT, BACKWARD)
        gh = self.op("layers.1", EINSUM, (gy, again), (SPLIT, WHOLE), (16, 128), "bfloat16", SPLIT, BACKWARD)
        self.gather(again, gh, 1, BACKWARD)
        g1 = self.gradient("layers.0", x, gh, (64, 128), "param:w1")
        self.loss, self.gradients = loss, {w1.node: g1, w2.node: g2}

    def leaf(self, key: str, shape: tuple[int, ...], dtype: str) -> TensorRef:
        kind = key.partition(":")[0]
        self.nodes.append(Node(key=key, op=kind, name=kind, kind=kind, phase=FORWARD, outputs=(TensorMeta(shape, dtype),)))
        self.choices[key] = Choice(operands=(), outputs=(SPLIT,), compute_us=0.0)
        return TensorRef(len(self.nodes) - 1, 0)

    def op(
        self, module: str, op: str, operands: tuple[TensorRef, ...], needs: tuple[Placements, ...], shape: tuple[int, ...],
        dtype: str, made: Placements, phase: str = FORWARD,
    ) -> TensorRef:  # fmt: skip
        key = f"{module}/op{len(self.nodes)}/{phase}#0"
        self.nodes.append(
            Node(
                key=key, op=op, name=op, kind="op", phase=phase, operands=operands, module=module,
                args=tuple(map(OperandRef, range(len(operands)))), outputs=(TensorMeta(shape, dtype),),
                flops=1e6 if op == EINSUM else 0.0,
            )
        )  # fmt: skip
        self.choices[key] = Choice(operands=needs, outputs=(made,), compute_us=10.0)
        return TensorRef(len(self.nodes) - 1, 0)

    def gradient(self, module: str, left: TensorRef, right: TensorRef, shape: tuple[int, ...], parameter: str) -> TensorRef:
        low = self.op(module, EINSUM, (left, right), (SPLIT, SPLIT), shape, "bfloat16", PENDING, BACKWARD)
        full = self.op(module, CAST, (low,), (PENDING,), shape, "float32", PENDING, BACKWARD)
        size = self.nodes[full.node].outputs[0].num_bytes  # type: ignore[union-attr]
        self.change(full, BACKWARD, PENDING, SPLIT, CollectiveKind.REDUCE_SCATTER, size, (parameter, -1))
        return full

    def gather(self, ref: TensorRef, reader: TensorRef, slot: int, phase: str = FORWARD) -> None:
        size = self.nodes[ref.node].outputs[0].num_bytes  # type: ignore[union-attr]
        self.change(ref, phase, SPLIT, WHOLE, CollectiveKind.ALL_GATHER, size, (self.nodes[reader.node].key, slot))

    def change(
        self, ref: TensorRef, phase: str, source: Placements, target: Placements, kind: CollectiveKind, size: int,
        reader: tuple[str, int],
    ) -> None:  # fmt: skip
        meta = self.nodes[ref.node].outputs[0]
        assert meta is not None
        sent = Collective(kind=kind, axes=(0,), full_bytes=size, dtype=meta.dtype, reduce_op="sum" if source == PENDING else "")
        step = Step(target=target, collective=sent, us=5.0)
        self.changes.append(
            Redistribution(
                tensor=(self.nodes[ref.node].key, 0), phase=phase, source=source, shared=False, consumers=(reader,), steps=(step,)
            )
        )

    def graph(self) -> JointGraph:
        graph = JointGraph(
            request=ModelRequest(model="by-hand", precision="as-traced"),
            nodes=tuple(self.nodes),
            parameters=tuple(
                Parameter(node=n, names=(self.nodes[n].key,), gradient=g, init=InitRule("unknown"))
                for n, g in self.gradients.items()
            ),
            inputs=(Input(node=2, name="x"),),
            loss=self.loss,
        )
        graph.check()
        return graph

    def plan(self, graph: JointGraph) -> Plan:
        memory = MemoryBreakdown(
            parameter_bytes=STATIC["parameters"], gradient_bytes=24576, optimizer_bytes=STATIC["optimizer state"],
            activation_bytes=2560,
        )  # fmt: skip
        return Plan(
            request=graph.request, structure_fingerprint=graph.structure_fingerprint, fingerprint=graph.fingerprint, mesh=MESH,
            hardware_name=PROFILE.name, hardware_hash=PROFILE.content_hash, memory_policy=MemoryPolicy(), constraints=(),
            choices=self.choices, redistributions=tuple(self.changes), memory=memory, num_ops=graph.num_ops,
            report=SolveReport(status="feasible", objective_us=0.0, bound_us=0.0, method="by hand", seconds=0.0),
            replicated_for_lack_of_a_rule=(),
        )  # fmt: skip


def two_layers(schedule: str) -> Actions:
    model = Model()
    graph = model.graph()
    # A price under that of the bare collective: no copies around it.
    return actions_of(model.plan(graph), graph, PROFILE, schedule)


def peak_at(found: LiveMemory, actions: Actions, name: str) -> int:
    """Bytes that come and go while an action runs."""
    (number,) = [n for n, action in enumerate(actions.actions) if action.name == name]
    return found.live_bytes[number] - sum(STATIC.values())


def test_two_layers_by_hand_serial() -> None:
    actions = two_layers(SERIAL)
    found = walk(actions, overhead=OVERHEAD)
    assert actions.static_bytes == STATIC
    cast1, whole1, h = 8192, 16384, 2048
    cast2, whole2, y = 4096, 8192, 512
    grad2_low, grad2_pending, grad2 = 8192, 16384, 8192
    grad1_low, grad1_pending, grad1 = 16384, 32768, 16384
    workspace, loss, dh = 1000, 4, 2048
    assert list(found.live_bytes[:6]) == [
        sum(STATIC.values()) + there
        for there in (
            cast1, cast1 + whole1, whole1 + h + workspace, h + cast2, h + cast2 + whole2, h + whole2 + y + workspace,
        )
    ]  # fmt: skip
    assert list(found.live_bytes[6:]) == [
        sum(STATIC.values()) + there
        for there in (
            h + y + loss,  # the pending loss
            h + y + loss + loss,
            loss + h + y + 512,  # gradient of y; layer 1 holds y and h until it has run backward
            loss + h + y + 512 + grad2_low + workspace,
            loss + h + y + 512 + grad2_low + grad2_pending,
            loss + h + y + 512 + grad2_pending + grad2,
            loss + h + y + 512 + grad2 + cast2,
            loss + h + y + 512 + grad2 + cast2 + whole2,
            loss + h + y + 512 + grad2 + whole2 + dh + workspace,
            loss + grad2 + dh + grad1_low + workspace,
            loss + grad2 + dh + grad1_low + grad1_pending,  # layer 0 was handed dh
            loss + grad2 + dh + grad1_pending + grad1,
            loss + grad2 + grad1,
        )
    ]
    peak = loss + grad2 + dh + grad1_low + grad1_pending
    assert found.allocated_bytes == sum(STATIC.values()) + peak
    assert found.reserve_bytes == 7 + 342 * 2**20
    assert found.reserved_bytes == found.allocated_bytes + round(0.03 * peak) + found.reserve_bytes
    assert found.by_category == {
        **STATIC, TEMPORARY: loss + dh + grad1_low + grad1_pending, GRADIENT: grad2,
    }  # fmt: skip
    first = found.top[0]
    assert (first.num_bytes, first.shape, first.dtype, first.placements) == (32768, (64, 128), "float32", "P")
    assert first.module == "layers.0" and "backward block 0" in found.moment_name


def test_two_layers_by_hand_overlapped() -> None:
    """The second layer's parameters are gathered before the first runs: both are there, and the pieces until it is awaited."""
    actions = two_layers(OVERLAPPED)
    found = walk(actions, overhead=OVERHEAD)
    assert peak_at(found, actions, "layers.0/op4/forward#0") == 16384 + 8192 + 4096 + 2048 + 1000
    # The gradient of w2 is on its way while layer 0 runs backward: pending sum and result are both held, and it waits one block.
    pending = [s for s in actions.storages if s.placements == "P" and s.num_bytes == 16384 and s.dtype == "float32"]
    assert len(pending) == 1
    _, last = lifetimes(actions)
    sent = next(n for n, a in enumerate(actions.actions) if actions.storages.index(pending[0]) in a.reads and a.lane != COMPUTE)
    assert last[actions.storages.index(pending[0])] > sent
    assert found.allocated_bytes >= walk(two_layers(SERIAL), overhead=OVERHEAD).allocated_bytes


def test_a_finished_collective_holds_nothing() -> None:
    """By the timeline a collective is done before it is awaited; what it read is then free earlier, never later."""
    actions = two_layers(OVERLAPPED)
    timeline = simulate(actions, PROFILE)
    (_, until_awaited), (_, until_done) = lifetimes(actions), lifetimes(actions, timeline)
    assert all(until_done[s] <= until_awaited[s] for s in until_awaited)
    assert any(until_done[s] < until_awaited[s] for s in until_awaited)


def test_kinds_of_tensors() -> None:
    kinds = {(s.key, s.placements): s.category for s in two_layers(SERIAL).storages}
    assert kinds["layers.0/op3/forward#0", "R"] == GATHERED
    assert kinds["layers.0/op4/forward#0", "S(0)"] == ACTIVATION


def test_views_and_the_inside_of_fused_groups_take_nothing() -> None:
    model = Model()
    key = next(node.key for node in model.nodes if node.op == "aten.neg.default")
    model.choices[key] = replace(model.choices[key], compute_us=0.0)
    graph = model.graph()
    actions = actions_of(model.plan(graph), graph, PROFILE, SERIAL)
    assert key not in {s.key for s in actions.storages}
    (viewed,) = [n for n, node in enumerate(model.nodes) if node.key == key]
    model.nodes[viewed] = replace(model.nodes[viewed], op="aten.alias.default")
    graph = model.graph()
    actions = actions_of(model.plan(graph), graph, PROFILE, SERIAL)
    _, last = lifetimes(actions)
    y = next(n for n, s in enumerate(actions.storages) if s.shape == (8, 32))
    reader = next(n for n, a in enumerate(actions.actions) if y in a.reads and n == last[y])
    assert actions.actions[reader].block.startswith("backward")


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return Workbench.build(trace(ModelRequest(model="llama3-tiny", batch=8, layers=2)), Mesh.parse("dp=2,tp=2"))


@pytest.mark.parametrize("seed", range(4))
def test_bounds_on_random_plans(bench: Workbench, seed: int) -> None:
    """Never under what is there all the time with all gradients; never over everything that is ever allocated; categories add up;
    at the boundary between the phases all that the linear terms call saved is there, or was free already."""
    plan = random_plan(bench.costs, seed)
    for schedule in SCHEDULES:
        found = forecast(plan, bench.graph, bench.hardware, schedule)
        actions, memory = found.timeline.actions, found.memory
        static = sum(actions.static_bytes.values())
        everything = sum(s.num_bytes for s in actions.storages)
        assert static + plan.memory.gradient_bytes <= memory.allocated_bytes
        assert memory.allocated_bytes <= static + everything + Overhead().workspace_bytes
        assert sum(memory.by_category.values()) == memory.allocated_bytes < memory.reserved_bytes
        assert memory.allocated_bytes == max(memory.live_bytes)
        held = sum(actions.storages[s].num_bytes for s in actions.held)
        assert memory.live_bytes[-1] >= static + held


def test_what_the_linear_terms_count_is_there(bench: Workbench) -> None:
    """The live peak of a good plan is at least parameters, optimizer state and saved activations."""
    plan = bench.solve(bench.default_constraints(), exact=False)
    linear = plan.memory.peak_bytes - plan.memory.gradient_bytes
    assert bench.live_memory(plan, SERIAL).allocated_bytes >= linear


def test_checkpointing_keeps_less_and_costs_device_time(bench: Workbench) -> None:
    """Waiting for the CPU is left out: this small a model mostly waits, and its two plans differ in calls."""
    plain = bench.solve(bench.default_constraints(), exact=False)
    again = bench.solve(bench.default_constraints(), exact=False, checkpoint="full")
    kept, less = (bench.live_memory(plan, SERIAL).by_category.get(ACTIVATION, 0) for plan in (plain, again))
    assert less < kept
    first, second = (bench.timeline(plan, SERIAL) for plan in (plain, again))
    assert sum(second.alone_us.values()) > sum(first.alone_us.values())


def test_every_assumption_says_where_it_comes_from() -> None:
    for name, constant in CONSTANTS.items():
        assert constant.kind in CONSTANT_KINDS and constant.source and constant.unit and constant.date, name
