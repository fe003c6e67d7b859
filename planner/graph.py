"""The joint forward/backward graph of a training step, as plain data.

A node's `key` is built from what the user sees (`layers.3.attention.wq/linear/fwd#0`: module, op, phase, ordinal), never
from names of the tracer, so pins and saved plans survive another trace, batch size or depth.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from planner.errors import PlanFormatError
from planner.units import ITEMSIZE

GRAPH_SCHEMA = 1
KINDS = ("param", "buffer", "input", "tangent", "op", "output")
FORWARD, BACKWARD = "forward", "backward"


class TensorRef(NamedTuple):
    """One tensor of the graph: output number `output` of node number `node`."""

    node: int
    output: int


@dataclass(frozen=True)
class OperandRef:
    """Inside `Node.args`: the place where operand number `index` goes."""

    index: int


@dataclass(frozen=True)
class DtypeRef:
    """Inside `Node.args`: a torch dtype by name, without torch."""

    name: str


@dataclass(frozen=True)
class TensorMeta:
    """Global shape and dtype name (`bfloat16`)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One op, parameter, buffer, input, tangent or output.

    Attributes:
        key: stable name, `module/op/phase#ordinal`; leaves are `param:NAME`, `buffer:NAME`, `input:NAME`, `output:NAME`.
        op: full operator name (`aten.mul.Tensor`, `planner.einsum.default`); for other kinds the kind.
        name: short canonical name shown to users (`linear`, `attention`, `mul`).
        operands: the tensors read, duplicates kept, in the order in which they appear in `args` and `kwargs`.
        args, kwargs: the operator's arguments, nested tuples of numbers, strings, None, OperandRef and DtypeRef.
        outputs: one TensorMeta per output, None where an output is unused or not a tensor.
        module: path of the owning nn.Module (`layers.3.attention.wq`), "" at top level.
        source: `file.py:123` of the user's line, "" if unknown.
        flops: multiply-adds counted twice, of the whole (unsharded) op; causal attention counted half.
        rematerialised: an op of forward that runs again in backward, so that its result is not kept.
    """

    key: str
    op: str
    name: str
    kind: str
    phase: str
    operands: tuple[TensorRef, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[TensorMeta | None, ...] = ()
    module: str = ""
    source: str = ""
    flops: float = 0.0
    rematerialised: bool = False

    @property
    def is_op(self) -> bool:
        return self.kind == "op"


@dataclass(frozen=True)
class InitRule:
    """How a parameter is initialised: `normal(mean, std)`, `uniform(low, high)`, `constant(value)` or `unknown()`."""

    kind: str
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter, all names it is known by (tied names share one node), and where its gradient comes from."""

    node: int
    names: tuple[str, ...]
    gradient: TensorRef | None
    init: InitRule

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class ValueStep:
    """One step of computing a buffer's first value: an operator, or `literal` (dtype, shape, numbers), `packed` (dtype, shape,
    text: bytes, compressed, base 85) or `drawn` (kind and two numbers of an `InitRule`, shape).

    The results of all steps of a first value are numbered in order; `OperandRef(n)` in `args` is result n. An operator may write
    to what an earlier step made, as the user's code did.
    """

    op: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: int = 1


FirstValue = tuple[ValueStep, ...]
"""How a tensor is made from nothing; the last result is the tensor."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A buffer that a step reads or writes.

    Attributes:
        names: all names it is known by.
        first_value: its value before the first step, None if it is not known: then `unknown` says why.
        persistent: part of the model's state in checkpoints.
        update: the value that a step leaves in it, None if it is only read. Stored in the buffer's own placement.
    """

    node: int
    names: tuple[str, ...]
    first_value: FirstValue | None
    unknown: str = ""
    persistent: bool = True
    update: TensorRef | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor that the data loader delivers.

    Attributes:
        batch_dim: the dim that counts samples, None if it has none.
        high: for integer inputs the exclusive upper bound of valid values (vocabulary size), None if unknown.
    """

    node: int
    name: str
    batch_dim: int | None = 0
    high: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """What to load, enough to load it again: a sample name or `file.py:factory`, and the sizes asked for.

    `None` means the model's own default. `precision` is `bf16-mixed` (fp32 parameters, bf16 compute, gradients reduced in
    fp32) or `as-traced`. `size` is `full` or `tiny` (same structure, small dims; used to verify exports).
    """

    model: str
    batch: int | None = None
    seq: int | None = None
    layers: int | None = None
    precision: str = "bf16-mixed"
    size: str = "full"

    @property
    def is_users_own(self) -> bool:
        """`file.py:factory` or a `.pt2` file: code that runs as the user wrote it, at sizes of its own."""
        return self.model.endswith(".pt2") or (":" in self.model and not self.model.startswith("hf:"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelRequest:
        return cls(**data)


@dataclass(frozen=True, kw_only=True, eq=False)
class JointGraph:
    """Nodes in topological order, parameters with their gradients, the loss. Compare by `fingerprint`.

    Attributes:
        symbols: named sizes of the model (`B`, `S`, `D`, ...) as the model states them; used to write readable shapes.
        loss: the scalar tensor that training minimises; a node of kind `output` (`output:loss`) reads it.
        stand_in_loss: the model returns tensors and no loss; `loss` is the sum of squares of those that need gradients.
        repeated: which forward ops backward repeats, as `tracing.recompute` counts them; None in graphs saved before it did.
        class_name: import path of the model's class, for the reader of an exported file.
        buffers: one entry per node of kind `buffer`.
        operators: (name, Python module that registers it) of operators that are not PyTorch's own.
        dropouts: (layer, place in it) of each dropout that a forward calls, in order; layer -1 is outside the layers.
        checkpointed: layers whose forward pass is repeated in backward (`checkpointing.py`).
    """

    request: ModelRequest
    nodes: tuple[Node, ...]
    parameters: tuple[Parameter, ...]
    inputs: tuple[Input, ...]
    loss: TensorRef
    symbols: tuple[tuple[str, int], ...] = ()
    class_name: str = ""
    stand_in_loss: bool = False
    repeated: tuple[int, ...] | None = None
    buffers: tuple[Buffer, ...] = ()
    dropouts: tuple[tuple[int, int], ...] = ()
    operators: tuple[tuple[str, str], ...] = ()
    checkpointed: tuple[str, ...] = ()

    # ---- look-ups -------------------------------------------------------------------------------------------------
    @cached_property
    def node_by_key(self) -> dict[str, int]:
        return {node.key: index for index, node in enumerate(self.nodes)}

    @cached_property
    def users(self) -> dict[TensorRef, tuple[tuple[int, int], ...]]:
        """tensor -> ((consumer node, operand slot), ...), one entry per use."""
        found: dict[TensorRef, list[tuple[int, int]]] = {}
        for index, node in enumerate(self.nodes):
            for slot, ref in enumerate(node.operands):
                found.setdefault(ref, []).append((index, slot))
        return {ref: tuple(uses) for ref, uses in found.items()}

    @cached_property
    def parameter_of_node(self) -> dict[int, Parameter]:
        return {parameter.node: parameter for parameter in self.parameters}

    @cached_property
    def parameter_by_name(self) -> dict[str, Parameter]:
        return {name: parameter for parameter in self.parameters for name in parameter.names}

    @cached_property
    def buffer_of_node(self) -> dict[int, Buffer]:
        return {buffer.node: buffer for buffer in self.buffers}

    @cached_property
    def stored(self) -> dict[int, tuple[TensorRef, str]]:
        """Leaf -> (the tensor stored in its placement, the phase): gradients of parameters, updates of buffers."""
        gradients = {p.node: (p.gradient, BACKWARD) for p in self.parameters if p.gradient is not None}
        return gradients | {b.node: (b.update, FORWARD) for b in self.buffers if b.update is not None}

    @cached_property
    def last_output(self) -> dict[str, int]:
        """Module path -> the last forward op with an output, of the module itself or of one inside it."""
        found: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            if node.is_op and node.phase != BACKWARD and node.module and node.outputs and node.outputs[0] is not None:
                path = node.module
                while path:
                    found[path] = index
                    path = path.rpartition(".")[0]
        return found

    def meta(self, ref: TensorRef) -> TensorMeta:
        found = self.nodes[ref.node].outputs[ref.output]
        assert found is not None, f"output {ref.output} of {self.nodes[ref.node].key} is unused"
        return found

    @cached_property
    def saved_for_backward(self) -> tuple[TensorRef, ...]:
        """Tensors made by forward ops that backward reads, one per storage: what the exported forward really keeps.

        Parameters, buffers and inputs are not in it; of several views of one storage the first is listed.
        """
        saved: dict[TensorRef, TensorRef] = {}
        for node in self.nodes:
            if node.phase != BACKWARD:
                continue
            for ref in node.operands:
                producer = self.nodes[ref.node]
                if producer.is_op and producer.phase == FORWARD:
                    root = self.storage_root(ref)
                    if self.nodes[root.node].is_op:
                        saved.setdefault(root, ref)
        return tuple(saved.values())

    def storage_root(self, ref: TensorRef) -> TensorRef:
        """The tensor whose storage `ref` is a view of (itself if it owns it)."""
        while self.nodes[ref.node].op in VIEW_OPS:
            ref = self.nodes[ref.node].operands[0]
        return ref

    @cached_property
    def kept_from(self) -> dict[int, TensorRef]:
        """Backward node -> the forward tensor that it repeats, computed directly from parameters and constant buffers.

        Instead of running again it can take what the forward pass read (a parameter in lower precision, gathered), if that is
        kept: FSDP's `reshard_after_forward=False`.
        """
        updated = {buffer.node for buffer in self.buffers if buffer.update is not None}
        leaves = {n for n, node in enumerate(self.nodes) if node.kind in ("param", "buffer") and n not in updated}
        stored = {ref for ref, _ in self.stored.values()}
        forward: dict[object, TensorRef] = {}
        found: dict[int, TensorRef] = {}
        for index, node in enumerate(self.nodes):
            reads = {ref.node for ref in node.operands}
            if not (node.is_op and len(node.outputs) == 1 and reads & self.parameter_of_node.keys() and reads <= leaves):
                continue
            made, same = TensorRef(index, 0), (node.op, node.args, node.kwargs, node.module, node.operands)
            if node.phase == BACKWARD and same in forward:
                found[index] = forward[same]
            elif node.phase == FORWARD and made not in stored and self._is_read_in_forward(made):
                forward.setdefault(same, made)
        return found

    def _is_read_in_forward(self, ref: TensorRef) -> bool:
        return any(self.nodes[user].phase == FORWARD for user, _ in self.users.get(ref, ()))

    def repeated_layer(self, node: Node) -> str | None:
        """Path of the checkpointed layer whose forward pass a node of the backward phase repeats; None for other nodes."""
        path = layer_path(node.module) if self.checkpointed and node.rematerialised else None
        return path if path in self.checkpointed else None

    @property
    def model_flops(self) -> float:
        """Of one step; what checkpointing repeats is no work of the model."""
        return sum(node.flops for node in self.nodes if self.repeated_layer(node) is None)

    @property
    def num_ops(self) -> int:
        return sum(node.is_op for node in self.nodes)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the repeated layers, in order."""
        found = {layer for node in self.nodes if (layer := layer_of(node.module)) is not None}
        return tuple(sorted(found))

    # ---- identity -------------------------------------------------------------------------------------------------
    @cached_property
    def structure_fingerprint(self) -> str:
        """Equal if keys and wiring are equal: pins and plans can be carried over."""
        wiring: list[Any] = [[n.key, n.op, [list(r) for r in n.operands], len(n.outputs)] for n in self.nodes]
        return _digest(wiring + [[b.name, list(b.update)] for b in self.buffers if b.update is not None])

    @cached_property
    def fingerprint(self) -> str:
        """Equal if structure, shapes, dtypes and arguments are equal: prices can be carried over."""
        return _digest([self.structure_fingerprint, [[_encode(n.args), [str(m) for m in n.outputs]] for n in self.nodes]])

    def check(self) -> None:
        """The invariants, as code: topological order, unique keys, operands exist, parameters have gradients of their shape."""
        assert len(self.node_by_key) == len(self.nodes), "keys repeat"
        for index, node in enumerate(self.nodes):
            assert node.kind in KINDS and node.phase in (FORWARD, BACKWARD), node.key
            for ref in node.operands:
                assert ref.node < index, f"{node.key} reads a later node"
                assert self.nodes[ref.node].outputs[ref.output] is not None, f"{node.key} reads an unused output"
            assert sorted(_operand_indices((node.args, node.kwargs))) == list(range(len(node.operands))) or not node.is_op, (
                node.key
            )
        for parameter in self.parameters:
            assert self.nodes[parameter.node].kind == "param"
            if parameter.gradient is not None:
                assert self.meta(parameter.gradient).shape == self.meta(TensorRef(parameter.node, 0)).shape, parameter.name
        for buffer in self.buffers:
            assert self.nodes[buffer.node].kind == "buffer" and (buffer.first_value is not None or buffer.unknown), buffer.name
            if buffer.update is not None:
                assert self.meta(buffer.update) == self.meta(TensorRef(buffer.node, 0)), buffer.name

    # ---- files ----------------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        return {
            "schema": GRAPH_SCHEMA,
            "request": self.request.to_json(),
            "class_name": self.class_name,
            "stand_in_loss": self.stand_in_loss,
            "repeated": None if self.repeated is None else list(self.repeated),
            "symbols": [list(pair) for pair in self.symbols],
            **({"checkpointed": list(self.checkpointed)} if self.checkpointed else {}),
            "loss": list(self.loss),
            "inputs": [[i.node, i.name, i.batch_dim, i.high] for i in self.inputs],
            "parameters": [
                {
                    "node": p.node, "names": list(p.names), "gradient": list(p.gradient) if p.gradient else None,
                    "init": [p.init.kind, *p.init.values],
                }
                for p in self.parameters
            ],
            "operators": [list(pair) for pair in self.operators],
            "dropouts": [list(place) for place in self.dropouts],
            "buffers": [_buffer_to_json(buffer) for buffer in self.buffers],
            "nodes": [_node_to_json(node) for node in self.nodes],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JointGraph:
        if data.get("schema") != GRAPH_SCHEMA:
            raise PlanFormatError(
                f"saved graph has schema {data.get('schema')!r}, this version reads {GRAPH_SCHEMA}", hint="Trace the model again."
            )
        try:
            return cls(
                request=ModelRequest.from_json(data["request"]),
                class_name=data["class_name"],
                stand_in_loss=data.get("stand_in_loss", False),
                repeated=None if data.get("repeated") is None else tuple(map(int, data["repeated"])),
                symbols=tuple((name, int(value)) for name, value in data["symbols"]),
                checkpointed=tuple(data.get("checkpointed", ())),
                loss=TensorRef(*data["loss"]),
                inputs=tuple(Input(node=n, name=name, batch_dim=d, high=h) for n, name, d, h in data["inputs"]),
                parameters=tuple(
                    Parameter(
                        node=p["node"], names=tuple(p["names"]), gradient=TensorRef(*p["gradient"]) if p["gradient"] else None,
                        init=InitRule(p["init"][0], tuple(p["init"][1:])),
                    )
                    for p in data["parameters"]
                ),
                operators=tuple((op, module) for op, module in data.get("operators", ())),
                dropouts=tuple((layer, ordinal) for layer, ordinal in data.get("dropouts", ())),
                buffers=tuple(_buffer_from_json(buffer) for buffer in data.get("buffers", ())),
                nodes=tuple(_node_from_json(node) for node in data["nodes"]),
            )  # fmt: skip
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise PlanFormatError(f"the saved graph is damaged: {error!r}", hint="Trace the model again.") from error

    def save(self, path: Path) -> None:
        """Write as gzipped JSON. The same graph gives the same bytes."""
        payload = json.dumps(self.to_json(), separators=(",", ":")).encode()
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(gzip.compress(payload, mtime=0))
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> JointGraph:
        return cls.from_json(json.loads(gzip.decompress(path.read_bytes())))


VIEW_OPS = frozenset({
    "aten.view.default", "aten._unsafe_view.default", "aten.transpose.int", "aten.permute.default", "aten.t.default",
    "aten.expand.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default",
    "aten.slice.Tensor", "aten.select.int", "aten.alias.default", "aten.detach.default",
})  # fmt: skip
"""Ops whose output shares storage with operand 0: no time, no bytes of their own."""

_LAYER = re.compile(r"(?:^|[.:])[A-Za-z_]\w*\.(\d+)(?=$|[./])")


def layer_of(module: str) -> int | None:
    """Number of the repeated layer a module path lies in (`layers.3.attention.wq` -> 3), None outside."""
    match = _LAYER.search(module)
    return int(match[1]) if match else None


def layer_path(module: str) -> str | None:
    """Path of the repeated layer a module lies in (`layers.3.attention.wq` -> `layers.3`), None outside."""
    match = _LAYER.search(module)
    return module[: match.end(1)] if match else None


def without_layer(path: str) -> str:
    """`layers.3.attention.wq` -> `layers.*.attention.wq`, the name of the same thing in all layers."""
    match = _LAYER.search(path)
    return path if match is None else f"{path[: match.start(1)]}*{path[match.end(1) :]}"


def _operand_indices(value: Any) -> Iterator[int]:
    if isinstance(value, OperandRef):
        yield value.index
    elif isinstance(value, tuple):
        for item in value:
            yield from _operand_indices(item)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":"), sort_keys=True).encode()).hexdigest()[:16]


def _encode(value: Any) -> Any:
    if isinstance(value, OperandRef):
        return {"operand": value.index}
    if isinstance(value, DtypeRef):
        return {"dtype": value.name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if "operand" in value:
            return OperandRef(value["operand"])
        if "dtype" in value:
            return DtypeRef(value["dtype"])
        return float(value["float"])
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value


def _buffer_to_json(buffer: Buffer) -> dict[str, Any]:
    steps = (
        None
        if buffer.first_value is None
        else [[s.op, _encode(s.args), _encode(s.kwargs), s.outputs] for s in buffer.first_value]
    )
    return {
        "node": buffer.node, "names": list(buffer.names), "first_value": steps, "unknown": buffer.unknown,
        "persistent": buffer.persistent, "update": list(buffer.update) if buffer.update else None,
    }  # fmt: skip


def _buffer_from_json(data: Mapping[str, Any]) -> Buffer:
    steps = data["first_value"]
    return Buffer(
        node=data["node"], names=tuple(data["names"]), unknown=data["unknown"], persistent=data["persistent"],
        first_value=None if steps is None else tuple(ValueStep(op, _decode(a), _decode(k), n) for op, a, k, n in steps),
        update=TensorRef(*data["update"]) if data["update"] else None,
    )  # fmt: skip


_DEFAULTS: dict[str, Any] = {
    "args": (), "kwargs": (), "operands": (), "module": "", "source": "", "flops": 0.0, "rematerialised": False,
}  # fmt: skip


def _node_to_json(node: Node) -> dict[str, Any]:
    """Only the fields that differ from their default."""
    full: dict[str, Any] = {
        "key": node.key, "op": node.op, "name": node.name, "kind": node.kind, "phase": node.phase,
        "operands": [list(ref) for ref in node.operands], "args": _encode(node.args), "kwargs": _encode(node.kwargs),
        "outputs": [None if m is None else [m.dtype, *m.shape] for m in node.outputs],
        "module": node.module, "source": node.source, "flops": node.flops, "rematerialised": node.rematerialised,
    }  # fmt: skip
    return {name: value for name, value in full.items() if name not in _DEFAULTS or value != _encode(_DEFAULTS[name])}


def _node_from_json(data: Mapping[str, Any]) -> Node:
    return Node(
        key=data["key"], op=data["op"], name=data["name"], kind=data["kind"], phase=data["phase"],
        operands=tuple(TensorRef(*ref) for ref in data.get("operands", ())),
        args=_decode(data.get("args", [])), kwargs=_decode(data.get("kwargs", [])),
        outputs=tuple(None if m is None else TensorMeta(tuple(m[1:]), m[0]) for m in data["outputs"]),
        module=data.get("module", ""), source=data.get("source", ""), flops=data.get("flops", 0.0),
        rematerialised=data.get("rematerialised", False),
    )  # fmt: skip
