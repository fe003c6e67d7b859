"""The cost table: sharing, re-pricing, gradients that must stay pending, and a real graph."""

import itertools

import numpy as np
import pytest

from planner.cost import CostTable
from planner.costing.estimate import estimate_costs, unreduced_uses
from planner.errors import InputError
from planner.graph import BACKWARD, JointGraph
from planner.hardware import HardwareProfile, load_profile
from planner.memory import MemoryPolicy
from planner.mesh import Mesh
from planner.placement import parse
from planner.strategy import StrategySpace
from tests.planner.costing.hand_made import CAST, EINSUM, GraphMaker, space_of

MESH = Mesh.parse("dp=2,tp=4")
H100 = load_profile("h100_sxm")


def slower(profile: HardwareProfile) -> HardwareProfile:
    """The same machine with half of every datasheet rate."""
    content = profile.to_dict()
    for key in ("hbm_bytes_per_s",):
        content["memory"][key]["value"] /= 2
    for dtype in content["peak"].values():
        dtype["value"] /= 2
    content["fabric"]["nic_bytes_per_s"]["value"] /= 2
    return HardwareProfile.from_dict(content)


def layers(count: int, precision: str = "bf16-mixed") -> JointGraph:
    """x w w w ... with fp32 parameters, bf16 compute and fp32 gradients."""
    maker = GraphMaker(precision)
    x = maker.leaf("input", "x", (256, 256), "bfloat16")
    weights = [maker.leaf("param", f"w{i}", (256, 256)) for i in range(count)]
    hidden = [x]
    for weight in weights:
        low = maker.op(CAST, (weight,), (256, 256), "bfloat16")
        product = maker.op(EINSUM, (hidden[-1], low), (256, 256), "bfloat16")
        hidden.append(maker.op("aten.relu.default", (product,), (256, 256), "bfloat16"))
    maker.output(hidden[-1])
    gradient = maker.leaf("tangent", "loss", (256, 256), "bfloat16")
    for weight, before in zip(reversed(weights), reversed(hidden[:-1]), strict=True):
        low = maker.op(EINSUM, (before, gradient), (256, 256), "bfloat16", BACKWARD)
        maker.gradients[weight.node] = maker.op(CAST, (low,), (256, 256), "float32", BACKWARD)
    return maker.graph()


def same_prices(one: CostTable, other: CostTable) -> bool:
    pairs = itertools.chain(
        zip(one.compute_us, other.compute_us, strict=True),
        ((a.table_us, b.table_us) for a, b in zip(one.routes, other.routes, strict=True)),
    )
    return all(np.array_equal(a, b) for a, b in pairs)


def test_equal_layers_share_one_array() -> None:
    few, many = (estimate_costs(space_of(layers(n), MESH), H100, policy=MemoryPolicy()) for n in (3, 12))
    assert len({id(us) for us in many.compute_us}) == len({id(us) for us in few.compute_us})
    assert len(many.routes) == len(few.routes)
    assert all(not us.flags.writeable for us in many.compute_us)


def test_every_price_is_finite_and_not_negative() -> None:
    space = space_of(layers(2), MESH)
    costs = estimate_costs(space, H100, policy=MemoryPolicy())
    for us, strategies in zip(costs.compute_us, space.strategies, strict=True):
        assert us.shape == (len(strategies),) and us.dtype == np.float64
        assert np.isfinite(us).all() and (us >= 0).all()
    assert costs.hardware_name == "h100_sxm" and costs.hardware_hash == H100.content_hash


def test_pricing_again_and_in_turns_gives_the_same_numbers() -> None:
    """Nothing of one profile is left behind for the next."""
    space, half = space_of(layers(2), MESH), slower(H100)
    first, other = (estimate_costs(space, hardware, policy=MemoryPolicy()) for hardware in (H100, half))
    again = estimate_costs(space, H100, policy=MemoryPolicy())
    fresh = estimate_costs(space_of(layers(2), MESH), half, policy=MemoryPolicy())
    assert same_prices(first, again)
    assert same_prices(other, fresh)
    assert not same_prices(first, other)
    assert all((a <= b).all() for a, b in zip(first.compute_us, other.compute_us, strict=True))


def test_order_of_axes_and_nodes_changes_the_price_of_communication() -> None:
    space = space_of(layers(1), MESH)
    near, far = (estimate_costs(space, H100, policy=MemoryPolicy(), gpus_per_node=n) for n in (8, 4))
    for a, b in zip(near.routes, far.routes, strict=True):
        known = np.isfinite(a.table_us)
        assert (a.table_us[known] <= b.table_us[known] + 1e-9).all()
    assert any((a.table_us < b.table_us).any() for a, b in zip(near.routes, far.routes, strict=True))
    with pytest.raises(InputError, match="0 GPUs per node"):
        estimate_costs(space, H100, policy=MemoryPolicy(), gpus_per_node=0)


def test_low_precision_gradients_are_reduced_after_their_cast() -> None:
    graph = layers(2)
    gradients = {p.gradient.node for p in graph.parameters if p.gradient is not None}
    assert unreduced_uses(graph) == {(node, 0) for node in gradients}
    costs = estimate_costs(space_of(graph, MESH), H100, policy=MemoryPolicy())
    (number,) = costs.routes_without_reduction
    use = next(iter(costs.unreduced))
    assert costs.routes_of_use(number, *use) is costs.routes_without_reduction[number]
    assert costs.routes_of_use(number, use[0] - 1, 0) is costs.routes[number]
    lattice = costs.space.lattices[number]
    pending, reduced = lattice.find(parse("PR")), lattice.find(parse("RR"))
    assert np.isfinite(costs.routes[number].table_us[pending, reduced])
    assert np.isinf(costs.routes_without_reduction[number].table_us[pending, reduced])


def test_as_traced_reduces_where_the_graph_says() -> None:
    costs = estimate_costs(space_of(layers(2, "as-traced"), MESH), H100, policy=MemoryPolicy())
    assert costs.unreduced == frozenset() and not costs.routes_without_reduction


@pytest.fixture(scope="module")
def llama() -> StrategySpace:
    from planner.enumerating.enumerate import enumerate_strategies
    from planner.graph import ModelRequest
    from planner.tracing.trace import trace

    graph = trace(ModelRequest(model="llama3-tiny", batch=8, layers=2))
    return enumerate_strategies(graph, MESH)


def test_real_graph_is_priced_above_its_datasheet_bounds(llama: StrategySpace) -> None:
    costs = estimate_costs(llama, H100, policy=MemoryPolicy())
    products = 0
    for node, strategies, us in zip(llama.graph.nodes, llama.strategies, costs.compute_us, strict=True):
        assert np.isfinite(us).all() and (us >= 0).all(), node.key
        kernel = strategies.kernel
        if kernel.kind == "gemm":
            products += 1
            b, m, n, k = (kernel.dims[name] for name in ("batch", "m", "n", "k"))
            assert (us >= 2.0 * b * m * n * k / H100.peak(kernel.dtype) * 1e6).all(), node.key
    assert products > 10
    assert costs.unreduced, "the sample computes in bf16 and keeps fp32 gradients"
    assert set(costs.memory.terms) >= {p.node for p in llama.graph.parameters}


def test_sharding_work_makes_it_cheaper_but_never_by_more_than_the_devices(llama: StrategySpace) -> None:
    costs = estimate_costs(llama, H100, policy=MemoryPolicy())
    for node, strategies, us in zip(llama.graph.nodes, llama.strategies, costs.compute_us, strict=True):
        if strategies.kernel.kind in ("gemm", "attention"):
            assert us.max() / us.min() <= MESH.num_devices, node.key
