"""Blocks of a program as functions in text. Blocks with the same text share one function."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from planner.errors import ExportError
from planner.exporting.ops import Site, write_op
from planner.exporting.program import Arrive, Block, Call, Move, Program, Statement, Value, reads_of
from planner.exporting.symbols import Sizes
from planner.graph import FORWARD, JointGraph, Node, TensorMeta, TensorRef, layer_of, without_layer
from planner.placement import Placements, identifier
from planner.region import REGION_BACKWARD
from planner.schedule import Part

LINE = 130
DROPOUT = "planner.dropout.default"
NOISE = "noise"
"""Parameter of a block function that drops elements: the key of its layer. `noise_3`, `noise_outside`: of another one, whose
dropout is repeated there."""
_LAYER_PREFIX = re.compile(r"^.*?[A-Za-z_]\w*\.\d+\.")


@dataclass(frozen=True)
class Function:
    """One function of the file: parameters (the last ones are `keys` of dropouts) and body, without its name."""

    parameters: tuple[str, ...]
    lines: tuple[str, ...]
    keys: tuple[str, ...] = ()

    def write(self, name: str) -> str:
        head = call_lines(f"def {name}", self.parameters, ":")
        return "\n".join([*head, *("    " + line for line in self.lines)])


@dataclass
class Layouts:
    """Names of the layouts used in the file, in order of first use."""

    names: dict[Placements, str] = field(default_factory=dict)
    taken: frozenset[str] = frozenset()

    def name(self, placements: Placements) -> str:
        if placements not in self.names:
            name = identifier(placements)
            self.names[placements] = f"{name}_" if name in self.taken else name
        return self.names[placements]


def marks(placements: Placements) -> tuple[str, ...]:
    """`("S0", "R")`: a layout as the exported file spells it."""
    return tuple(identifier((one,)) for one in placements)


@dataclass(frozen=True)
class BlockWriter:
    """Writes one block; `tiny` maps a node to the same node at tiny size (and its operands' shapes)."""

    program: Program
    tiny: TinyNodes
    sizes: Sizes
    layouts: Layouts

    def functions(self, block: Block) -> dict[Part, Function]:
        """The functions of a block; `compute` always, the others where there is something to do."""
        found = {}
        if block.unshard:
            found[Part.UNSHARD] = _Writing(self, block, block.unshard).unshard()
        found[Part.COMPUTE] = _Writing(self, block, block.statements).compute()
        if block.reduce:
            found[Part.REDUCE] = _Writing(self, block, block.reduce).reduce()
            found[Part.COLLECT] = _Writing(self, block, ()).collect()
        return found


def _last_reads(block: Block) -> dict[Value, int]:
    """value -> number of the last statement that reads it; one beyond the end for what the block returns."""
    last = {value: at for at, statement in enumerate(block.statements) for value in reads_of(statement)}
    return {**last, **dict.fromkeys((*block.live, *block.saved, *block.handed), len(block.statements))}


@dataclass(frozen=True)
class TinyNodes:
    """The graph at tiny size, looked up by the keys of the full one; layers beyond its depth repeat its layers."""

    graph: JointGraph
    tiny: JointGraph | None

    def node(self, index: int) -> Node:
        full = self.graph.nodes[index]
        if self.tiny is None:
            return full
        found = self.tiny.node_by_key.get(full.key)
        if found is None:
            found = self.tiny.node_by_key.get(self._in_existing_layer(full.key))
        if found is None or not _alike(full, self.tiny.nodes[found]):
            raise ExportError(
                f"the tiny version of the model has no counterpart of {full.key}",
                hint="The tiny version must have the same structure as the full model, with the same number of layers.",
            )
        return self.tiny.nodes[found]

    def _in_existing_layer(self, key: str) -> str:
        assert self.tiny is not None
        path, layers = key.partition("/")[0].rpartition(":")[2], self.tiny.layers
        layer = layer_of(path)
        if layer is None or not layers:
            return key
        return key.replace(f".{layer}", f".{layers[layer % len(layers)]}", 1)

    def meta(self, ref: TensorRef) -> TensorMeta:
        found = self.node(ref.node).outputs[ref.output]
        assert found is not None
        return found


def _alike(full: Node, tiny: Node) -> bool:
    return full.op == tiny.op and len(full.operands) == len(tiny.operands) and len(full.args) == len(tiny.args)


@dataclass
class _Writing:
    """One function of a block being written; thrown away afterwards."""

    writer: BlockWriter
    block: Block
    statements: tuple[Statement, ...]
    names: dict[Value, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    module: str = ""
    at: int = 0
    """number of the statement being written"""
    keys: dict[str, None] = field(default_factory=dict)
    """parameters that hold keys of dropouts"""
    living: dict[Value, None] = field(default_factory=dict)
    """results that are not deleted yet"""

    @property
    def graph(self) -> JointGraph:
        return self.writer.program.graph

    @cached_property
    def last_reads(self) -> dict[Value, int]:
        return _last_reads(self.block)

    def delete_dead(self) -> None:
        """Give back the memory of results that nothing reads any more; the caller holds the block's inputs anyway."""
        dead = [value for value in self.living if self.last_reads.get(value, -1) < self.at]
        for value in dead:
            del self.living[value]
        self.lines += [f"del {line.rstrip(',')}" for line in wrapped([self.names[v] for v in dead], "", LINE - 8)]

    def compute(self) -> Function:
        block = self.block
        parameters = self.parameters((*block.inputs, *block.weights))
        for at, statement in enumerate(block.statements):
            self.at = at
            if not isinstance(statement, Call):
                self.comment_reader(statement.result)
            self.statement(statement)
        second = block.saved if block.key.phase == FORWARD else block.handed
        self.lines += return_lines([self.names[v] for v in block.live], [self.names[v] for v in second])
        return Function((*parameters, *self.keys), tuple(self.lines), tuple(self.keys))

    def unshard(self) -> Function:
        parameters = self.parameters(self.block.unshard_inputs)
        for statement in self.statements:
            self.statement(statement)
        self.lines += tuple_return_lines([self.names[v] for v in self.block.weights])
        return Function(parameters, tuple(self.lines))

    def reduce(self) -> Function:
        """Gradients as the block hands them out -> begun redistributions, and those that need none."""
        parameters = self.parameters(self.block.handed)
        for statement in self.statements:
            self.statement(statement)
        self.lines += tuple_return_lines([self.names[value] for _, value in self.block.gradients])
        return Function(parameters, tuple(self.lines))

    def collect(self) -> Function:
        """What `reduce` returned -> all gradients as they are stored."""
        gradients = [value for _, value in self.block.gradients]
        parameters = self.parameters(gradients)
        for move in self.block.reduce:
            self.arrive(Arrive(move.result))
        self.lines += tuple_return_lines([self.names[value] for value in gradients])
        return Function(parameters, tuple(self.lines))

    def parameters(self, values: Iterable[Value]) -> tuple[str, ...]:
        names = []
        for value in values:
            names.append(self.fresh(self.input_name(value)))
            self.names[value] = names[-1]
            if value in self.block.weights:
                self.living[value] = None
        return tuple(names)

    def statement(self, statement: Statement) -> None:
        if isinstance(statement, Call):
            self.call(statement)
        elif isinstance(statement, Move):
            self.move(statement)
        else:
            self.arrive(statement)

    def fresh(self, base: str) -> str:
        """A variable name that nothing else uses."""
        clean = re.sub(r"\W", "_", base).lower().strip("_") or "x"
        clean = _READABLE.get(clean, clean)
        if clean[0].isdigit() or keyword.iskeyword(clean) or hasattr(builtins, clean) or clean in _RESERVED:
            clean = f"{clean}_" if not clean[0].isdigit() else f"x{clean}"
        name, count = clean, 1
        while name in self.taken:
            count += 1
            name = f"{clean}_{count}"
        self.taken.add(name)
        return name

    def input_name(self, value: Value) -> str:
        """Parameters and batch inputs by their names, what only this block reads of another one `x`, the rest by its op."""
        node = self.graph.nodes[value.ref.node]
        if value in self.block.weights or (self.statements is not self.block.statements and value.moved is not None):
            return self.moved_name(value)
        if node.is_op and value in self.block.private:
            return "x" if node.phase == FORWARD else "dx"
        if node.kind in ("param", "buffer"):
            return self.leaf_name(node)
        if node.kind == "tangent":
            return "dloss"
        if node.kind == "input":
            return node.key.partition(":")[2]
        return output_name(node, value.ref.output)

    def leaf_name(self, node: Node) -> str:
        path = node.key.partition(":")[2].removesuffix(".weight")
        return _LAYER_PREFIX.sub("", path) if self.in_layers else path

    @property
    def in_layers(self) -> bool:
        return 0 <= self.block.key.number < self.writer.program.num_layers

    def move(self, move: Move) -> None:
        source = self.names[move.source]
        base = re.sub(r"__[a-z0-9_]+$", "", source)
        name = self.fresh(f"{base}__{identifier(self.writer.program.placements(move.result)).lower()}")
        self.names[move.result] = name
        self.living[move.result] = None
        function = "redistribute_begin" if move.begun else "redistribute"
        self.lines.append(f"{name} = {function}({', '.join([source, *self.chain(move.number)])})")

    def arrive(self, arrive: Arrive) -> None:
        """Under the same name: no second name keeps the buffer when this one is deleted."""
        assert arrive.result.moved is not None
        name = self.names[arrive.result]
        self.lines.append(f"{name} = redistribute_end({', '.join([name, *self.chain(arrive.result.moved)])})")

    def chain(self, number: int) -> list[str]:
        """The layouts that a redistribution goes through, source first."""
        redistribution = self.writer.program.plan.redistributions[number]
        passed = (redistribution.source, *(step.target for step in redistribution.steps))
        return [self.writer.layouts.name(placements) for placements in passed]

    def moved_name(self, value: Value) -> str:
        """Name of a parameter-only value or a gradient that another function of the block made."""
        node = self.graph.nodes[value.ref.node]
        base = output_name(node, value.ref.output) if node.is_op else self.leaf_name(node)
        return base if value.moved is None else f"{base}__{identifier(self.writer.program.placements(value)).lower()}"

    def call(self, call: Call) -> None:
        node = self.graph.nodes[call.node]
        choice = self.writer.program.plan.choices[node.key]
        if choice.kept:
            (source,) = call.operands
            assert source is not None
            self.names[Value(TensorRef(call.node, 0))] = self.names[source]
            return
        tiny = self.writer.tiny.node(call.node)
        self.comment(node)
        site = Site(
            node=node,
            tiny=tiny,
            inputs=tuple(self.graph.meta(ref) for ref in node.operands),
            tiny_inputs=tuple(self.tiny_meta(call.node, slot) for slot in range(len(node.operands))),
            choice=choice,
            names=tuple(None if value is None else self.names[value] for value in call.operands),
            sizes=self.writer.sizes,
            layout=self.writer.layouts.name,
            noise=self.noise(node),
        )
        written = write_op(site)
        targets = []
        for output, meta in enumerate(node.outputs):
            name = "_" if meta is None else self.fresh(output_name(node, output))
            targets.append(name)
            self.names[Value(TensorRef(call.node, output))] = name
            if meta is not None:
                self.living[Value(TensorRef(call.node, output))] = None
        comment = ", ".join("-" if p is None else self.writer.layouts.name(p) for p in choice.outputs)
        self.lines += assignment_lines(", ".join(targets), written, comment)

    def noise(self, node: Node) -> str:
        """The key of a dropout's layer: an argument of the function, because its text cannot be compiled."""
        if node.op != DROPOUT:
            return ""
        layer = layer_of(node.module)
        own = layer == (self.block.key.number if self.in_layers else None)
        name = NOISE if own else f"{NOISE}_{'outside' if layer is None else layer}"
        self.keys[name] = None
        return name

    def tiny_meta(self, node: int, slot: int) -> TensorMeta:
        return self.writer.tiny.meta(self.graph.nodes[node].operands[slot])

    def comment_reader(self, moved: Value) -> None:
        """A move that the next op reads stands under that op's module."""
        reader = next((s for s in self.block.statements[self.at :] if isinstance(s, Call)), None)
        if reader is not None and any(value is not None and value.ref == moved.ref for value in reader.operands):
            self.comment(self.graph.nodes[reader.node])

    def comment(self, node: Node) -> None:
        """The module path where it changes, as the layers have it in common."""
        module = without_layer(node.module)
        if module and self.graph.repeated_layer(node) is not None:
            module += ", forward again"
        if module and module != self.module:
            if self.statements is self.block.statements:
                self.delete_dead()
            self.lines.append(f"# {module}")
            self.module = module


_READABLE = {"sum": "total", "slice": "part", "pow": "power", "max": "highest", "min": "lowest", "all": "every", "any": "some"}
"""Other names for results whose op's name means something else in Python."""

_RESERVED = frozenset({
    "torch", "aten", "dist", "nn", "math", "os", "sys", "json", "time", "hashlib", "threading", "local", "move", "piece", "even",
    "split", "join", "redistribute", "sdpa_fwd", "sdpa_bwd", "own_index", "batch", "cut", "check", "train", "main", "start",
    "shard_dim", "local_shape", "noise", "dropout", "dropout_key", "mixed", "initial", "configure", "arguments", "parameters",
    "compare", "log", "redistribute_begin", "redistribute_end", "padded",
})  # fmt: skip
"""Names of the file that a variable of a block must not hide."""

_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def output_name(node: Node, output: int) -> str:
    """What a reader would call a result: a linear by its module, others by their op."""
    if node.op == _ATTENTION:
        return ("attention", "logsumexp")[output]
    if node.op.startswith(_ATTENTION.removesuffix(".default") + "_backward"):
        return ("dq", "dk", "dv")[output]
    if node.op == REGION_BACKWARD:
        return f"d_{node.name.removeprefix('region_').removesuffix('_backward')}_{node.args[3][output]}"
    last = node.module.rpartition(".")[2]
    if node.op == "planner.einsum.default" and last:
        if node.phase == FORWARD or node.rematerialised:
            return last
        return f"d_{last}_weight" if "weight" in node.name else f"d_{last}"
    if node.name == "cast" and last and node.operands:
        return f"{last}_low" if node.outputs[0] is not None and node.outputs[0].dtype == "bfloat16" else f"{last}_fp32"
    return node.name if len(node.outputs) == 1 else f"{node.name}_{output}"


# ---- lines ----------------------------------------------------------------------------------------------------------
def wrapped(items: Iterable[str], indent: str, width: int = LINE) -> list[str]:
    """Comma-separated items over as many lines as needed, each ending in a comma."""
    lines, current = [], indent
    for item in items:
        piece = f"{item}, "
        if len(current) + len(piece) > width and current != indent:
            lines.append(current.rstrip())
            current = indent
        current += piece
    if current != indent:
        lines.append(current.rstrip())
    return lines


def call_lines(function: str, arguments: Iterable[str], end: str = "", indent: str = "") -> list[str]:
    arguments = list(arguments)
    one = f"{indent}{function}({', '.join(arguments)}){end}"
    if len(one) <= LINE:
        return [one]
    return [f"{indent}{function}(", *wrapped(arguments, indent + "    "), f"{indent}){end}"]


def assignment_lines(target: str, written: str, comment: str) -> list[str]:
    one = f"{target} = {written}"
    if len(one) + len(comment) + 8 <= LINE:
        return [f"{one}  # {comment}"]
    if len(one) + 4 <= LINE:
        return [f"# {comment}:", one]
    function, _, inside = written.partition("(")
    return [f"# {comment}:", f"{target} = {function}(", *wrapped(_arguments(inside[:-1]), "    ", LINE - 4), ")"]


def _arguments(text: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def return_lines(live: list[str], second: list[str]) -> list[str]:
    """Lists: the caller drops their items one by one."""
    one = f"return [{', '.join(live)}], [{', '.join(second)}]"
    if len(one) + 4 <= LINE:
        return [one]
    inner = ["    [", *wrapped(second, "        ", LINE - 4), "    ],"] if second else ["    [],"]
    return ["return (", "    [", *wrapped(live, "        ", LINE - 4), "    ],", *inner, ")"]


def tuple_return_lines(names: list[str]) -> list[str]:
    one = f"return {tuple_text(names)}"
    return [one] if len(one) + 4 <= LINE else ["return (", *wrapped(names, "    ", LINE - 4), ")"]


def tuple_text(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def layout_lines(layouts: Layouts) -> list[str]:
    return [quoted(f"{name} = {marks(placements)!r}") for placements, name in layouts.names.items()]


def quoted(text: str) -> str:
    """Text made by `repr`, with double quotes where that changes nothing."""
    return text if '"' in text or "\\" in text else text.replace("'", '"')
