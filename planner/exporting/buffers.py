"""First values of buffers as text: one function per distinct value, repeating what the model's own code computed, at any size."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from planner.errors import ExportError
from planner.exporting.symbols import Sizes
from planner.graph import Buffer, DtypeRef, FirstValue, JointGraph, OperandRef, ValueStep


def require_known(graph: JointGraph) -> None:
    """Raises ExportError naming every buffer whose first value is not known."""
    missing = [node.key for index, node in enumerate(graph.nodes) if node.kind == "buffer" and index not in graph.buffer_of_node]
    if missing:
        raise ExportError(
            f"this graph does not say how {missing[0]} is made", hint="It was traced by an older version; trace again."
        )
    unknown = [f"{buffer.name} ({buffer.unknown})" for buffer in graph.buffers if buffer.first_value is None]
    if unknown:
        raise ExportError(
            f"the first value of the buffer {'; '.join(unknown)} is not known",
            hint="Build it in the factory with torch operators (arange, full, tril, ...), or compute it inside forward.",
        )


class _OtherStructure(Exception):
    """The first values at full and at tiny size do not consist of the same steps."""


@dataclass
class BufferFunctions:
    """The functions of one file, equal ones shared."""

    sizes: Sizes
    names: dict[tuple[str, ...], str] = field(default_factory=dict)
    """lines of the body -> name"""

    def name(self, buffer: Buffer, full: FirstValue, tiny: FirstValue) -> str:
        try:
            lines = self._body(full, tiny)
        except _OtherStructure:
            bodies = [
                [f"    {line}" for line in self._body(first_value, first_value, literal=True)] for first_value in (tiny, full)
            ]
            lines = ["if OPTIONS.tiny:", *bodies[0], "else:", *bodies[1]]
        key = tuple(lines)
        if key not in self.names:
            base = f"first_{buffer.name.rpartition('.')[2]}"
            taken = set(self.names.values())
            numbered = (base if number == 1 else f"{base}_{number}" for number in itertools.count(1))
            self.names[key] = next(name for name in numbered if name not in taken)
        return self.names[key]

    def text(self) -> str:
        return "\n\n\n".join(
            "\n".join([f"def {name}(name):", *(f"    {line}" for line in lines)]) for lines, name in self.names.items()
        )

    def _body(self, full: FirstValue, tiny: FirstValue, *, literal: bool = False) -> list[str]:
        if [(step.op, step.outputs) for step in full] != [(step.op, step.outputs) for step in tiny]:
            raise _OtherStructure
        lines, count = [], 0
        for step, small in zip(full, tiny, strict=True):
            targets = [f"x{count + output}" for output in range(step.outputs)]
            count += step.outputs
            lines.append(f"{', '.join(targets)} = {self._call(step, small, literal=literal)}")
        _, last = lines[-1].split(" = ", 1)
        return [*lines[:-1], f"return {last}"] if full[-1].outputs == 1 else [*lines, f"return x{count - 1}"]

    def _call(self, step: ValueStep, tiny: ValueStep, *, literal: bool) -> str:
        if step.op in ("literal", "packed"):
            if step == tiny:
                return _literal_text(step)
            return f"{_literal_text(tiny)} if OPTIONS.tiny else {_literal_text(step)}"
        if step.op == "drawn":
            kind, first, second, shape = step.args
            written = self._argument(shape, tiny.args[3], literal=literal)
            return f"drawn(name, {written}, ({kind!r}, {first!r}, {second!r}))".replace("'", '"')
        if len(step.args) != len(tiny.args) or [k for k, _ in step.kwargs] != [k for k, _ in tiny.kwargs]:
            raise _OtherStructure
        args = [self._argument(a, b, literal=literal) for a, b in zip(step.args, tiny.args, strict=True)]
        pairs = zip(step.kwargs, tiny.kwargs, strict=True)
        args += [
            f"{name}={self._argument(a, b, literal=literal)}" for (name, a), (_, b) in pairs if a is not None or b is not None
        ]
        return f"{step.op}({', '.join(args)})" if step.op.startswith("aten.") else f"torch.ops.{step.op}({', '.join(args)})"

    def _argument(self, full: Any, tiny: Any, *, literal: bool) -> str:
        if type(full) is not type(tiny) and not {type(full), type(tiny)} <= {int, float}:
            raise _OtherStructure
        if isinstance(full, tuple):
            if len(full) != len(tiny):
                raise _OtherStructure
            return f"[{', '.join(self._argument(a, b, literal=literal) for a, b in zip(full, tiny, strict=True))}]"
        if isinstance(full, OperandRef | DtypeRef | bool | str) or full is None:
            if full != tiny:
                raise _OtherStructure
            return (
                f"x{full.index}"
                if isinstance(full, OperandRef)
                else f"torch.{full.name}"
                if isinstance(full, DtypeRef)
                else repr(full)
            )
        return _number_text(full) if literal else self._number(full, tiny)

    def _number(self, full: float, tiny: float) -> str:
        """A number as a product of named sizes, else as a constant of its own."""
        if isinstance(full, int) and isinstance(tiny, int):
            return self.sizes.number(full, tiny)
        try:
            return self.sizes.real(float(full), float(tiny))
        except ExportError:
            return self.sizes.constant(full, tiny)


def _number_text(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _literal_text(step: ValueStep) -> str:
    dtype, shape, numbers = step.args
    if step.op == "packed":
        return f'unpacked("{numbers}", torch.{dtype.name}, {list(shape)})'
    if not shape:
        return f"torch.tensor({_number_text(numbers[0])}, dtype=torch.{dtype.name})"
    written = f"torch.tensor([{', '.join(map(_number_text, numbers))}], dtype=torch.{dtype.name})"
    return written if len(shape) == 1 else f"{written}.reshape({list(shape)})"
