"""Which bytes a fused pointwise kernel is charged for, on graphs small enough to list by hand."""

from planner.costing.fusion import Traffic, fused_traffic
from planner.graph import BACKWARD, TensorRef
from planner.mesh import Mesh
from tests.planner.costing.hand_made import CAST, EINSUM, GraphMaker, space_of

MESH = Mesh.parse("tp=2")
SHAPE = (4, 6)


def traffic_of(maker: GraphMaker, tensor: TensorRef) -> Traffic:
    return fused_traffic(space_of(maker.graph(), MESH))[tensor.node]


def test_chain_reads_once_and_writes_once() -> None:
    maker = GraphMaker()
    x, w = maker.leaf("input", "x", SHAPE), maker.leaf("param", "w", SHAPE)
    a = maker.op("aten.mul.Tensor", (x, x), SHAPE)
    b = maker.op("aten.exp.default", (a,), SHAPE)
    c = maker.op("aten.add.Tensor", (b, x), SHAPE)
    maker.op(EINSUM, (c, w), SHAPE)
    assert traffic_of(maker, a) == Traffic((1.0, 0.0), (0.0,), 1)  # x*x reads x once
    assert traffic_of(maker, b) == Traffic((0.0,), (0.0,), 0)
    assert traffic_of(maker, c) == Traffic((0.0, 0.0), (1.0,), 0)  # x has been read


def test_matmul_between_splits_a_group() -> None:
    """x -> a -> matmul -> b, and a -> b: one kernel for a and b would have to wait for itself."""
    maker = GraphMaker()
    x, w = maker.leaf("input", "x", SHAPE), maker.leaf("param", "w", SHAPE)
    a = maker.op("aten.exp.default", (x,), SHAPE)
    product = maker.op(EINSUM, (a, w), SHAPE)
    b = maker.op("aten.add.Tensor", (product, a), SHAPE)
    maker.output(b)
    assert traffic_of(maker, a) == Traffic((1.0,), (1.0,), 1)
    assert traffic_of(maker, b) == Traffic((1.0, 1.0), (1.0,), 1)


def test_siblings_of_one_shape_share_the_read() -> None:
    maker = GraphMaker()
    x, w = maker.leaf("input", "x", SHAPE), maker.leaf("param", "w", SHAPE)
    product = maker.op(EINSUM, (x, w), SHAPE)
    a, b = (maker.op(op, (product,), SHAPE) for op in ("aten.exp.default", "aten.neg.default"))
    maker.output(a)
    maker.output(b)
    assert traffic_of(maker, a) == Traffic((1.0,), (1.0,), 1)
    assert traffic_of(maker, b) == Traffic((0.0,), (1.0,), 0)


def test_casts_of_parameters_join_their_first_user() -> None:
    maker = GraphMaker()
    x, w, scale = maker.leaf("input", "x", SHAPE), maker.leaf("param", "w", SHAPE), maker.leaf("param", "scale", (6,))
    low = maker.op(CAST, (scale,), (6,), "bfloat16")
    product = maker.op(EINSUM, (x, w), SHAPE)
    scaled = maker.op("aten.mul.Tensor", (product, low), SHAPE)
    maker.output(scaled)
    assert traffic_of(maker, low) == Traffic((1.0,), (0.0,), 1)
    assert traffic_of(maker, scaled) == Traffic((1.0, 0.0), (1.0,), 0)


def test_saved_tensors_are_written_and_phases_do_not_fuse() -> None:
    maker = GraphMaker()
    x = maker.leaf("input", "x", SHAPE)
    a = maker.op("aten.exp.default", (x,), SHAPE)
    b = maker.op("aten.neg.default", (a,), SHAPE)
    maker.output(b)
    tangent = maker.leaf("tangent", "loss", SHAPE)
    back = maker.op("aten.mul.Tensor", (tangent, a), SHAPE, phase=BACKWARD)
    maker.output(back)
    assert traffic_of(maker, a).writes == (1.0,)
    assert traffic_of(maker, back) == Traffic((1.0, 1.0), (1.0,), 1)


def test_views_are_looked_through_and_repeats_read_their_source() -> None:
    maker = GraphMaker()
    x = maker.leaf("input", "x", (4, 1, 6))
    wide = maker.op("aten.expand.default", (x,), (4, 3, 6))
    copy = maker.op("aten.clone.default", (wide,), (4, 3, 6))
    flat = maker.op("aten.view.default", (copy,), (12, 6))
    last = maker.op("aten.exp.default", (flat,), (12, 6))
    maker.output(last)
    assert traffic_of(maker, copy).reads == (1 / 3,)
    assert traffic_of(maker, copy).writes == (0.0,)
    assert traffic_of(maker, last) == Traffic((0.0,), (1.0,), 0)


def test_slices_are_different_bytes() -> None:
    maker = GraphMaker()
    x, w = maker.leaf("input", "x", SHAPE), maker.leaf("param", "w", SHAPE)
    product = maker.op(EINSUM, (x, w), SHAPE)
    left, right = (maker.op("aten.slice.Tensor", (product,), (4, 3)) for _ in range(2))
    total = maker.op("aten.add.Tensor", (left, right), (4, 3))
    maker.output(total)
    assert traffic_of(maker, total).reads == (1.0, 1.0)


def test_lookup_moves_rows_and_not_the_table() -> None:
    maker = GraphMaker()
    table, index = maker.leaf("param", "table", (1000, 6)), maker.leaf("input", "x", (4,), "int64")
    rows = maker.op("aten.embedding.default", (table, index), SHAPE)
    doubled = maker.op("aten.mul.Tensor", (rows, rows), SHAPE)
    maker.output(rows)
    maker.output(doubled)
    assert traffic_of(maker, rows) == Traffic((0.0, 1.0), (2.0,), 1)  # index read; rows read and written
    assert traffic_of(maker, doubled) == Traffic((0.0, 0.0), (1.0,), 0)


def test_gradient_of_a_table_is_written_in_full_by_its_own_kernel() -> None:
    maker = GraphMaker()
    table, index = maker.leaf("param", "table", (1000, 6)), maker.leaf("input", "x", (4,), "int64")
    tangent = maker.leaf("tangent", "loss", SHAPE)
    doubled = maker.op("aten.mul.Tensor", (tangent, tangent), SHAPE, phase=BACKWARD)
    gradient = maker.op("aten.embedding_dense_backward.default", (doubled, index), (1000, 6), phase=BACKWARD)
    maker.gradients[table.node] = gradient
    assert traffic_of(maker, gradient) == Traffic((1.0, 1.0), (1.0,), 1)
    assert traffic_of(maker, doubled).writes == (1.0,)


def test_scatter_touches_what_it_adds() -> None:
    maker = GraphMaker()
    index, source = maker.leaf("input", "i", (4, 1), "int64"), maker.leaf("input", "s", (4, 1))
    zeros = maker.op("aten.full.default", (), SHAPE)
    added = maker.op("aten.scatter_add.default", (zeros, index, source), SHAPE)
    maker.output(added)
    assert traffic_of(maker, zeros) == Traffic((), (1.0,), 1)
    assert traffic_of(maker, added) == Traffic((0.0, 1.0, 2.0), (0.0,), 1)
