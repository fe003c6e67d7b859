"""Models that cannot be traced: the op, the shapes and the user's line are named, and the next model traces as if alone."""

from __future__ import annotations

import pytest

from planner.errors import InputError, PlannerError, TraceError, UnsupportedOpError
from planner.tracing.trace import trace
from tests.planner.tracing.common import line_of, user_request

CASES = {
    "bad_shape": (TraceError, r"add of shapes 8x16 and 7"),
    "data_branch": (TraceError, r"depends on values of tensors"),
    "raises": (TraceError, r"ValueError: no such thing"),
    "data_shape": (TraceError, r"aten\.nonzero\.default has a shape that depends on values"),
    "random": (UnsupportedOpError, r"aten\.rand\.default draws random numbers"),
    "writes_weight": (UnsupportedOpError, r"forward changes the parameter fc\.weight in place"),
    "writes_input": (UnsupportedOpError, r"forward changes the input in place"),
    "reduces": (UnsupportedOpError, r"all_reduce communicates \(in mixing,"),
    "fails_to_build": (InputError, r"RuntimeError: the configuration is missing"),
}


@pytest.mark.parametrize("factory", CASES)
def test_failure_names_the_reason_and_the_line(factory: str) -> None:
    kind, reason = CASES[factory]
    with pytest.raises(kind, match=reason) as caught:
        trace(user_request(factory))
    assert line_of(factory) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("no_parameters", "no parameter influences what the model returns"),
        ("returns_positions", "no parameter influences what the model returns"),
        ("returns_unknown", r"TypeError: the model returns a Holder"),
    ],
)
def test_what_is_returned_has_to_depend_on_parameters(factory: str, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        trace(user_request(factory))


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("wrapped", "the module inner is wrapped by DataParallel"),
        ("laid_out", r"mixing\.fc\.weight is a DTensor: the model is distributed already"),
    ],
)
def test_a_model_that_is_distributed_already_is_refused_by_name(factory: str, reason: str) -> None:
    with pytest.raises(UnsupportedOpError, match=reason) as caught:
        trace(user_request(factory))
    assert "single device" in caught.value.hint


def test_recurrent_modules_are_refused_with_a_way_out() -> None:
    with pytest.raises(TraceError, match="RNN, GRU, or LSTM") as caught:
        trace(user_request("recurrent"))
    assert "recurrence" in caught.value.hint


def test_factory_has_to_return_module_and_inputs() -> None:
    with pytest.raises(InputError, match=r"returns \(Mlp\)"):
        trace(user_request("returns_module_only"))


def test_unsupported_op_carries_its_place() -> None:
    with pytest.raises(UnsupportedOpError) as caught:
        trace(user_request("random"))
    assert caught.value.details == {"op": "aten.rand.default", "module": "", "source": line_of("random")}


def test_a_failure_leaves_nothing_behind() -> None:
    before = trace(user_request("mlp"))
    for factory in (*CASES, "returns_positions"):
        with pytest.raises(PlannerError):
            trace(user_request(factory))
        assert trace(user_request("mlp")).fingerprint == before.fingerprint
