"""Profiles: every number has its unit and source, a file without them does not load, what loads can be written back."""

import copy
from typing import Any

import pytest

from planner.constants import CONSTANT_KINDS
from planner.errors import InputError, UnknownHardwareError
from planner.hardware import HardwareProfile, fabric_names, load_profile, parse_profile, profile_names
from planner.redistribution import CollectiveKind
from planner.units import GIB


@pytest.fixture
def content() -> dict[str, Any]:
    return copy.deepcopy(load_profile("h100_sxm").to_dict())


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_is_complete_and_plausible(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert {"bfloat16", "float16", "float32"} <= set(profile.peak_flop_per_s)
    assert profile.peak("float32") < profile.peak("bfloat16"), "fp32 is the plain unit, not TF32 dressed up"
    assert 0 < profile.default_budget_bytes < profile.usable_bytes
    for kind in CollectiveKind:
        assert {2, 4, 8} <= set(profile.node.curves[kind])
        assert kind in profile.fabric.efficiency and kind in profile.fabric.start_up
    for key, constant in profile.constants.items():
        assert constant.kind in CONSTANT_KINDS and constant.source and constant.unit and constant.date, key
        assert (constant.kind == "fitted") == (constant.rows is not None and constant.residual_pct is not None), key


def test_h100_has_its_datasheet_numbers() -> None:
    profile = load_profile("h100_sxm")
    assert profile.hbm_bytes_per_s == 3.35e12  # TB/s is 10**12, not 2**40
    assert profile.peak("bfloat16") == 989.4e12
    assert profile.peak("float32") == 67e12
    assert profile.usable_bytes == 79 * GIB


@pytest.mark.parametrize("name", profile_names())
def test_what_is_written_reads_back_the_same(name: str) -> None:
    profile = load_profile(name)
    again = HardwareProfile.from_dict(profile.to_dict())
    assert again.content_hash == profile.content_hash
    assert again.constants == profile.constants
    assert (again.gemm, again.attention, again.node, again.fabric) == (
        profile.gemm, profile.attention, profile.node, profile.fabric,
    )  # fmt: skip


def test_hash_follows_the_numbers(content: dict[str, Any]) -> None:
    before = HardwareProfile.from_dict(content).content_hash
    content["pointwise"]["efficiency"]["value"] = 0.5
    assert HardwareProfile.from_dict(content).content_hash != before


def test_unknown_hardware_lists_the_known() -> None:
    with pytest.raises(UnknownHardwareError, match="h900") as caught:
        load_profile("h900")
    assert "h100_sxm" in caught.value.hint


@pytest.mark.parametrize("fabric", fabric_names())
def test_any_fabric_goes_with_any_machine(fabric: str) -> None:
    default, other = load_profile("b200"), load_profile(f"b200+{fabric}")
    assert other.fabric_name == fabric
    assert other.node == default.node and other.gemm == default.gemm
    assert (other.name == "b200") == (fabric == default.fabric_name)
    assert (other.content_hash == default.content_hash) == (fabric == default.fabric_name)
    assert load_profile(other.name).content_hash == other.content_hash


def test_unknown_fabric_lists_the_known() -> None:
    with pytest.raises(UnknownHardwareError, match="unknown fabric 'carrier_pigeon'") as caught:
        load_profile("h100_sxm+carrier_pigeon")
    assert "roce_8x400g" in caught.value.hint


def test_what_comes_from_another_machine_says_so() -> None:
    """A100 has no table of matmuls of its own: it takes that of H100, as `derived` and without its residual."""
    constants = load_profile("a100_80gb").constants
    borrowed = constants["gemm.surface.log_residual"]
    assert borrowed.kind == "derived" and borrowed.source.startswith("as h100_sxm: ") and borrowed.residual_pct is None
    assert constants["memory.hbm_bytes_per_s"].kind == "datasheet"
    assert constants["node.collective.all_gather.n8"].kind == "fitted"
    twice = load_profile("a100_40gb").constants["gemm.surface.log_residual"]
    assert twice.source == borrowed.source, "named where it was measured, not where it was passed on"


@pytest.mark.parametrize("field", ["value", "unit", "kind", "source", "date"])
def test_number_without_provenance_does_not_load(content: dict[str, Any], field: str) -> None:
    del content["memory"]["hbm_bytes_per_s"][field]
    with pytest.raises(InputError, match=rf"memory\.hbm_bytes_per_s lacks {field}"):
        HardwareProfile.from_dict(content)


@pytest.mark.parametrize("field", ["residual_pct", "rows", "range"])
def test_fitted_number_without_its_residual_does_not_load(content: dict[str, Any], field: str) -> None:
    del content["node"]["collective"]["all_reduce"]["n8"][field]
    with pytest.raises(InputError, match=rf"node\.collective\.all_reduce\.n8 lacks {field}"):
        HardwareProfile.from_dict(content)


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        content = content[parent]
    content[last] = value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peak.bfloat16", 989.4e12, "peak.bfloat16 is a bare value"),
        ("gemm.sharpness.kind", "hearsay", "gemm.sharpness has kind 'hearsay'"),
        ("gemm.compute_efficiency.value", 1.2, "gemm.compute_efficiency is 1.2"),
        ("memory.hbm_bytes_per_s.value", 3.35, "memory.hbm_bytes_per_s is 3.35"),
        ("gemm.launch_us.value", "fast", "gemm.launch_us is 'fast'"),
        ("fabric.start_up.all_reduce.value", [[8, 1.0], [4, 1.0]], "fabric.start_up.all_reduce is not a curve"),
        ("attention.efficiency.d64.value", 1.5, "attention.efficiency.d64 is 1.5"),
        ("gemm.sharpness.colour", "red", "gemm.sharpness has unknown fields colour"),
        ("schema", 99, "schema is 99"),
        ("title", "", "name or title is missing"),
    ],
)
def test_damaged_profile_names_the_key(content: dict[str, Any], key: str, value: Any, message: str) -> None:
    _set(content, key, value)
    with pytest.raises(InputError) as caught:
        HardwareProfile.from_dict(content)
    assert message in caught.value.message
    assert caught.value.hint


def test_missing_and_misspelt_constants_are_named(content: dict[str, Any]) -> None:
    content["gemm"]["sharpnes"] = content["gemm"].pop("sharpness")
    with pytest.raises(InputError, match=r"gemm\.sharpness is missing"):
        HardwareProfile.from_dict(content)
    content["gemm"]["sharpness"] = content["gemm"]["sharpnes"]
    with pytest.raises(InputError, match=r"unknown constants gemm\.sharpnes"):
        HardwareProfile.from_dict(content)


def test_text_that_is_not_toml() -> None:
    with pytest.raises(InputError, match="not TOML"):
        parse_profile("name = ")


def test_no_peak_for_a_dtype_is_an_error() -> None:
    with pytest.raises(UnknownHardwareError, match="no peak FLOP/s for float64"):
        load_profile("h100_sxm").peak("float64")
