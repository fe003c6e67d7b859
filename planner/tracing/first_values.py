"""How the user's own code makes each buffer, found by watching it run: the operators that lead to its value, with their exact
arguments. An exported file repeats them, at any size, instead of carrying the numbers.

Everything the factory runs is noted on a tape, in place writes and views too. A first value is the part of the tape that the
buffer's storage depends on, in its order. Numbers that come from outside (a list, an array) are carried as literals when they are
few; random numbers only where the whole buffer is one fill that `init_rules` knows.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from planner import torch_compat
from planner.graph import DtypeRef, FirstValue, InitRule, OperandRef, ValueStep

MAX_LISTED = 64
"""Largest literal written as numbers; larger ones are packed."""
MAX_PACKED_BYTES, MAX_PACKED_CHARACTERS = 2**22, 32_768
"""Largest tensor that is packed, and the longest text it may become."""

_DISPATCH: Any = torch_compat.dispatch_mode_class()
_Key = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(eq=False)
class _Value:
    """A tensor on the tape: what made it, and which of its results it is."""

    step: int
    output: int


@dataclass(eq=False)
class _Step:
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    reads: list[_Value]
    storages: set[int]
    """storages read or written"""
    written: set[int]
    outputs: int = 1
    impossible: str = ""
    """why this step cannot be repeated"""


class RealConstants(TorchFunctionMode):
    """While active, `torch.tensor` of Python numbers keeps its numbers whatever the device: they are made on the CPU first."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is None and not kwargs.get("requires_grad"):
            return func(*args, **{**kwargs, "device": "cpu"}).to(self._device)
        return func(*args, **kwargs)


class ValueRecorder(_DISPATCH):
    """While active, keeps the tape. Ask with `first_value(tensor)` afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[_Step] = []
        self._values: dict[_Key, _Value] = {}
        self._bases: dict[int, tuple[_Value, torch.dtype]] = {}
        self._kept: dict[int, Any] = {}  # storages are kept alive, so that their addresses stay unique

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            return func(*args, **kwargs)
        step = self._read(func, args, kwargs)
        result = func(*args, **kwargs)
        self._note(step, result, func)
        return result

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Step:
        """The step as it is before the operator runs: what it reads may be changed by it."""
        step = _Step(str(func), (), (), [], set(), set())

        def encode(value: Any) -> Any:
            if isinstance(value, Tensor):
                step.storages.add(_address(value))
                step.reads.append(self._value(value))
                return OperandRef(len(step.reads) - 1)
            if isinstance(value, list | tuple):
                return tuple(encode(item) for item in value)
            if isinstance(value, torch.dtype):
                return DtypeRef(str(value).removeprefix("torch."))
            if value is None or isinstance(value, bool | int | float | str):
                return value
            if not isinstance(value, torch.device | torch.layout | torch.memory_format):
                step.impossible = f"it is made by {func} of a {type(value).__name__}"
            return None

        arguments = func._schema.arguments
        for number, argument in enumerate(arguments):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            if isinstance(given, Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                step.written.add(_address(given))
        step.args = tuple(encode(value) for value in args)
        step.kwargs = tuple((name, encode(value)) for name, value in kwargs.items() if name not in _PLACE)
        if torch.Tag.nondeterministic_seeded in func.tags:
            step.impossible = f"it is drawn by {func}"
        return step

    def _note(self, step: _Step, result: Any, func: Any) -> None:
        outputs = list(result) if isinstance(result, list | tuple) else [result]
        step.outputs = len(outputs)
        first = next((out for out in outputs if isinstance(out, Tensor)), None)
        named = dict(step.kwargs)
        if first is not None and not step.reads and any(argument.name == "dtype" for argument in func._schema.arguments):
            step.kwargs = tuple({**named, "dtype": DtypeRef(str(first.dtype).removeprefix("torch."))}.items())
        self._add(step, [out if isinstance(out, Tensor) else None for out in outputs])

    def _add(self, step: _Step, outputs: list[Tensor | None]) -> None:
        self._steps.append(step)
        for number, tensor in enumerate(outputs):
            if tensor is not None:
                value = _Value(len(self._steps) - 1, number)
                address = _address(tensor)
                self._kept.setdefault(address, tensor.untyped_storage())
                self._bases.setdefault(address, (value, tensor.dtype))
                self._values[_key(tensor)] = value
                step.storages.add(address)

    def _value(self, tensor: Tensor) -> _Value:
        """Where a tensor comes from: an earlier step, a view of one, or numbers from outside, which become a literal."""
        found = self._values.get(_key(tensor))
        if found is not None:
            return found
        address = _address(tensor)
        base, dtype = self._bases.get(address, (None, None))
        if base is not None and dtype == tensor.dtype:
            args = (OperandRef(0), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
            step = _Step("aten.as_strided.default", args, (), [base], {address}, set())
        else:
            literal, why = literal_of(tensor)
            step = _Step("literal", (), (), [], {address}, {address}, impossible=why)
            if literal is not None:
                step.op, step.args = literal.op, literal.args
        self._add(step, [tensor])
        return self._values[_key(tensor)]

    def first_value(self, tensor: Tensor, rule: InitRule) -> tuple[FirstValue | None, str]:
        """(how the tensor is made, "") or (None, why that is not known). `rule` is what `init_rules` says of it."""
        if rule.kind == "constant":
            whole = not (tensor.is_floating_point() or tensor.is_complex()) and rule.values[0].is_integer()
            number = int(rule.values[0]) if whole else rule.values[0]
            dtype = DtypeRef(str(tensor.dtype).removeprefix("torch."))
            return (ValueStep("aten.full.default", (tuple(tensor.shape), number), (("dtype", dtype),)),), ""
        if rule.kind in ("normal", "uniform"):
            return (ValueStep("drawn", (rule.kind, *rule.values, tuple(tensor.shape))),), ""
        steps = self._slice(self._value(tensor))
        why = next((self._steps[number].impossible for number in steps if self._steps[number].impossible), "")
        if why:
            return None, why
        return self._written(steps, self._value(tensor)), ""

    def _slice(self, value: _Value) -> list[int]:
        """Numbers of the steps that the value depends on, in order."""
        steps = {value.step}
        storages = set(self._steps[value.step].storages)
        for number in range(len(self._steps) - 1, -1, -1):
            step = self._steps[number]
            if number in steps or step.written & storages:
                steps.add(number)
                storages |= step.storages
                steps |= {read.step for read in step.reads}
        return sorted(steps)

    def _written(self, steps: list[int], last: _Value) -> FirstValue:
        first: dict[int, int] = {}
        count = 0
        for number in steps:
            first[number] = count
            count += self._steps[number].outputs
        written = []
        for number in steps:
            step = self._steps[number]
            places = [first[read.step] + read.output for read in step.reads]
            kwargs = tuple((name, _renumbered(value, places)) for name, value in step.kwargs)
            written.append(ValueStep(step.op, _renumbered(step.args, places), kwargs, step.outputs))
        if first[last.step] + last.output != count - 1:  # written to after it was made
            written.append(ValueStep("aten.alias.default", (OperandRef(first[last.step] + last.output),)))
        return tuple(written)


_SAME = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default})
"""The same tensor again: known by its storage and strides."""

_PLACE = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})


def _renumbered(value: Any, places: list[int]) -> Any:
    if isinstance(value, OperandRef):
        return OperandRef(places[value.index])
    if isinstance(value, tuple):
        return tuple(_renumbered(item, places) for item in value)
    return value


def literal_of(tensor: Tensor) -> tuple[ValueStep | None, str]:
    """(a step that carries the numbers of a tensor, "") or (None, why not)."""
    if tensor.is_meta or torch_compat.is_fake(tensor):
        return None, "its numbers were never made: it lies on the meta device"
    whole = tensor.detach().to("cpu").contiguous()
    dtype, shape = DtypeRef(str(whole.dtype).removeprefix("torch.")), tuple(whole.shape)
    if whole.numel() <= MAX_LISTED and not whole.is_complex():
        return ValueStep("literal", (dtype, shape, tuple(whole.flatten().tolist()))), ""
    if whole.numel() * whole.element_size() <= MAX_PACKED_BYTES:
        packed = base64.b85encode(zlib.compress(torch_compat.raw_bytes(whole), 9)).decode()
        if len(packed) <= MAX_PACKED_CHARACTERS:
            return ValueStep("packed", (dtype, shape, packed)), ""
    return None, f"its {whole.numel()} numbers come from outside and are too many to be written into a file"


def _address(tensor: Tensor) -> int:
    return torch_compat.storage_address(tensor)


def _key(tensor: Tensor) -> _Key:
    return _address(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
