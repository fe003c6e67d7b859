"""Every microsecond of a plan belongs to a kind of work with a rule, constants and an error bar."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

import app.demo
from planner.commands.describe import as_dict, details, summary
from planner.hardware import load_profile
from planner.plan import Plan
from planner.provenance import UNMEASURED_PCT, Price, prices, total_error_pct


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.load(Path(app.demo.__file__).parent / "llama3-8b.plan.json.gz")


def test_kinds_add_up_to_the_plan(plan: Plan) -> None:
    found = prices(plan, load_profile("h100_sxm"))
    assert sum(price.us for price in found) == pytest.approx(plan.objective_us, rel=1e-6)
    kinds = {price.kind for price in found}
    assert {"matmul", "attention", "pointwise", "optimizer", "all_gather across nodes"} <= kinds
    for price in found:
        assert price.constants and price.rule, price.kind
        assert 0 < price.error_pct <= 100, price.kind


def test_matmuls_carry_the_residual_of_their_fit(plan: Plan) -> None:
    hardware = load_profile("h100_sxm")
    matmul = next(price for price in prices(plan, hardware) if price.kind == "matmul")
    residuals = [c.residual_pct for name, c in hardware.constants.items() if name.startswith(("gemm.", "clock."))]
    assert matmul.measured and matmul.error_pct == max(r for r in residuals if r is not None)


def test_constants_of_another_machine_widen_the_error(plan: Plan) -> None:
    borrowed = {price.kind: price for price in prices(plan, load_profile("b200"))}
    assert not borrowed["matmul"].measured
    assert borrowed["matmul"].error_pct >= UNMEASURED_PCT


def test_errors_add_within_a_kind_and_as_squares_across() -> None:
    def price(us: float, error: float) -> Price:
        return Price(kind="k", us=us, rule="r", error_pct=error, constants={})

    assert total_error_pct((price(30.0, 10.0), price(70.0, 20.0))) == pytest.approx(math.hypot(3.0, 14.0))
    assert total_error_pct(()) == 0.0


def test_show_says_where_numbers_come_from(plan: Plan) -> None:
    shown = as_dict(plan)["prices"]
    assert shown["profile_changed_since"] is False
    assert shown["kinds"]["matmul"]["constants"]["gemm.compute_efficiency"]["source"]
    assert 0 < shown["error_pct"] < 30


def test_a_changed_or_unknown_profile_is_said(plan: Plan) -> None:
    assert as_dict(replace(plan, hardware_hash="other"))["prices"]["profile_changed_since"] is True
    assert "unknown hardware" in as_dict(replace(plan, hardware_name="h900"))["prices"]["note"]


def test_show_gives_each_kind_of_work_an_error_bar_in_words(plan: Plan) -> None:
    found = prices(plan, load_profile(plan.hardware_name))
    text = details(plan).removeprefix(summary(plan))
    for price in found:
        assert f"  {price.kind} " in text and f"± {price.error_pct:.0f} %: {price.rule}" in text
    assert "its constants have changed since" in details(replace(plan, hardware_hash="other"))
    assert "where the times come from: unknown hardware" in details(replace(plan, hardware_name="abacus"))
