"""Which block each op belongs to: before the repeated layers, one of them, or after; once per phase."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph import BACKWARD, FORWARD, JointGraph, TensorRef, layer_of
from planner.schedule import BlockKey


def position(key: BlockKey) -> int:
    """Place of a block in the order of its phase: backward runs from the last layer to the first."""
    return key.number if key.phase == FORWARD else -key.number


def assign_blocks(graph: JointGraph, num_layers: int) -> dict[int, BlockKey]:
    """Op and output nodes -> block. No node is placed before a block that makes one of its operands."""
    home: dict[int, BlockKey] = {}
    for phase in (FORWARD, BACKWARD):
        nodes = [n for n, node in enumerate(graph.nodes) if node.phase == phase and node.kind in ("op", "output")]
        order = _Order(graph, phase, num_layers)
        label = order.by_module(nodes)
        order.follow_users(nodes, label)
        order.respect_operands(nodes, label)
        home.update({n: BlockKey(phase, label[n]) for n in nodes})
    return home


@dataclass(frozen=True)
class _Order:
    graph: JointGraph
    phase: str
    num_layers: int

    @property
    def direction(self) -> int:
        return 1 if self.phase == FORWARD else -1

    def by_module(self, nodes: list[int]) -> dict[int, int]:
        """Layer of the node's module; outside the layers by position: before the first, after the last, else the current."""
        layers = [layer_of(self.graph.nodes[n].module) for n in nodes]
        inside = [at for at, layer in enumerate(layers) if layer is not None]
        first, last = (inside[0], inside[-1]) if inside else (len(nodes), -1)
        early, late = (-1, self.num_layers) if self.phase == FORWARD else (self.num_layers, -1)
        label: dict[int, int] = {}
        current = early
        for at, (n, layer) in enumerate(zip(nodes, layers, strict=True)):
            current = layer if layer is not None else early if at < first else late if at > last else current
            label[n] = current
        return label

    def follow_users(self, nodes: list[int], label: dict[int, int]) -> None:
        """Parameter-only chains without a layer of their own go to their first user, gradient-only chains to their producer."""
        graph, inside = self.graph, set(nodes)
        only_parameters: dict[int, bool] = {}
        for n in nodes:
            operands = graph.nodes[n].operands
            only_parameters[n] = bool(operands) and all(
                only_parameters.get(ref.node, graph.nodes[ref.node].kind == "param") for ref in operands
            )
        for n in reversed(nodes):
            if only_parameters[n] and layer_of(graph.nodes[n].module) is None:
                users = [
                    label[user]
                    for output in range(len(graph.nodes[n].outputs))
                    for user, _ in graph.users.get(TensorRef(n, output), ())
                    if user in inside
                ]
                if users:
                    label[n] = min(users, key=lambda index: index * self.direction)
        if self.phase == BACKWARD:
            for n in nodes:
                made = [label[ref.node] for ref in graph.nodes[n].operands if ref.node in inside]
                if made and not graph.nodes[n].module and not only_parameters[n]:
                    label[n] = max(made, key=lambda index: index * self.direction)

    def respect_operands(self, nodes: list[int], label: dict[int, int]) -> None:
        inside = set(nodes)
        for n in nodes:
            made = [label[ref.node] for ref in self.graph.nodes[n].operands if ref.node in inside]
            label[n] = max([label[n], *made], key=lambda index: index * self.direction)
