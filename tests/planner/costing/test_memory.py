"""Memory of hand-computed models, exact to the byte."""

import numpy as np
import pytest

from planner.costing.memory import memory_table
from planner.graph import BACKWARD, TensorRef
from planner.memory import MemoryPolicy
from planner.mesh import Mesh
from planner.placement import parse
from tests.planner.costing.hand_made import CAST, EINSUM, GraphMaker, space_of

MESH = Mesh.parse("dp=2,tp=4")


def two_layers() -> tuple[GraphMaker, dict[str, TensorRef]]:
    """y = relu(x w1) w2 with a frozen bias, bf16 compute on fp32 parameters; relu's output is read again in backward."""
    maker = GraphMaker()
    t = {
        "w1": maker.leaf("param", "w1", (64, 128)),
        "w2": maker.leaf("param", "w2", (128, 32)),
        "bias": maker.leaf("param", "bias", (32,)),
        "x": maker.leaf("input", "x", (16, 64), "bfloat16"),
    }
    t["w1_low"] = maker.op(CAST, (t["w1"],), (64, 128), "bfloat16")
    t["w2_low"] = maker.op(CAST, (t["w2"],), (128, 32), "bfloat16")
    t["hidden"] = maker.op(EINSUM, (t["x"], t["w1_low"]), (16, 128), "bfloat16")
    t["relu"] = maker.op("aten.relu.default", (t["hidden"],), (16, 128), "bfloat16")
    t["relu_t"] = maker.op("aten.t.default", (t["relu"],), (128, 16), "bfloat16")
    t["y"] = maker.op(EINSUM, (t["relu"], t["w2_low"]), (16, 32), "bfloat16")
    maker.output(t["y"])
    t["tangent"] = maker.leaf("tangent", "y", (16, 32), "bfloat16")
    t["g2"] = maker.op(EINSUM, (t["relu_t"], t["tangent"]), (128, 32), "bfloat16", BACKWARD)
    t["mask"] = maker.op("aten.threshold_backward.default", (t["tangent"], t["relu"]), (16, 128), "bfloat16", BACKWARD)
    t["g1"] = maker.op(EINSUM, (t["x"], t["mask"]), (64, 128), "bfloat16", BACKWARD)
    for name in ("1", "2"):
        shape = (64, 128) if name == "1" else (128, 32)
        t[f"grad{name}"] = maker.op(CAST, (t[f"g{name}"],), shape, "float32", BACKWARD)
        maker.gradients[t[f"w{name}"].node] = t[f"grad{name}"]
    return maker, t


@pytest.mark.parametrize(("optimizer", "state"), [("adamw", 8), ("sgd", 0), ("none", 0)])
@pytest.mark.parametrize(("placements", "shards"), [("RR", 1), ("RS(0)", 4), ("S(0)R", 2), ("S(0)S(0)", 8)])
def test_states_of_a_parameter(optimizer: str, state: int, placements: str, shards: int) -> None:
    maker, t = two_layers()
    space = space_of(maker.graph(), MESH)
    table = memory_table(space, MemoryPolicy(optimizer=optimizer))
    number = space.lattice(t["w1"]).find(parse(placements))
    terms = table.terms[t["w1"].node]
    assert terms.parameter_bytes[number] == 64 * 128 * 4 // shards
    assert terms.gradient_bytes[number] == 64 * 128 * 4 // shards
    assert terms.optimizer_bytes[number] == 64 * 128 * state // shards
    assert terms.activation_bytes[number] == 0


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state() -> None:
    maker, t = two_layers()
    space = space_of(maker.graph(), MESH)
    terms = memory_table(space, MemoryPolicy()).terms[t["bias"].node]
    number = space.lattice(t["bias"]).find(parse("RS(0)"))
    assert (terms.parameter_bytes[number], terms.gradient_bytes[number], terms.optimizer_bytes[number]) == (32, 0, 0)


def test_activations_are_counted_once_and_inputs_and_cast_parameters_not_at_all() -> None:
    """relu is read by backward itself and through a view of the same storage; `hidden` is not read at all."""
    maker, t = two_layers()
    space = space_of(maker.graph(), MESH)
    table = memory_table(space, MemoryPolicy())
    keeping = {node for node, terms in table.terms.items() if terms.activation_bytes.any()}
    assert len(keeping & {t["relu"].node, t["relu_t"].node}) == 1
    assert keeping <= {t["relu"].node, t["relu_t"].node}
    kept = keeping.pop()
    for placements, shards in (("RR", 1), ("S(0)R", 2), ("S(0)S(0)", 8)):
        number = space.lattice(TensorRef(kept, 0)).find(parse(placements))
        assert table.terms[kept].activation_bytes[number] == 16 * 128 * 2 // shards


def test_whole_model_by_hand() -> None:
    """Everything replicated: (64*128 + 128*32) * 16 B of states, 32 * 4 B frozen, 16 * 128 * 2 B saved."""
    maker, _ = two_layers()
    space = space_of(maker.graph(), MESH)
    table = memory_table(space, MemoryPolicy())
    total = 0.0
    for node, terms in table.terms.items():
        total += terms.total[space.lattice(TensorRef(node, 0)).find(parse("RR"))]
    assert total == (64 * 128 + 128 * 32) * 16 + 32 * 4 + 16 * 128 * 2


def test_equal_nodes_share_their_terms() -> None:
    maker = GraphMaker()
    for name in ("a", "b"):
        maker.leaf("param", name, (64, 128))
    space = space_of(maker.graph(), MESH)
    table = memory_table(space, MemoryPolicy())
    assert table.terms[0] is table.terms[1]
    assert np.isfinite(table.terms[0].total).all()
