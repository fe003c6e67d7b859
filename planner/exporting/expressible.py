"""Can a plan be said in the words of FSDP2 and tensor parallelism? `expressible` answers with them, or with every reason why not.

Those words are few: per mesh axis, samples are split and parameters whole (`replicate`), samples and parameters are split
(`shard`), or products are split column- and row-wise (`tensor`), with the residual stream whole or split over the sequence. All
layers alike, one layout between them, every op as the modules around it imply. The forward pass is compared; what the backward
pass does is chosen by DTensor and FSDP and may differ from the plan even where this says yes.

Pure data: no torch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from planner.exporting.module_recipe import ModuleRecipe, Reason
from planner.graph import BACKWARD, FORWARD, JointGraph, Node, Parameter, TensorRef, layer_of, layer_path, without_layer
from planner.placement import Partial, Placement, Replicate, Shard, text
from planner.plan import Choice, Plan, Redistribution
from planner.redistribution import CollectiveKind


def expressible(plan: Plan, graph: JointGraph) -> ModuleRecipe | list[Reason]:
    """The plan as a recipe of modules, or every reason why it is none. `graph` is that of the plan (`matching.planned_graph`)."""
    reading = _Reading(plan, graph)
    recipe = reading.read()
    return list(dict.fromkeys(reading.reasons)) or recipe


COLUMN, ROW, DATA, WHOLE = "column-parallel", "row-parallel", "data-parallel", "replicated"


@dataclass
class _Reading:
    """One walk over a plan; reasons are collected, so that all are told at once."""

    plan: Plan
    graph: JointGraph
    reasons: list[Reason] = field(default_factory=list)

    def no(self, where: str, why: str) -> None:
        self.reasons.append(Reason(where, why))

    def read(self) -> ModuleRecipe:
        self._model()
        uses = {axis: self._use(axis) for axis, size in enumerate(self.plan.mesh.axis_sizes) if size > 1}
        data = tuple(axis for axis, use in uses.items() if use == "data")
        tensor = tuple(axis for axis, use in uses.items() if use == "tensor")
        shard = tuple(axis for axis in data if self._splits_parameters(axis))
        replicate = tuple(axis for axis in data if axis not in shard)
        self._order(replicate, shard, tensor)
        self._layers_alike()
        split, notes = self._parameters(shard, replicate, tensor)
        column, row, embeddings = self._products(tensor)
        sequence = self._residual(tensor)
        norms, sources = self._norms(tensor, sequence), self._sources(tensor)
        for r in self.plan.redistributions:
            if r.phase == FORWARD:
                notes += self._redistribution(r, data, tensor, sequence)
        return ModuleRecipe(
            replicate=replicate, shard=shard, tensor=tensor, sequence_dim=sequence,
            blocks=tuple(dict.fromkeys(p for n in self.graph.nodes if (p := layer_path(n.module)) is not None)),
            column=column, row=row, embeddings=embeddings, norms=norms, sources=sources, shard_dims=split,
            reshard=self._gathers_again(shard), checkpointed=self.plan.checkpointed, notes=tuple(dict.fromkeys(notes)),
        )  # fmt: skip

    # ---- what tensors are made of -------------------------------------------------------------------------------------
    @cached_property
    def _made_of(self) -> list[tuple[bool, bool]]:
        """Per node: (reads something that the data loader delivers, reads parameters)."""
        found: list[tuple[bool, bool]] = []
        for node in self.graph.nodes:
            below = [found[ref.node] for ref in node.operands]
            found.append((
                node.kind in ("input", "tangent") or any(b[0] for b in below), node.kind == "param" or any(b[1] for b in below)
            ))  # fmt: skip
        return found

    def _is_weight(self, ref: TensorRef) -> bool:
        return self._made_of[ref.node] == (False, True)

    def _is_activation(self, ref: TensorRef) -> bool:
        return self._made_of[ref.node][0]

    def _choice(self, node: Node) -> Choice:
        return self.plan.choices[node.key]

    @cached_property
    def _forward(self) -> list[tuple[int, Node]]:
        return [(number, node) for number, node in enumerate(self.graph.nodes) if node.is_op and node.phase == FORWARD]

    @cached_property
    def _linears(self) -> list[tuple[Node, int, int]]:
        """(product, slot of the activation, slot of the weight) in forward."""
        found = []
        for _, node in self._forward:
            if node.args and isinstance(node.args[0], str) and "->" in node.args[0] and len(node.operands) == 2:
                weights = [slot for slot, ref in enumerate(node.operands) if self._is_weight(ref)]
                if len(weights) == 1:
                    found.append((node, 1 - weights[0], weights[0]))
        return found

    # ---- the model ----------------------------------------------------------------------------------------------------
    def _model(self) -> None:
        graph, plan = self.graph, self.plan
        if graph.stand_in_loss:
            self.no("output:loss", "the model returns no loss, the plan has a stand-in; a recipe calls the model as it is")
        if graph.dropouts:
            self.no(
                f"{len(graph.dropouts)} dropouts",
                "their masks are the plan's, a function of element and step; DTensor draws others",
            )
        for key in plan.regions:
            self.no(key, "a user-controlled region has a contract that the styles of modules cannot say")
        for buffer in graph.buffers:
            if buffer.update is not None:
                self.no(f"buffer:{buffer.name}", "a step writes it; FSDP does not keep the copies of the ranks equal")
        for item in graph.inputs:
            if item.batch_dim not in (0, None):
                self.no(f"input:{item.name}", f"samples are counted by dim {item.batch_dim}; a recipe splits dim 0")
        if not self._linears:
            self.no("the model", "it has no product of an activation with a parameter, so no axis has a use")

    def _layers_alike(self) -> None:
        """The same op of each layer has the same choice in forward."""
        first: dict[tuple[str, str], Node] = {}
        for _, node in self._forward:
            path = layer_path(node.module)
            if path is None:
                continue
            key = (without_layer(path), node.key.removeprefix(path))
            known = first.setdefault(key, node)
            if _texts(self._choice(known)) != _texts(self._choice(node)):
                self.no(
                    node.key,
                    f"is laid out {_texts(self._choice(node))}, {known.key} {_texts(self._choice(known))}: layers differ",
                )

    # ---- axes ---------------------------------------------------------------------------------------------------------
    def _use(self, axis: int) -> str:
        """`data`, `tensor` or `none`."""
        name = self.plan.mesh.axis_names[axis]
        kinds = {node.key: self._kind(node, x, w, axis) for node, x, w in self._linears}
        for node, x, w in self._linears:
            if kinds[node.key] is None:
                self.no(
                    node.key, f"on {name} its input is {self._mark(node, x, axis)}, its weight {self._mark(node, w, axis)}: "
                    "neither column-, row-, data-parallel nor replicated",
                )  # fmt: skip
        counted = Counter("tensor" if kind in (COLUMN, ROW) else "data" for kind in kinds.values() if kind in (COLUMN, ROW, DATA))
        if not counted:
            return "none"
        use = max(sorted(counted), key=lambda one: counted[one])
        fits = (DATA,) if use == "data" else (COLUMN, ROW, WHOLE)
        for key, kind in kinds.items():
            if kind is not None and kind not in fits:
                most = "data-parallel" if use == "data" else "column- or row-parallel"
                self.no(key, f"is {kind} on {name}, where most products are {most}")
        return use

    def _mark(self, node: Node, slot: int, axis: int) -> str:
        placements = self._choice(node).operands[slot]
        return "-" if placements is None else str(placements[axis])

    def _kind(self, node: Node, activation: int, weight: int, axis: int) -> str | None:
        choice = self._choice(node)
        x, w, out = choice.operands[activation], choice.operands[weight], choice.outputs[0]
        assert x is not None and w is not None and out is not None, node.key
        operands, made = node.args[0].split("->")
        letters = operands.split(",")
        marks = _letter(x[axis], letters[activation]), _letter(w[axis], letters[weight]), _letter(out[axis], made)
        if marks == ("R", "R", "R"):
            return WHOLE
        if marks == (letters[activation][0], "R", letters[activation][0]):
            return DATA
        if marks[0] == "R" and marks[1] == marks[2] and marks[1] not in ("R", "P"):
            return COLUMN
        return ROW if marks[0] == marks[1] and marks[0] not in ("R", "P") and marks[2] == "P" else None

    def _order(self, replicate: tuple[int, ...], shard: tuple[int, ...], tensor: tuple[int, ...]) -> None:
        names = self.plan.mesh.axis_names
        order = (*replicate, *shard, *tensor)
        for group in (replicate, shard, tensor):
            between = [a for a in range(min(group, default=0), max(group, default=0)) if a not in group]
            between = [a for a in between if self.plan.mesh.axis_sizes[a] > 1]
            if between:
                self.no(
                    f"axis {names[between[0]]}", f"lies between {' and '.join(names[a] for a in group)}, which act as one axis"
                )
        for before, after in itertools.pairwise(order):
            if before > after:
                self.no(
                    f"axis {names[after]}", f"lies outside {names[before]}; FSDP wants the axes that replicate outermost, "
                    "then those that shard, then those of tensor parallelism",
                )  # fmt: skip

    # ---- parameters ---------------------------------------------------------------------------------------------------
    def _stored(self, parameter: Parameter) -> tuple[Placement, ...]:
        found = self.plan.choices[self.graph.nodes[parameter.node].key].outputs[0]
        assert found is not None
        return found

    def _rank(self, parameter: Parameter) -> int:
        return len(self.graph.meta(TensorRef(parameter.node, 0)).shape)

    def _splits_parameters(self, axis: int) -> bool:
        """Most matrices are stored split on a data axis."""
        marks = [isinstance(self._stored(p)[axis], Shard) for p in self.graph.parameters if self._rank(p) > 1]
        return sum(marks) * 2 > len(marks)

    def _parameters(
        self, shard: tuple[int, ...], replicate: tuple[int, ...], tensor: tuple[int, ...]
    ) -> tuple[tuple[tuple[str, int], ...], list[str]]:
        names, dims, notes = self.plan.mesh.axis_names, {}, []
        for parameter in self.graph.parameters:
            stored, where = self._stored(parameter), f"param:{parameter.name}"
            pattern, small = without_layer(parameter.name), self._rank(parameter) < 2
            for axis in replicate:
                if isinstance(stored[axis], Shard):
                    self.no(where, f"is stored split on {names[axis]}, where most parameters are whole")
            split = {str(stored[axis]) for axis in shard}
            if split == {"R"} or len(split) > 1:
                axes = ", ".join(names[axis] for axis in shard)
                if small:
                    notes.append(f"{pattern} is stored {text(stored)}; fully_shard splits it over {axes} like its block")
                else:
                    self.no(where, f"is stored {text(stored)}; fully_shard splits one dim over all of {axes}")
            elif split:
                (first,) = {stored[axis] for axis in shard}
                assert isinstance(first, Shard)
                if first.dim:
                    dims[pattern] = first.dim
            self._used_as_stored(parameter, tensor)
        return tuple(dims.items()), notes

    def _used_as_stored(self, parameter: Parameter, tensor: tuple[int, ...]) -> None:
        """On tensor axes a parameter is read the way it is stored: nothing gathers it there."""
        for axis in tensor:
            mark = self._stored(parameter)[axis]
            for node, slot in self._readers(TensorRef(parameter.node, 0)):
                read = self._choice(node).operands[slot]
                if read is not None and self._in_module(node, parameter) and read[axis] != mark and isinstance(mark, Shard):
                    name = self.plan.mesh.axis_names[axis]
                    self.no(f"param:{parameter.name}", f"is stored {mark} on {name} and read {read[axis]} by {node.key}")

    def _in_module(self, node: Node, parameter: Parameter) -> bool:
        return node.phase == FORWARD and any(node.module == name.rpartition(".")[0] for name in parameter.names)

    def _readers(self, ref: TensorRef) -> Iterator[tuple[Node, int]]:
        """Forward uses of a parameter, through casts and other ops that depend on parameters alone."""
        for number, slot in self.graph.users.get(ref, ()):
            node = self.graph.nodes[number]
            if node.phase != FORWARD or not node.is_op:
                continue
            if self._made_of[number] == (False, True) and len(node.operands) == 1 and number != ref.node:
                yield from self._readers(TensorRef(number, 0))
            else:
                yield node, slot

    def _gathers_again(self, shard: tuple[int, ...]) -> bool:
        return any(
            step.collective is not None
            and step.collective.kind is CollectiveKind.ALL_GATHER
            and set(step.collective.axes) & set(shard)
            for r in self.plan.redistributions
            if r.phase == BACKWARD and self._is_weight(TensorRef(self.graph.node_by_key[r.tensor[0]], r.tensor[1]))
            for step in r.steps
        )

    # ---- modules on tensor axes ---------------------------------------------------------------------------------------
    def _products(self, tensor: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]:
        found: dict[str, dict[str, None]] = {COLUMN: {}, ROW: {}}
        for node, x, w in self._linears:
            kinds = {self._kind(node, x, w, axis) for axis in tensor}
            if len(kinds) > 1:
                self.no(
                    node.key, f"is {' and '.join(sorted(map(str, kinds)))} on the axes of tensor parallelism; they are one group"
                )
            for kind in kinds & {COLUMN, ROW}:
                if not self._reads_own_weight(node, w):
                    self.no(node.key, f"is {kind}, but its weight is not the parameter of a linear module of its own")
                assert kind is not None
                found[kind][without_layer(node.module)] = None
        return tuple(found[COLUMN]), tuple(found[ROW]), self._embeddings(tensor)

    def _reads_own_weight(self, node: Node, slot: int) -> bool:
        ref = node.operands[slot]
        while self.graph.nodes[ref.node].is_op and len(self.graph.nodes[ref.node].operands) == 1:
            ref = self.graph.nodes[ref.node].operands[0]
        parameter = self.graph.parameter_of_node.get(ref.node)
        return parameter is not None and f"{node.module}.weight" in parameter.names

    def _embeddings(self, tensor: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
        found = {}
        for _, node in self._forward:
            if node.name == "embedding" and tensor:
                table = self._choice(node).operands[0]
                assert table is not None
                marks = {table[axis] for axis in tensor}
                if marks != {Replicate()}:
                    found[without_layer(node.module)] = "rows" if marks == {Shard(0)} else "columns"
                    if len(marks) > 1 or not self._reads_own_weight(node, 0):
                        self.no(node.key, "its table is not split in one way, or not the parameter of a module of its own")
        return tuple(found.items())

    def _residual(self, tensor: tuple[int, ...]) -> int | None:
        """How layers hand their result on: whole on the tensor axes, or split over one dim other than samples."""
        marks: dict[tuple[Placement, ...], Node] = {}
        for _, node in self._forward:
            for slot, ref in enumerate(node.operands):
                producer = self.graph.nodes[ref.node]
                inside = layer_path(node.module)
                if inside is None or not self._is_activation(ref) or layer_path(producer.module) == inside:
                    continue
                read = self._choice(node).operands[slot]
                if read is not None and producer.is_op and self.graph.meta(ref).is_floating:
                    marks.setdefault(tuple(read[axis] for axis in tensor), node)
        if not marks:
            return None
        (first, reader), *others = marks.items()
        for layout, node in others:
            self.no(
                node.key,
                f"reads another layer's result as {text(layout)}, {reader.key} as {text(first)}: layouts between layers differ",
            )
        if set(first) <= {Replicate()}:
            return None
        mark = first[0]
        if set(first) != {mark} or not isinstance(mark, Shard) or mark.dim == 0:
            self.no(reader.key, f"reads another layer's result as {text(first)} on the axes of tensor parallelism")
            return None
        return mark.dim

    @cached_property
    def _owners(self) -> set[str]:
        """Modules with parameters of their own, other than those of products."""
        products = {node.module for node, _, _ in self._linears}
        return {name.rpartition(".")[0] for p in self.graph.parameters for name in p.names} - products

    def _norms(self, tensor: tuple[int, ...], sequence: int | None) -> tuple[str, ...]:
        if sequence is None:
            return ()
        norms: dict[str, None] = {}
        for number, node in self._forward:
            out = self._choice(node).outputs[0]
            inside = node.module in self._owners and node.name != "embedding" and self._is_activation(TensorRef(number, 0))
            if inside and out is not None and all(out[axis] == Shard(sequence) for axis in tensor):
                norms[without_layer(node.module)] = None
        return tuple(norms)

    def _sources(self, tensor: tuple[int, ...]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for node, x, w in self._linears:
            if COLUMN in {self._kind(node, x, w, axis) for axis in tensor}:
                producer = self.graph.nodes[node.operands[x].node]
                if producer.module in self._owners:
                    found[without_layer(producer.module)] = None
                else:
                    self.no(
                        node.key,
                        f"is column-parallel and reads {producer.key}, which is not the result of a module with parameters",
                    )
        return tuple(found)

    # ---- changes of placement in forward ------------------------------------------------------------------------------
    def _redistribution(
        self, r: Redistribution, data: tuple[int, ...], tensor: tuple[int, ...], sequence: int | None
    ) -> list[str]:
        """Refuse a change of placement of an activation that the recipe would not make; returns notes."""
        number = self.graph.node_by_key[r.tensor[0]]
        node, ref = self.graph.nodes[number], TensorRef(number, r.tensor[1])
        if not self._is_activation(ref) or node.kind == "input":
            return []
        names, notes = self.plan.mesh.axis_names, []
        for axis, (old, new) in enumerate(zip(r.source, r.target, strict=True)):
            if old == new:
                continue
            moved = f"is moved from {old} to {new} on {names[axis]} for {r.consumers[0][0]}"
            if axis in data:
                if not (isinstance(old, Partial) and not self.graph.meta(ref).shape):
                    self.no(node.key, moved + "; samples stay where they are in a recipe")
            elif axis not in tensor:
                self.no(node.key, moved + "; no product is split there")
            elif layer_of(node.module) is None and self._after_the_layers(number) and self._is_loss(node):
                notes.append(f"the loss is computed split on {names[axis]} in the plan, whole in the recipe")
            elif not self._implied(r, node, old, new, sequence):
                self.no(node.key, moved)
        return notes

    def _implied(self, r: Redistribution, node: Node, old: Placement, new: Placement, sequence: int | None) -> bool:
        """A row-wise product is summed into the layout between layers; a column-wise one gathers what it reads."""
        between: Placement = Replicate() if sequence is None else Shard(sequence)
        if isinstance(old, Partial):
            product = node.name in ("linear", "embedding") or any(
                n.module == node.module and n.module for n, _, _ in self._linears
            )
            return product and new == between
        products = {n.key for n, _, _ in self._linears}
        return old == between and new == Replicate() and all(key in products for key, _ in r.consumers)

    @cached_property
    def _last_product(self) -> int:
        return max((self.graph.node_by_key[node.key] for node, _, _ in self._linears), default=-1)

    def _after_the_layers(self, number: int) -> bool:
        return number > self._last_product

    def _is_loss(self, node: Node) -> bool:
        """Not part of a module with parameters."""
        return node.module not in self._owners and not any(node.module == n.module for n, _, _ in self._linears if n.module)


def _letter(placement: Placement, letters: str) -> str:
    return letters[placement.dim] if isinstance(placement, Shard) else str(placement)


def _texts(choice: Choice) -> str:
    """`S(0)R RS(0) -> S(0)S(2)`"""
    operands, outputs = (" ".join("-" if p is None else text(p) for p in ports) for ports in (choice.operands, choice.outputs))
    return f"{operands} -> {outputs}"
