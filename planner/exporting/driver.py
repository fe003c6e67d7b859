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
from planner.exporting.lower import Block, Program, Value
from planner.graph import BACKWARD, FORWARD, TensorRef, layer_of
from planner.schedule import BlockKey

INDENT = " " * 8


@dataclass(frozen=True)
class Spelling:
    """How one argument can be written: in terms of the layer number `i`, absolutely, or both."""

    relative: str | None
    absolute: str


@dataclass(frozen=True)
class Run:
    """Consecutive blocks that call the same function in the same way."""

    blocks: tuple[Block, ...]
    function: str
    arguments: tuple[str, ...]
    gradients: tuple[str, ...]
    is_loop: bool


class Driver:
    def __init__(self, program: Program, functions: dict[BlockKey, str], noise: dict[BlockKey, tuple[str, ...]]) -> None:
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
        blocks = [block for block in self.program.blocks if block.key.phase == phase]
        return [INDENT + line for run in self._runs(blocks) for line in self._run_lines(run)]

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
        if layer_of(name) != key.number:
            return Spelling(absolute, absolute)
        before, after = name.split(f".{key.number}.", 1)
        return Spelling(f'{table}[f"{before}.{{i}}.{after}"]', absolute)

    def _at(self, store: str, index: int, position: int, key: BlockKey) -> Spelling:
        offset = index - key.number
        relative = "i" if offset == 0 else f"i {'+' if offset > 0 else '-'} {abs(offset)}"
        return Spelling(f"{store}[{relative}][{position}]" if abs(offset) <= 1 else None, f"{store}[{index}][{position}]")

    # ---- loops ------------------------------------------------------------------------------------------------------
    def _runs(self, blocks: Sequence[Block]) -> list[Run]:
        runs, at = [], 0
        while at < len(blocks):
            count = self._longest_run(blocks[at:])
            runs.append(self._run(blocks[at : at + count]))
            at += count
        return runs

    def _spellings(self, block: Block) -> list[Spelling]:
        gradients = [self._by_name("grad", self._gradient_name(parameter), block.key) for parameter, _ in block.gradients]
        noise = [self._noise(name, block) for name in self.noise[block.key]]
        return [*(self._argument(value, block.key) for value in block.inputs), *noise, *gradients]

    def _noise(self, name: str, block: Block) -> Spelling:
        """The argument for a parameter `noise` (of the block's own layer), `noise_3` or `noise_outside`."""
        layer = name.partition("_")[2]
        if layer:
            return Spelling(None, f"dropout_key({-1 if layer == 'outside' else layer})")
        inside = self._in_layers(block)
        return Spelling("dropout_key(i)" if inside else None, f"dropout_key({block.key.number if inside else -1})")

    def _gradient_name(self, parameter: int) -> str:
        return self.graph.parameter_of_node[parameter].name

    def _longest_run(self, blocks: Sequence[Block]) -> int:
        first = blocks[0]
        if not self._in_layers(first):
            return 1
        open_spellings = [{s.relative, s.absolute} - {None} for s in self._spellings(first)]
        count = 1
        for block in blocks[1:]:
            if not self._in_layers(block) or self.functions[block.key] != self.functions[first.key]:
                break
            common = [known & {s.relative, s.absolute} for known, s in zip(open_spellings, self._spellings(block), strict=True)]
            if not all(common):
                break
            open_spellings, count = common, count + 1
        return count

    def _in_layers(self, block: Block) -> bool:
        return 0 <= block.key.number < self.program.num_layers

    def _run(self, blocks: Sequence[Block]) -> Run:
        first = blocks[0]
        every = [self._spellings(block) for block in blocks]
        texts = []
        for column in zip(*every, strict=True):
            same = {s.absolute for s in column}
            relative = column[0].relative
            texts.append(column[0].absolute if len(same) == 1 or relative is None else relative)
        if len(blocks) == 1:
            texts = [column[0].absolute for column in zip(*every, strict=True)]
        count = len(first.inputs) + len(self.noise[first.key])
        return Run(tuple(blocks), self.functions[first.key], tuple(texts[:count]), tuple(texts[count:]), len(blocks) > 1)

    # ---- writing ----------------------------------------------------------------------------------------------------
    def _run_lines(self, run: Run) -> list[str]:
        first, last = run.blocks[0].key.number, run.blocks[-1].key.number
        forward = run.blocks[0].key.phase == FORWARD
        index = "i" if run.is_loop else str(first)
        store, second = ("f", f"saved[{index}]") if forward else ("g", _tuple(run.gradients) if run.gradients else "_")
        lines = _call(f"{store}[{index}], {second}", run.function, starred(run.arguments))
        lines += self._frees(run, index)
        if not run.is_loop:
            return lines
        span = f"range({first}, {last + 1})" if forward else f"range({first}, {last - 1}, -1)"
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
        store, _, rest = target.partition(", (")
        names = rest.rstrip(")").rstrip(",").split(", ")
        return [
            f"{store}, (", *wrapped(names, "    ", width),
            f") = {function}(", *wrapped(arguments, "    ", width), ")",
        ]  # fmt: skip
    return [f"{target} = {function}(", *wrapped(arguments, "    ", width), ")"]
