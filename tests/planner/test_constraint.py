"""Constraints as users write them, as files hold them, and as a plan is checked against them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from planner.constraint import (
    Allow,
    BoundaryPlacement,
    Constraint,
    Facts,
    Forbid,
    ForbidCollective,
    MemoryBudget,
    Pin,
    SamePlacement,
    from_json,
    holds,
    parse_forbid,
    parse_recipe,
    split_note,
)
from planner.errors import InvalidConstraintError, InvalidMeshError
from planner.graph import TensorMeta, TensorRef
from planner.mesh import Mesh
from planner.placement import parse
from planner.recipes import Recipe
from planner.redistribution import Collective, CollectiveKind
from planner.strategy import StrategySpace
from tests.oracles.small_spaces import full_lattice, graph_of, leaf, op, strategies

MESH = Mesh.parse("dp=2,tp=2")
S0R, RR, RS0 = (parse(text) for text in ("S(0)R", "RR", "RS(0)"))
EVERY: list[Constraint] = [
    Pin(where="layers.*.wq", placements=S0R, note="as in the paper"),
    Allow(where="layers.*.wq", options=(S0R, RR), note="either"),
    Forbid(where="w", options=(S0R,)),
    ForbidCollective(collective="all_to_all", axis="dp", note="the network is slow"),
    ForbidCollective(collective="*", axis="dp+tp"),
    SamePlacement(where="layers.*.wq", note="shorter script"),
    Recipe(name="tp", axes=("tp",), note="baseline"),
    BoundaryPlacement(where="input:x", placements=S0R),
    MemoryBudget(num_bytes=80 * 2**30),
]


@pytest.mark.parametrize("constraint", EVERY, ids=lambda c: c.describe())
def test_files_keep_constraints_with_their_notes(constraint: Constraint) -> None:
    data = constraint.to_json()
    assert from_json(data, MESH) == constraint
    assert "\n" not in constraint.describe()


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(InvalidConstraintError, match="wish"):
        from_json({"kind": "wish"}, MESH)


def test_notes() -> None:
    assert split_note("a/b/fwd#0=RR # because # of this") == ("a/b/fwd#0=RR", "because # of this")
    assert split_note("a/b/fwd#0=RR") == ("a/b/fwd#0=RR", "")
    assert Pin.parse("a/b/fwd#0 = S(0)R # why", MESH) == Pin(where="a/b/fwd#0", placements=S0R, note="why")
    assert Allow.parse("wq=S(0)R|dp:R,tp:S(0)  #x", MESH) == Allow(where="wq", options=(S0R, RS0), note="x")
    assert parse_forbid("all_to_all@dp # slow", MESH).note == "slow"
    assert SamePlacement.parse("layers.*.wq # uniform").note == "uniform"
    assert parse_recipe("tp:tp # by hand", MESH) == Recipe(name="tp", axes=("tp",), note="by hand")


def test_forbid_is_a_collective_or_placements() -> None:
    assert parse_forbid("all_to_all@dp", MESH) == ForbidCollective(collective="all_to_all", axis="dp")
    assert parse_forbid("*@dp+tp", MESH) == ForbidCollective(collective="*", axis="dp+tp")
    assert parse_forbid("wq=S(0)R|RR", MESH) == Forbid(where="wq", options=(S0R, RR))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("broadcast@dp", "there is no collective 'broadcast'"),
        ("wq", "is not WHERE=PLACEMENTS"),
        ("wq=S(0)", "has 1 placements"),
        ("=S(0)R", "is not WHERE=PLACEMENTS"),
    ],
)
def test_malformed_forbids_are_refused_with_a_hint(written: str, said: str) -> None:
    with pytest.raises(InvalidConstraintError, match=re.escape(said)) as refused:
        parse_forbid(written, MESH)
    assert refused.value.hint


def test_other_malformed_constraints() -> None:
    with pytest.raises(InvalidMeshError, match="no axis 'pp'"):
        parse_forbid("all_gather@pp", MESH)
    with pytest.raises(InvalidConstraintError, match="several placements"):
        Pin.parse("wq=S(0)R|RR", MESH)
    with pytest.raises(InvalidConstraintError, match="not a WHERE"):
        SamePlacement.parse("wq=RR")
    with pytest.raises(InvalidConstraintError, match="no recipe 'zero3'"):
        parse_recipe("zero3:dp", MESH)
    with pytest.raises(InvalidMeshError, match="no axis 'pp'"):
        parse_recipe("tp:pp", MESH)


def test_forbidden_groups() -> None:
    mesh = Mesh.parse("dp=2,tp=2,ep=2")
    assert ForbidCollective(collective="*", axis="dp").forbids("all_reduce", (0, 1), mesh)
    assert not ForbidCollective(collective="*", axis="dp").forbids("all_reduce", (1,), mesh)
    assert not ForbidCollective(collective="*", axis="*").forbids(None, (0,), mesh)
    both = ForbidCollective(collective="all_reduce", axis="dp+tp")
    assert both.forbids("all_reduce", (0, 1, 2), mesh) and not both.forbids("all_reduce", (0, 2), mesh)
    assert not both.forbids("all_gather", (0, 1), mesh)


def facts(first: str, second: str, *, collectives: tuple[Collective, ...] = (), peak_bytes: int = 0) -> Facts:
    """Two parameters `w0`, `w1` of different shapes in the given placements."""
    shapes = TensorMeta((8, 4), "float32"), TensorMeta((16, 8), "float32")
    nodes = [leaf("param", "w0", shapes[0]), leaf("param", "w1", shapes[1]), op("m/op/fwd#0", (TensorRef(0, 0),), meta=shapes[0])]
    lattices = tuple(full_lattice(meta, MESH, partial=False) for meta in shapes)
    numbers = [[(n,) for n in range(len(lattice))] for lattice in lattices]
    space = StrategySpace(
        graph=graph_of(nodes, gradients={}, loss=TensorRef(2, 0)),
        mesh=MESH,
        lattices=lattices,
        lattice_of={TensorRef(0, 0): 0, TensorRef(1, 0): 1, TensorRef(2, 0): 0},
        strategies=(strategies(numbers[0], 0), strategies(numbers[1], 0), strategies([(0, 0)], 1)),
        replicated_for_lack_of_a_rule=(),
    )
    chosen = np.array([lattices[0].find(parse(first)), lattices[1].find(parse(second)), 0])
    return Facts(space=space, strategy=chosen, collectives=collectives, peak_bytes=peak_bytes)


def test_holds() -> None:
    plan = facts("S(0)R", "RS(0)")
    assert holds(Pin(where="w0", placements=S0R), plan) and not holds(Pin(where="w1", placements=S0R), plan)
    assert holds(BoundaryPlacement(where="w0", placements=S0R), plan)
    assert not holds(Pin(where="w*", placements=S0R), plan)
    assert holds(Allow(where="w*", options=(S0R, RS0)), plan) and not holds(Allow(where="w*", options=(S0R, RR)), plan)
    assert holds(Forbid(where="w*", options=(RR,)), plan) and not holds(Forbid(where="w*", options=(RR, RS0)), plan)
    assert not holds(SamePlacement(where="w*"), plan)
    assert holds(SamePlacement(where="w*"), facts("S(1)R", "S(1)R"))  # of tensors of different shapes


def test_holds_on_collectives_and_memory() -> None:
    gather = Collective(kind=CollectiveKind.ALL_GATHER, axes=(0, 1), full_bytes=1, dtype="float32")
    plan = facts("RR", "RR", collectives=(gather,), peak_bytes=100)
    assert not holds(ForbidCollective(collective="all_gather", axis="tp"), plan)
    assert holds(ForbidCollective(collective="all_reduce", axis="tp"), plan)
    assert holds(MemoryBudget(num_bytes=100), plan) and not holds(MemoryBudget(num_bytes=99), plan)
