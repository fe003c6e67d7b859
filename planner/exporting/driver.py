"""The lines that run the blocks one after another: layers that do the same become a loop.

Block results are kept by block number: `f[i]` and `g[i]` what later blocks of the forward and backward pass read, `saved[i]` what
the backward pass reads. A reference to another block can be written relative to the layer (`f[i - 1][0]`) or absolutely
(`f[-1][1]`); consecutive layers form a loop if one of the two spellings is the same in all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.exporting.blocks import wrapped
from planner.exporting.parts import Turn, left, turns
from planner.exporting.program import Block, Program, Value
from planner.graph import BACKWARD, FORWARD, TensorRef, layer_of
from planner.schedule import BlockKey, Part

INDENT = " " * 8


Item = tuple[str, int, int]
"""`f`, `g` or `saved`, block number, position"""


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
        self.where: dict[Value, Item] = {}
        """value -> its place in `f` or `g`"""
        self.saved: dict[Value, tuple[int, int]] = {}
        for block in program.blocks:
            store = "f" if block.key.phase == FORWARD else "g"
            for position, value in enumerate(block.live):
                self.where[value] = store, block.key.number, position
            for position, value in enumerate(block.saved):
                self.saved[value] = block.key.number, position
        self.ended = self._ended()

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
        return self._at(*self._item(value, key), key)

    def _item(self, value: Value, key: BlockKey) -> Item:
        """Where a block finds a value that another one made."""
        if value in self.saved and key.phase == BACKWARD:
            return "saved", *self.saved[value]
        return self.where[value]

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
        behind_block, behind_loop = self._drops(run)
        lines: list[str] = []
        for call in run.calls:
            lines += call.lines()
            if call.part is Part.COMPUTE:
                lines += behind_block
        if not run.is_loop:
            return lines
        span = f"range({first}, {last + 1})" if first <= last else f"range({first}, {last - 1}, -1)"
        return [f"for i in {span}:", *("    " + line for line in lines), *behind_loop]

    def _ended(self) -> dict[BlockKey, dict[tuple[str, int], _Dropped]]:
        """Block -> (store, block number) -> what of it no later block reads."""
        last: dict[Item, BlockKey] = {}
        for block in self.program.blocks:
            for value in block.inputs:
                if value in self.where or value in self.saved:
                    last[self._item(value, block.key)] = block.key
        kept = {self.where[value] for block in self.program.blocks for _, value in block.updates} | {
            self.where[self.program.loss]
        }
        left = Counter((store, number) for store, number, _ in self.where.values())
        left.update(("saved", number) for number, _ in self.saved.values())
        found: dict[BlockKey, dict[tuple[str, int], _Dropped]] = {}
        for block in self.program.blocks:
            items: dict[tuple[str, int], set[int]] = {}
            for store, number, position in (item for item, key in last.items() if key == block.key and item not in kept):
                items.setdefault((store, number), set()).add(position)
            left.subtract({row: len(positions) for row, positions in items.items()})
            found[block.key] = {row: _Dropped(frozenset(there), not left[row]) for row, there in items.items()}
        return found

    def _drops(self, run: Run) -> tuple[list[str], list[str]]:
        """Lines that drop what nothing reads any more: behind each block of a run, and behind its loop."""
        mine = [self._spelled_drops(block, relative=run.is_loop) for block in run.blocks]
        common = {row: _Dropped.common([drops.get(row) for drops in mine]) for row in mine[0]}
        lines, behind = _drop_lines(common), []
        for block, drops in zip(run.blocks, mine, strict=True):
            rest = {row: found.without(common.get(row)) for row, found in drops.items()}
            absolute = {self._absolute(row, block): found for row, found in rest.items() if found.positions}
            if absolute and block is run.blocks[-1]:
                behind = _drop_lines(absolute)
            elif absolute:
                lines += [f"if i == {block.key.number}:", *("    " + line for line in _drop_lines(absolute))]
        return lines, behind

    def _spelled_drops(self, block: Block, *, relative: bool) -> dict[str, _Dropped]:
        found = {}
        for (store, number), dropped in self.ended[block.key].items():
            spelled = self._indexed(store, number, block.key)
            found[spelled.relative if relative and spelled.relative is not None else spelled.absolute] = dropped
        return found

    def _absolute(self, row: str, block: Block) -> str:
        """`f[i - 1]` in the turn of a block -> `f[2]`."""
        return next(
            spelled.absolute
            for store, number in self.ended[block.key]
            for spelled in [self._indexed(store, number, block.key)]
            if row in spelled.texts
        )


@dataclass(frozen=True)
class _Dropped:
    """Positions of a row (`saved[3]`) that are not read any more; `whole`: with them, none of it is."""

    positions: frozenset[int]
    whole: bool

    @classmethod
    def common(cls, several: Sequence[_Dropped | None]) -> _Dropped:
        there = [one if one is not None else cls(frozenset(), False) for one in several]
        return cls(frozenset.intersection(*(one.positions for one in there)), all(one.whole for one in there))

    def without(self, other: _Dropped | None) -> _Dropped:
        """What is left to drop when `other` is dropped."""
        if other is None:
            return self
        return _Dropped(frozenset() if other.whole else self.positions - other.positions, False)


def _drop_lines(rows: Mapping[str, _Dropped]) -> list[str]:
    """`del g[2], saved[1]` for whole rows, `saved[0][10] = None` for parts."""
    whole = [row for row, dropped in rows.items() if dropped.whole]
    parts = [f"{row}[{position}]" for row, dropped in rows.items() if not dropped.whole for position in sorted(dropped.positions)]
    return [*([f"del {', '.join(whole)}"] if whole else []), *([f"{' = '.join(parts)} = None"] if parts else [])]


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
