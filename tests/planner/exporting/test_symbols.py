import pytest

from planner.exporting.symbols import END, Sizes, axis_variables
from planner.mesh import Mesh
from planner.placement import parse


def sizes(full: dict[str, int], tiny: dict[str, int] | None) -> Sizes:
    return Sizes(full=full, tiny=tiny, axis_names=("DP", "TP"))


LLAMA = sizes({"B": 64, "S": 8192, "D": 4096, "H": 32, "HD": 128}, {"B": 40, "S": 16, "D": 384, "H": 48, "HD": 8})


@pytest.mark.parametrize(
    ("full", "tiny", "written"),
    [
        (4096, 384, "D"),
        (524288, 640, "B*S"),
        (7, 7, "7"),
        (1, 1, "1"),
        (64, 4, "(HD//2)"),
        (8192, 768, "2*D"),
        (-4096, -384, "-D"),
        (2**63 - 1, 2**63 - 1, "END"),
    ],
)
def test_a_size_is_written_as_the_fewest_names(full: int, tiny: int, written: str) -> None:
    assert LLAMA.number(full, tiny) == written


def test_a_product_of_one_name_beats_one_of_two() -> None:
    """4096 = H * HD too, at both sizes: in the model they are the same number, so either is right; the shorter is taken."""
    assert LLAMA.factors(32 * 128, 48 * 8) == ("D",)


def test_an_ambiguous_size_becomes_a_constant_and_no_guess() -> None:
    found = sizes({"B": 32, "H": 32}, {"B": 8, "H": 8})
    assert found.number(32, 8) == "N32"
    assert found.number(32, 8) == "N32", "one constant per size"
    full, tiny = found.values()
    assert (full["N32"], tiny["N32"]) == (32, 8)


def test_a_size_without_a_name_becomes_a_constant() -> None:
    found = sizes({"B": 64}, {"B": 40})
    assert found.number(17, 5) == "N17"
    assert found.number(17, 6) == "N17_2"
    assert found.values() == ({"B": 64, "N17": 17, "N17_2": 17}, {"B": 40, "N17": 5, "N17_2": 6})


def test_without_a_tiny_version_sizes_are_literal() -> None:
    assert sizes({"D": 4096}, None).number(4096, 4096) == "4096"


@pytest.mark.parametrize(
    ("full", "tiny", "written"),
    [(0.5, 0.5, "0.5"), (4096.0, 384.0, "D"), (1 / 524288, 1 / 640, "1/(B*S)"), (128**-0.5, 8**-0.5, "HD**-0.5"),
     (128**-0.25, 8**-0.25, "HD**-0.25"),
     (float("-inf"), float("-inf"), 'float("-inf")')],
)  # fmt: skip
def test_floats_that_depend_on_sizes(full: float, tiny: float, written: str) -> None:
    assert LLAMA.real(full, tiny) == written


def test_local_sizes_divide_by_the_axes_that_split_the_dim() -> None:
    mesh = Mesh(axis_names=("dp", "tp"), axis_sizes=(8, 8))
    assert LLAMA.shape((64, 8192, 4096), (40, 16, 384), parse("S(0)S(2)", mesh)) == "[B//DP, S, D//TP]"
    assert LLAMA.shape((524288, 4096), (640, 384), parse("S(0)S(0)", mesh)) == "[B*S//DP//TP, D]"
    assert LLAMA.shape((), ()) == "[]"


def test_an_axis_named_like_a_size_gets_another_name() -> None:
    mesh = Mesh(axis_names=("s", "tp"), axis_sizes=(2, 2))
    assert axis_variables(mesh, ["B", "S"]) == ("S_AXIS", "TP")


def test_end_is_beyond_every_real_size() -> None:
    assert END > 10**15
