"""Meshes, placements, sizes, lattices: text in, text out, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from planner.errors import InfeasibleError, InputError, InvalidConstraintError, InvalidMeshError
from planner.graph import TensorMeta, layer_of, without_layer
from planner.mesh import Mesh
from planner.placement import Replicate, Shard, identifier, local_shape, parse, text
from planner.strategy import Lattice
from planner.units import GB, GIB, format_gb, format_gib, parse_bytes


def test_mesh_text_round_trip_and_data_axes() -> None:
    mesh = Mesh.parse(" dp=4, tp=8 ")
    assert str(mesh) == "dp=4,tp=8" and mesh.num_devices == 32
    assert Mesh.from_json(mesh.to_json()) == mesh
    assert mesh.data_axes == (0,) and Mesh.parse("tp=8").data_axes == ()
    with pytest.raises(InvalidMeshError, match="no axis 'pp'"):
        mesh.axis("pp")


@pytest.mark.parametrize("written", ["S(0)R", "RS(1)", "PP", "P(max)R", "S(10)S(10)"])
def test_placement_text_round_trip(written: str) -> None:
    assert text(parse(written)) == written


def test_placements_by_axis_name_leave_the_others_replicated() -> None:
    assert parse("tp:S(1)", Mesh.parse("dp=2,tp=2")) == (Replicate(), Shard(1))
    assert identifier(parse("S(0)P(max)R")) == "S0_Pmax_R"


@pytest.mark.parametrize("written", ["", "Q", "S(x)", "S0", "RR R R", "dp:S(0),tp", "xp:R"])
def test_malformed_placements(written: str) -> None:
    with pytest.raises((InvalidConstraintError, InvalidMeshError)) as error:
        parse(written, Mesh.parse("dp=2,tp=2"))
    assert error.value.hint


@pytest.mark.parametrize(
    ("written", "size"), [("80GiB", 80 * GIB), ("1.5 GB", 1_500_000_000), ("0", 0), ("1e3B", 1000), ("2 gb", 2 * GB)]
)
def test_sizes(written: str, size: int) -> None:
    assert parse_bytes(written) == size


@pytest.mark.parametrize("written", ["", "GB", "-1GB", "1XB", "1 G B", "nan"])
def test_malformed_sizes(written: str) -> None:
    with pytest.raises(InputError):
        parse_bytes(written)


def test_lattice_holds_exactly_the_even_placements() -> None:
    mesh = Mesh.parse("a=2,b=3")
    lattice = Lattice.build(TensorMeta((12, 4), "float32"), mesh, dims=(0, 1), partial_code=None)
    assert {lattice.text(n) for n in range(len(lattice))} == {"RR", "RS(0)", "S(0)R", "S(1)R", "S(0)S(0)", "S(1)S(0)"}
    for number in range(len(lattice)):
        placements = lattice.placements(number)
        assert lattice.find(placements) == number
        assert tuple(lattice.local_shapes[number]) == local_shape((12, 4), placements, mesh)
        assert lattice.local_bytes[number] == 4 * np.prod(lattice.local_shapes[number])
    assert lattice.find(parse("S(2)R")) == -1 and lattice.find(parse("RS(1)")) == -1


def test_a_shard_over_an_axis_of_size_one_is_a_replica() -> None:
    lattice = Lattice.build(TensorMeta((6,), "float32"), Mesh.parse("dp=1,tp=2"), dims=(0,), partial_code=None)
    assert len(lattice) == 2
    assert lattice.find(parse("S(0)S(0)")) == lattice.find(parse("RS(0)")) >= 0


@pytest.mark.parametrize(
    ("module", "layer", "general"),
    [
        ("layers.3.attention.wq", 3, "layers.*.attention.wq"),
        ("model.layers.12", 12, "model.layers.*"),
        ("norm", None, "norm"),
        ("", None, ""),
        ("h.0.attn/linear/fwd#0", 0, "h.*.attn/linear/fwd#0"),
        ("layers.0/add/fwd#1", 0, "layers.*/add/fwd#1"),
        ("param:layers.5.norm.weight", 5, "param:layers.*.norm.weight"),
    ],
)
def test_layers_of_module_paths(module: str, layer: int | None, general: str) -> None:
    assert layer_of(module) == layer and without_layer(module) == general


def test_errors_cross_process_borders() -> None:
    error = InfeasibleError("too big", hint="use more devices", conflicts=["pin a"], shortfall_bytes=7)
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.hint, again.conflicts, again.shortfall_bytes) == ("too big", "use more devices", ("pin a",), 7)


@pytest.mark.parametrize(
    ("num_bytes", "gib", "gb"),
    [
        (0, "0.00 GiB", "0.00 GB"),
        (3 * 2**20, "3.00 MiB", "3.15 MB"),
        (-3 * 2**20, "-3.00 MiB", "-3.15 MB"),
        (2**30 // 10 + 1, "0.10 GiB", "0.11 GB"),
        (80 * 2**30, "80.00 GiB", "85.90 GB"),
    ],
)
def test_small_sizes_are_written_in_small_units(num_bytes: int, gib: str, gb: str) -> None:
    assert (format_gib(num_bytes), format_gb(num_bytes)) == (gib, gb)
