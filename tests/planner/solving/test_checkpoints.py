"""The outer loop that chooses how many layers to checkpoint: against trying every number."""

import math
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solving.checkpoints import TRY_ALL, CountSearch, Trial


def search(most: int, value: Callable[[int], float], binds: Callable[[int], bool] = lambda count: True) -> CountSearch:
    return CountSearch(most, lambda count: Trial(value(count), binds(count)))


def test_no_layer_is_checkpointed_where_the_budget_does_not_bind() -> None:
    found = search(32, lambda count: 100.0 + count, lambda count: False)
    assert found.run() == 0 and list(found.tried) == [0]


def test_few_layers_are_all_tried() -> None:
    values = [9.0, 8.0, 11.0, 5.0, 7.0, 12.0, 4.0, 6.0, 13.0]
    found = search(TRY_ALL, values.__getitem__)
    assert found.run() == 6 and sorted(found.tried) == list(range(TRY_ALL + 1))


def test_of_equal_numbers_the_smaller_one() -> None:
    assert search(4, lambda count: 7.0).run() == 0


def test_nothing_fits() -> None:
    found = search(40, lambda count: math.inf)
    assert found.run() is None and sorted(found.tried)[0] == 0 and sorted(found.tried)[-1] == 40
    lacking = CountSearch(40, lambda count: Trial(math.inf, True, 100.0 - count), layer_bytes=1.0)
    assert lacking.run() is None and sorted(lacking.tried) == [0, 40]


def test_what_is_lacking_leads_to_the_least_number_that_fits() -> None:
    def solve(count: int) -> Trial:
        return Trial(math.inf, True, 11 - count) if count < 11 else Trial(100.0 + count, True)

    exact = CountSearch(32, solve, layer_bytes=1.0)
    assert exact.run() == 11 and sorted(exact.tried) == [0, 10, 11, 12]
    for layer_bytes in (0.0, 0.2, 0.7, 1.5, 4.0):
        found = CountSearch(32, solve, layer_bytes=layer_bytes)
        assert found.run() == 11 and len(found.tried) <= 11


def test_a_similar_problem_s_number_is_where_the_search_starts() -> None:
    for start in (0, 3, 11, 14, 40):
        found = search(40, lambda count: 100.0 + abs(count - 12))
        assert found.run(start) == 12 and len(found.tried) <= 14
    near = search(40, lambda count: 100.0 + abs(count - 12))
    assert near.run(12) == 12 and sorted(near.tried) == [11, 12, 13]
    free = search(40, lambda count: 100.0 + count, lambda count: False)
    assert free.run(0) == 0 and list(free.tried) == [0]
    other = search(40, lambda count: math.inf if count < 20 else float(count))
    assert other.run(5) == 20


def test_time_that_runs_out_leaves_what_was_found() -> None:
    found = search(40, lambda count: 50.0 - count)
    found.expired = lambda: len(found.tried) >= 4
    assert found.run() == 40 and len(found.tried) == 4


@settings(max_examples=200, deadline=None)
@given(
    most=st.integers(TRY_ALL + 1, 80),
    least=st.integers(0, 80),
    repeat=st.floats(0.1, 10),
    worth=st.lists(st.floats(0, 20), min_size=80, max_size=80),
    layer_bytes=st.floats(0.0, 5.0),
)
def test_the_best_number_is_found_where_less_and_less_is_gained(
    most: int, least: int, repeat: float, worth: list[float], layer_bytes: float
) -> None:
    """Time falls by ever less per layer and every layer costs the same: the search must find the optimum, with few trials."""
    gains = sorted(worth, reverse=True)
    least = min(least, most)

    def value(count: int) -> float:
        return math.inf if count < least else 1000.0 + repeat * count - sum(gains[:count])

    found = CountSearch(most, lambda count: Trial(value(count), True, max(0.0, least - count)), layer_bytes)
    best = found.run()
    assert best is not None
    assert math.isclose(value(best), min(map(value, range(most + 1))), rel_tol=1e-12)
    assert len(found.tried) <= 2 + 3 * math.ceil(math.log2(most)) + math.ceil(math.log2(most)) + 3
