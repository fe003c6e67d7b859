"""A graph of one op, so that its rule is run for arguments that no model of the tests uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from planner.graph import DtypeRef, Input, JointGraph, ModelRequest, Node, OperandRef, TensorMeta, TensorRef
from planner.torch_compat import operator_by_name

Spec = tuple[tuple[int, ...], str]
"""Shape and dtype of an operand."""


def tensor(*shape: int, dtype: str = "float32") -> Spec:
    return shape, dtype


def graph_of(op: str, *args: Any, **kwargs: Any) -> JointGraph:
    """`args` in the operator's order; a `tensor(...)` becomes an input of the graph."""
    operands: list[TensorMeta] = []
    encoded = tuple(_encode(arg, operands) for arg in args)
    outputs = _shapes(op, encoded, kwargs, operands)
    inputs = [
        Node(key=f"input:x{n}", op="input", name="input", kind="input", phase="forward", outputs=(meta,))
        for n, meta in enumerate(operands)
    ]
    node = Node(
        key="op/fwd#0", op=op, name=op.split(".")[1], kind="op", phase="forward", args=encoded,
        operands=tuple(TensorRef(n, 0) for n in range(len(operands))), kwargs=tuple(kwargs.items()), outputs=outputs,
    )  # fmt: skip
    first = next(number for number, meta in enumerate(outputs) if meta is not None)
    return JointGraph(
        request=ModelRequest(model="one op", precision="as-traced"), nodes=(*inputs, node), parameters=(),
        inputs=tuple(Input(node=n, name=f"x{n}") for n in range(len(operands))), loss=TensorRef(len(operands), first),
    )  # fmt: skip


def _encode(value: Any, operands: list[TensorMeta]) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], str):
        operands.append(TensorMeta(*value))
        return OperandRef(len(operands) - 1)
    if isinstance(value, tuple | list):
        return tuple(_encode(item, operands) for item in value)
    return value


def _shapes(op: str, args: Any, kwargs: dict[str, Any], operands: Sequence[TensorMeta]) -> tuple[TensorMeta | None, ...]:
    def real(value: Any) -> Any:
        if isinstance(value, OperandRef):
            meta = operands[value.index]
            return torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype))
        if isinstance(value, DtypeRef):
            return getattr(torch, value.name)
        return [real(item) for item in value] if isinstance(value, tuple) else value

    made = operator_by_name(op)(*map(real, args), **{name: real(value) for name, value in kwargs.items()})
    return tuple(
        None if x is None else TensorMeta(tuple(x.shape), str(x.dtype).removeprefix("torch."))
        for x in (made if isinstance(made, tuple | list) else [made])
    )
