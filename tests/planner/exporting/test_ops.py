from dataclasses import replace

import pytest

from planner.errors import ExportError
from planner.exporting.ops import LOWERINGS, SAME_CALL, Site, write_op
from planner.exporting.symbols import Sizes
from planner.graph import DtypeRef, Node, OperandRef, TensorMeta
from planner.mesh import Mesh
from planner.placement import Placements, identifier, parse
from planner.plan import Choice

MESH = Mesh(axis_names=("dp", "tp"), axis_sizes=(2, 2))
SIZES = {"B": 64, "S": 128, "D": 256, "V": 1000}
SMALL = {"B": 40, "S": 16, "D": 384, "V": 72}
X = OperandRef(0)
Y = OperandRef(1)
Z = OperandRef(2)


def site(
    op: str, shapes: list[str], out: str, args: tuple, operands: list[str | None], output: str, kwargs: tuple = (),
    dtype: str = "float32",
) -> Site:  # fmt: skip
    """Shapes by size names, e.g. `B S D`; placements by text."""

    def metas(sizes: dict[str, int], texts: list[str]) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(tuple(sizes.get(s) or int(s) for s in text.split()), dtype) for text in texts)

    def sized(value: object, sizes: dict[str, int]) -> object:
        if isinstance(value, tuple):
            return tuple(sized(item, sizes) for item in value)
        return sizes[value] if isinstance(value, str) and value in sizes else value

    def node(sizes: dict[str, int]) -> Node:
        return Node(
            key="layers.0.mlp/x/fwd#0", op=op, name="x", kind="op", phase="forward", args=sized(args, sizes),  # type: ignore[arg-type]
            kwargs=kwargs, outputs=metas(sizes, [out]), module="layers.0.mlp", source="model.py:12",
        )  # fmt: skip

    parsed: list[Placements | None] = [None if p is None else parse(p, MESH) for p in operands]
    return Site(
        node=node(SIZES), tiny=node(SMALL), inputs=metas(SIZES, shapes), tiny_inputs=metas(SMALL, shapes),
        choice=Choice(operands=tuple(parsed), outputs=(parse(output, MESH),), compute_us=0.0),
        names=tuple(None if p is None else name for p, name in zip(operands, ("x", "y", "z"), strict=False)),
        sizes=Sizes(full=SIZES, tiny=SMALL, axis_names=("DP", "TP")), layout=identifier,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (site("aten.mul.Tensor", ["B S D", "B S D"], "B S D", (X, Y), ["S(0)R", "S(0)R"], "S(0)R"), "torch.mul(x, y)"),
        (site("aten.mul.Tensor", ["B S"], "B S", (X, X), ["RR"], "RR"), "torch.mul(x, x)"),
        (site("aten.div.Scalar", ["B S"], "B S", (X, "D"), ["RR"], "RR"), "torch.div(x, D)"),
        (site("aten.pow.Scalar", ["D"], "D", (500000.0, X), ["RR"], "RR"), "torch.pow(500000.0, x)"),
        (
            site("planner.einsum.default", ["B S D", "V D"], "B S V", ("bsk,nk->bsn", X, Y), ["S(0)R", "RS(0)"], "S(0)S(2)"),
            'torch.einsum("bsk,nk->bsn", x, y)',
        ),
        (site("aten.view.default", ["B S D"], "B S 4 64", (X, ("B", "S", 4, 64)), ["S(0)S(2)"], "S(0)S(2)"),
         "torch.reshape(x, [B//DP, S, 4//TP, 64])"),
        (site("aten.expand.default", ["B 1 D"], "B S D", (X, ("B", "S", "D")), ["S(0)R"], "S(0)S(1)"),
         "x.expand([B//DP, S//TP, D])"),
        (site("aten._to_copy.default", ["B S"], "B S", (X,), ["RR"], "RR", (("dtype", DtypeRef("bfloat16")),), "bfloat16"),
         "x.to(LOWP)"),
        (site("aten.new_zeros.default", ["B 1"], "B V", (X, ("B", "V")), [None], "S(0)S(1)"),
         "torch.zeros([B//DP, V//TP], dtype=torch.float32, device=DEVICE)"),
        (site("aten.full.default", [], "B V", (("B", "V"), 2.5), [], "RS(1)"),
         "torch.full([B, V//TP], 2.5, dtype=torch.float32, device=DEVICE)"),
        (site("aten.arange.default", [], "S", ("S",), [], "RR"), "torch.arange(S, dtype=torch.float32, device=DEVICE)"),
        (site("aten.arange.default", [], "S", ("S",), [], "RS(0)"),
         "piece(torch.arange(S, dtype=torch.float32, device=DEVICE), R_S0)"),
        (site("aten.mean.dim", ["B S D"], "B S 1", (X, (-1,), True), ["S(0)R"], "S(0)R"), "torch.mean(x, [-1], True)"),
        (site("aten.mean.dim", ["B S D"], "B S 1", (X, (-1,), True), ["S(0)S(2)"], "S(0)P"), "torch.sum(x, [-1], True) / (D)"),
        (site("aten.mean.default", ["B S"], "", (X,), ["S(0)S(1)"], "PP"), "torch.sum(x) / (B*S)"),
        (site("aten.embedding.default", ["V D", "B S"], "B S D", (X, Y), ["RS(1)", "S(0)R"], "S(0)S(2)"), "aten.embedding(x, y)"),
        (site("aten.embedding.default", ["V D", "B S"], "B S D", (X, Y), ["RS(0)", "S(0)R"], "S(0)P"),
         "masked_embedding(x, y, (1,))"),
        (site("aten.embedding.default", ["V D", "B S"], "B S D", (X, Y), ["S(0)S(0)", "RR"], "PP"),
         "masked_embedding(x, y, (0, 1))"),
        (site("aten.embedding_dense_backward.default", ["B S D", "B S"], "V D", (X, Y, "V", -1, False), ["S(0)R", "S(0)R"], "PR"),
         "aten.embedding_dense_backward(x, y, V, -1, False)"),
        (site("aten.embedding_dense_backward.default", ["B S D", "B S"], "V D", (X, Y, "V", -1, False), ["S(0)R", "S(0)R"],
              "PS(0)"),
         "masked_embedding_backward(x, y, V//TP, (1,))"),
        (site("aten.gather.default", ["B V", "B 1"], "B 1", (X, -1, Y), ["S(0)R", "S(0)R"], "S(0)R"), "torch.gather(x, -1, y)"),
        (site("aten.gather.default", ["B V", "B 1"], "B 1", (X, -1, Y), ["S(0)S(1)", "S(0)R"], "S(0)P"),
         "masked_gather(x, -1, y, (1,))"),
        (site("aten.scatter_add.default", ["B V", "B 1", "B 1"], "B V", (X, -1, Y, Z), ["RS(1)", "RR", "RR"], "RS(1)"),
         "masked_scatter_add(x, -1, y, z, (1,))"),
        (site("aten.slice.Tensor", ["B D"], "B 128", (X, -1, 0, 128), ["S(0)R"], "S(0)R"), "aten.slice(x, 1, 0, 128)"),
        (site("aten.slice.Tensor", ["B D"], "B D", (X, 1, 0, 2**63 - 1), ["RS(1)"], "RS(1)"), "aten.alias(x)"),
        (site("aten.cat.default", ["B S", "B S"], "B 256", ((X, Y), 1), ["S(0)R", "S(0)R"], "S(0)R"), "torch.cat([x, y], 1)"),
    ],
)  # fmt: skip
def test_written_form(call: Site, written: str) -> None:
    assert write_op(call) == written


@pytest.mark.parametrize(
    "call",
    [
        site("aten.slice.Tensor", ["B D"], "B 128", (X, -1, 0, 128), ["RS(1)"], "RS(1)"),
        site("aten.cat.default", ["B S", "B S"], "B 256", ((X, Y), -1), ["RS(1)", "RS(1)"], "RS(1)"),
        site("aten.select.int", ["B D"], "B", (X, 1, 0), ["RS(1)"], "RR"),
        site("aten.full.default", [], "B", (("B",), 1.0), [], "RP"),
        site("aten.arange.default", [], "S", ("S",), [], "PR"),
        site("aten.kthvalue.default", ["B D"], "B D", (X, 2), ["RS(1)"], "RS(1)"),
    ],
)
def test_what_cannot_be_written_is_refused_by_op_module_and_line(call: Site) -> None:
    with pytest.raises(ExportError) as caught:
        write_op(call)
    assert call.node.op in caught.value.message
    assert "layers.0.mlp" in caught.value.message and "model.py:12" in caught.value.message
    assert caught.value.hint


def test_an_op_without_an_entry_is_written_as_it_stands_on_whole_copies() -> None:
    assert write_op(site("mylib.special.default", ["B D"], "B D", (X,), ["RR"], "RR")) == "torch.ops.mylib.special.default(x)"
    assert (
        write_op(site("aten.kthvalue.default", ["B D"], "B D", (X, 1), ["RR"], "RR")) == "torch.ops.aten.kthvalue.default(x, 1)"
    )


def test_an_argument_that_changes_with_the_sizes_is_refused() -> None:
    call = site("aten.gelu.default", ["B D"], "B D", (X,), ["RR"], "RR", (("approximate", "tanh"),))
    tiny = replace(call.tiny, kwargs=(("approximate", "none"),))
    with pytest.raises(ExportError, match="changes with the sizes"):
        write_op(replace(call, tiny=tiny))


def test_every_plain_call_names_something_that_exists() -> None:
    import torch

    for op, function in SAME_CALL.items():
        namespace, name = function.split(".")
        assert hasattr(torch if namespace == "torch" else torch.ops.aten, name), function
        overload = op.split(".")
        assert hasattr(getattr(torch.ops.aten, overload[1]), overload[2]), op
    for op in (op for op in LOWERINGS if not op.startswith("planner.")):
        _, packet, overload_name = op.split(".")
        assert hasattr(getattr(torch.ops.aten, packet), overload_name), op
