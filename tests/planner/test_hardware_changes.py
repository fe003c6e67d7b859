"""Profiles with changed fields: what a factor changes, what it leaves alone, and what is no change."""

from __future__ import annotations

from argparse import Namespace

import pytest

from planner.commands.plan import _hardware
from planner.errors import InputError, UnknownHardwareError
from planner.hardware import HardwareProfile, load_profile, profile_names
from planner.hardware_changes import FIELDS, changes_text, parse_changes, split_name


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_changes_its_own_constants_by_the_factor(name: str, field: str):
    before, after = load_profile(name), load_profile(f"{name}@{field}=2")
    assert after.name == f"{name}@{field}=2" and after.content_hash != before.content_hash
    differ = {key for key in before.constants if before.constants[key].value != after.constants[key].value}
    heads = {"link": "node.", "network": "fabric.nic", "hbm": "memory.hbm_bytes_per_s", "memory": "memory.", "clock": "peak."}
    assert differ and all(key.startswith(heads[field]) for key in differ)
    for key in differ:
        assert after.constants[key].kind == "derived" and f"{field} were 2 times" in after.constants[key].source
        if not key.startswith("node.collective"):
            assert after.constants[key].value == pytest.approx(2 * before.constants[key].value)


def test_a_faster_link_shortens_long_collectives_and_keeps_their_start_up():
    before, after = load_profile("h100_sxm"), load_profile("h100_sxm@link=2")
    for kind, of_ranks in before.node.curves.items():
        for ranks, curve in of_ranks.items():
            other = after.node.curves[kind][ranks]
            start = min(us for _, us in curve)
            assert [size for size, _ in other] == [size for size, _ in curve]
            assert [us - start for _, us in other] == pytest.approx([(us - start) / 2 for _, us in curve])


def test_memory_keeps_what_is_reserved():
    before, after = load_profile("h100_sxm"), load_profile("h100_sxm@memory=0.5")
    assert after.reserve_bytes == before.reserve_bytes
    assert after.default_budget_bytes == before.usable_bytes // 2 - before.reserve_bytes


def test_names_are_read_back_and_ordered():
    assert split_name("h100_sxm+roce_8x400g@clock=0.9,link=2") == ("h100_sxm", "roce_8x400g", {"link": 2.0, "clock": 0.9})
    assert load_profile("h100_sxm+roce_8x400g@clock=0.9,link=2").name == "h100_sxm+roce_8x400g@link=2,clock=0.9"
    assert load_profile("h100_sxm@link=1").content_hash == load_profile("h100_sxm").content_hash
    assert parse_changes(changes_text({"memory": 1.5, "link": 0.25})) == {"link": 0.25, "memory": 1.5}


def test_a_changed_profile_survives_its_file():
    profile = load_profile("h100_sxm@network=0.5")
    assert HardwareProfile.from_dict(profile.to_dict()).content_hash == profile.content_hash


@pytest.mark.parametrize(
    "text", ["links=2", "link", "link=", "link=fast", "link=0", "link=11", "link=nan", "link=2,link=3", "=2"]
)
def test_what_is_no_change_is_refused(text: str):
    with pytest.raises(InputError, match="no change") as error:
        load_profile(f"h100_sxm@{text}")
    assert "FIELD=FACTOR" in (error.value.hint or "")
    with pytest.raises(UnknownHardwareError):
        load_profile("abacus@link=2")


def test_another_network_keeps_the_changes_of_a_name():
    arguments = Namespace(hardware="h100_sxm@link=0.5", fabric="roce_8x400g")
    assert _hardware(arguments, None) == "h100_sxm+roce_8x400g@link=0.5"
