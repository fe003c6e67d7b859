"""The lines that run the blocks one after another: layers that do the same become a loop.

Block results are kept by block number: `f[i]` and `g[i]` what later blocks of the forward and backward pass read, `saved[i]` what
the backward pass reads. A reference to another block can be written relative to the layer (`f[i - 1][0]`) or absolutely
(`f[-1][1]`); consecutive layers form a loop if one of the two spellings is the same in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from planner.exporting.blocks import wrapped
from planner.exporting.parts import Turn, left, turns
from planner.exporting.program import Block, Program, Value
from planner.graph import BACKWARD, FORWARD, TensorRef, layer_of
from planner.schedule import BlockKey, Part

INDENT = " " * 8


@dataclass(frozen=True)
class Spelling:
    """How one argument can be written: in terms of the layer number `i`, absolutely, or both."""

    relative: str | None
    absolute: str

    @property
    def texts(self) -> set[str]:
        return {self.absolute} if self.relative is None else {self.relative, self.absolute}

    def inside(self, pattern: str) -> Spelling:
        return Spelling(None if self.relative is None else pattern.format(self.relative), pattern.format(self.absolute))


@dataclass(frozen=True)
class _Call:
    """One call of a function, each target and argument in all its spellings."""

    part: Part
    function: str
    targets: tuple[Spelling, ...]
    arguments: tuple[Spelling, ...]

    @property
    def spellings(self) -> tuple[Spelling, ...]:
        return *self.targets, *self.arguments

    @property
    def shape(self) -> tuple[str, int, int]:
        """Calls in one loop agree in this."""
        return self.function, len(self.targets), len(self.arguments)

    def lines(self) -> list[str]:
        targets = [target.absolute for target in self.targets]
        return _call(self.target_text(targets), self.function, starred([a.absolute for a in self.arguments]))

    def target_text(self, targets: list[str]) -> str:
        if self.part is Part.COLLECT:
            return _tuple(targets)
        if self.part is not Part.COMPUTE:
            return targets[0]
        if len(targets) == 1:
            return f"{targets[0]}, _"
        return ", ".join(targets) if not targets[1].startswith("grad[") else f"{targets[0]}, {_tuple(targets[1:])}"


def _common(calls: Sequence[_Call]) -> _Call:
    """The call that a loop makes in each of its turns, in the one spelling that fits all."""
    if len(calls) == 1:
        return calls[0]
    one = calls[0]
    chosen = []
    for column in zip(*(call.spellings for call in calls), strict=True):
        same, relative = {s.absolute for s in column}, column[0].relative
        text = column[0].absolute if len(same) == 1 or relative is None else relative
        chosen.append(Spelling(None, text))
    count = len(one.targets)
    return _Call(one.part, one.function, tuple(chosen[:count]), tuple(chosen[count:]))


@dataclass(frozen=True)
class Run:
    """Consecutive blocks whose turns are written alike."""

    blocks: tuple[Block, ...]
    calls: tuple[_Call, ...]
    is_loop: bool


class Driver:
    def __init__(
        self, program: Program, functions: dict[tuple[BlockKey, Part], str], noise: dict[BlockKey, tuple[str, ...]]
    ) -> None:
        """`noise`: the last parameters of each block's function, which are keys of dropouts."""
        self.noise = noise
        self.program = program
        self.graph = program.graph
        self.functions = functions
        self.where: dict[Value, tuple[str, int, int]] = {}
        """value -> (`f` or `g`, block number, position)"""
        self.saved: dict[Value, tuple[int, int]] = {}
        for block in program.blocks:
            store = "f" if block.key.phase == FORWARD else "g"
            for position, value in enumerate(block.live):
                self.where[value] = store, block.key.number, position
            for position, value in enumerate(block.saved):
                self.saved[value] = block.key.number, position
        self.last_read = self._last_reads()

    def loss(self) -> str:
        store, index, position = self.where[self.program.loss]
        return f"{store}[{index}][{position}]"

    def update_lines(self) -> list[str]:
        """Take the new value of each written buffer: `buffers["norm.mean"] = f[-1][0]`."""
        found = []
        for block in self.program.blocks:
            for leaf, value in block.updates:
                store, index, position = self.where[value]
                name = self.graph.buffer_of_node[leaf].name
                found.append(f'{INDENT}buffers["{name}"] = {store}[{index}][{position}]')
        return found

    def lines(self, phase: str) -> list[str]:
        order = turns(self.program, phase)
        lines: list[str] = []
        if any(turn.block.unshard for turn in order):
            lines.append("w = {}  # block number -> its gathered parameters, on their way since the block before")
        if any(turn.block.reduce for turn in order):
            lines.append("r = {}  # block number -> its gradients, on their way until the next block has run")
        if order and order[0].block.unshard:
            lines += self._unshard(order[0].block, order[0].block.key).lines()
        for run in self._runs(order):
            lines += self._run_lines(run)
        last = left(order)
        if last is not None:
            lines += self._collect(last, last.key).lines()
        return [INDENT + line for line in lines]

    # ---- spelling ---------------------------------------------------------------------------------------------------
    def _argument(self, value: Value, key: BlockKey) -> Spelling:
        node = self.graph.nodes[value.ref.node]
        if value.moved is None and not node.is_op:
            if node.kind == "tangent":
                return Spelling("dloss", "dloss")
            if node.kind == "input":
                position = [item.node for item in self.graph.inputs].index(value.ref.node)
                return Spelling(f"inputs[{position}]", f"inputs[{position}]")
            return self._by_name("p", self._stored_name(value.ref), key)
        if value.moved is None and value in self.saved and key.phase == BACKWARD:
            index, position = self.saved[value]
            return self._at("saved", index, position, key)
        return self._at(*self.where[value], key)

    def _stored_name(self, ref: TensorRef) -> str:
        if ref.node in self.graph.buffer_of_node:
            return self.graph.buffer_of_node[ref.node].name
        return self.graph.parameter_of_node[ref.node].name

    def _by_name(self, table: str, name: str, key: BlockKey) -> Spelling:
        absolute = f"{table}[{name!r}]".replace("'", '"')
        layer = layer_of(name)
        if layer is None or abs(layer - key.number) > 1:
            return Spelling(None, absolute)
        before, after = name.split(f".{layer}.", 1)
        return Spelling(f'{table}[f"{before}.{{{_relative(layer, key)}}}.{after}"]', absolute)

    def _at(self, store: str, index: int, position: int, key: BlockKey) -> Spelling:
        return self._indexed(store, index, key).inside(f"{{}}[{position}]")

    def _indexed(self, store: str, index: int, key: BlockKey) -> Spelling:
        relative = f"{store}[{_relative(index, key)}]" if abs(index - key.number) <= 1 else None
        return Spelling(relative, f"{store}[{index}]")

    def _popped(self, store: str, index: int, key: BlockKey) -> Spelling:
        """All that a function returned; the driver keeps no reference."""
        relative = f"*{store}.pop({_relative(index, key)})" if abs(index - key.number) <= 1 else None
        return Spelling(relative, f"*{store}.pop({index})")

    # ---- calls ------------------------------------------------------------------------------------------------------
    def _turn_calls(self, turn: Turn) -> tuple[_Call, ...]:
        """What the file says in the turn of a block: the next block's unshard, the block, an earlier collect, its own reduce."""
        key, calls = turn.block.key, []
        if turn.ahead is not None:
            calls.append(self._unshard(turn.ahead, key))
        calls.append(self._compute(turn.block))
        if turn.collected is not None:
            calls.append(self._collect(turn.collected, key))
        if turn.block.reduce:
            here = self._indexed("r", key.number, key)
            calls.append(_Call(Part.REDUCE, self.functions[key, Part.REDUCE], (here,), (here.inside("*{}"),)))
        return tuple(calls)

    def _unshard(self, block: Block, key: BlockKey) -> _Call:
        """`key`: the block in whose turn it is called."""
        target = self._indexed("w", block.key.number, key)
        arguments = tuple(self._by_name("p", self._stored_name(value.ref), key) for value in block.unshard_inputs)
        return _Call(Part.UNSHARD, self.functions[block.key, Part.UNSHARD], (target,), arguments)

    def _compute(self, block: Block) -> _Call:
        key = block.key
        first = self._indexed("f" if key.phase == FORWARD else "g", key.number, key)
        weights = (self._popped("w", key.number, key),) if block.weights else ()
        noise = (self._noise(name, block) for name in self.noise[key])
        arguments = (*(self._argument(value, key) for value in block.inputs), *weights, *noise)
        targets: tuple[Spelling, ...]
        if key.phase == FORWARD:
            targets = (first, self._indexed("saved", key.number, key))
        elif block.reduce:
            targets = (first, self._indexed("r", key.number, key))
        else:
            targets = (first, *self._gradients(block, key))
        return _Call(Part.COMPUTE, self.functions[key, Part.COMPUTE], targets, arguments)

    def _collect(self, block: Block, key: BlockKey) -> _Call:
        arguments = (self._popped("r", block.key.number, key),)
        return _Call(Part.COLLECT, self.functions[block.key, Part.COLLECT], self._gradients(block, key), arguments)

    def _gradients(self, block: Block, key: BlockKey) -> tuple[Spelling, ...]:
        return tuple(self._by_name("grad", self.graph.parameter_of_node[leaf].name, key) for leaf, _ in block.gradients)

    def _noise(self, name: str, block: Block) -> Spelling:
        """The argument for a parameter `noise` (of the block's own layer), `noise_3` or `noise_outside`."""
        layer = name.partition("_")[2]
        if layer:
            return Spelling(None, f"dropout_key({-1 if layer == 'outside' else layer})")
        inside = self._in_layers(block)
        return Spelling("dropout_key(i)" if inside else None, f"dropout_key({block.key.number if inside else -1})")

    # ---- loops ------------------------------------------------------------------------------------------------------
    def _runs(self, order: Sequence[Turn]) -> list[Run]:
        runs, at = [], 0
        while at < len(order):
            count = self._longest_run(order[at:])
            runs.append(self._run(order[at : at + count]))
            at += count
        return runs

    def _longest_run(self, order: Sequence[Turn]) -> int:
        if not self._in_layers(order[0].block):
            return 1
        first = self._turn_calls(order[0])
        open_spellings = [s.texts for call in first for s in call.spellings]
        count = 1
        for turn in order[1:]:
            calls = self._turn_calls(turn)
            if not self._in_layers(turn.block) or [c.shape for c in calls] != [c.shape for c in first]:
                break
            spelled = [s.texts for call in calls for s in call.spellings]
            common = [known & texts for known, texts in zip(open_spellings, spelled, strict=True)]
            if not all(common):
                break
            open_spellings, count = common, count + 1
        return count

    def _in_layers(self, block: Block) -> bool:
        return 0 <= block.key.number < self.program.num_layers

    def _run(self, order: Sequence[Turn]) -> Run:
        columns = zip(*(self._turn_calls(turn) for turn in order), strict=True)
        return Run(tuple(turn.block for turn in order), tuple(_common(calls) for calls in columns), len(order) > 1)

    # ---- writing ----------------------------------------------------------------------------------------------------
    def _run_lines(self, run: Run) -> list[str]:
        first, last = run.blocks[0].key.number, run.blocks[-1].key.number
        lines: list[str] = []
        for call in run.calls:
            lines += call.lines()
            if call.part is Part.COMPUTE:
                lines += self._frees(run, "i" if run.is_loop else str(first))
        if not run.is_loop:
            return lines
        span = f"range({first}, {last + 1})" if first <= last else f"range({first}, {last - 1}, -1)"
        return [f"for i in {span}:", *("    " + line for line in lines)]

    def _last_reads(self) -> dict[tuple[str, int], int]:
        """(store, block number) -> position in the program of the last block that reads it."""
        last: dict[tuple[str, int], int] = {}
        for at, block in enumerate(self.program.blocks):
            for value in block.inputs:
                if value in self.saved and block.key.phase == BACKWARD:
                    last["saved", self.saved[value][0]] = at
                elif value in self.where:
                    store, index, _ = self.where[value]
                    last[store, index] = at
        last["f", self.where[self.program.loss][1]] = len(self.program.blocks)
        for block in self.program.blocks:
            if block.updates:
                last["f", block.key.number] = len(self.program.blocks)
        return last

    def _frees(self, run: Run, index: str) -> list[str]:
        """Drop what no later block reads: of the block before (`f`, `g`), and what was saved for the block that just ran."""
        at = {block.key: number for number, block in enumerate(self.program.blocks)}
        if run.blocks[0].key.phase == FORWARD:
            return self._free("f", run, index, -1, at)
        lines = [*self._free("g", run, index, +1, at), *self._free("saved", run, index, 0, at)]
        return [f"{lines[0]}, {lines[1].removeprefix('del ')}"] if len(lines) == 2 and "if" not in "".join(lines) else lines

    def _free(self, store: str, run: Run, index: str, offset: int, at: dict[BlockKey, int]) -> list[str]:
        """`del f[i - 1]` where all of the run's blocks may, `if` for the exceptions; nothing where none may."""
        may = [
            block.key.number
            for block in run.blocks
            if self.last_read.get((store, block.key.number + offset), len(at)) <= at[block.key]
        ]
        if not may:
            return []
        written = index if not offset else f"{index} {'-' if offset < 0 else '+'} 1" if run.is_loop else str(int(index) + offset)
        keep = sorted({block.key.number for block in run.blocks} - set(may))
        return [f"{f'if i not in {keep}: ' if keep else ''}del {store}[{written}]"] if not keep else [
            f"if i not in {keep}:", f"    del {store}[{written}]"
        ]  # fmt: skip


def _relative(index: int, key: BlockKey) -> str:
    offset = index - key.number
    return "i" if offset == 0 else f"i {'+' if offset > 0 else '-'} {abs(offset)}"


def starred(arguments: Sequence[str]) -> list[str]:
    """`saved[i][2], saved[i][3], saved[i][4]` -> `*saved[i][2:5]`."""
    out: list[str] = []
    at = 0
    while at < len(arguments):
        match = _ITEM.fullmatch(arguments[at])
        end = at + 1
        if match is not None:
            while end < len(arguments) and arguments[end] == f"{match[1]}[{int(match[2]) + end - at}]":
                end += 1
        if match is not None and end - at > 2:
            out.append(f"*{match[1]}[{match[2]}:{int(match[2]) + end - at}]")
        else:
            out += arguments[at:end]
        at = end
    return out


_ITEM = re.compile(r"((?:f|g|saved)\[.+?\])\[(\d+)\]")


def _tuple(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _call(target: str, function: str, arguments: Sequence[str], width: int = 118) -> list[str]:
    one = f"{target} = {function}({', '.join(arguments)})"
    if len(one) <= width:
        return [one]
    if len(target) > width - 30:
        before, _, rest = target.partition("(")
        names = rest.rstrip(")").rstrip(",").split(", ")
        return [
            f"{before}(", *wrapped(names, "    ", width),
            *_call(")", function, arguments, width),
        ]  # fmt: skip
    return [f"{target} = {function}(", *wrapped(arguments, "    ", width), ")"]
