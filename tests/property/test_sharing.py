"""One shared placement per tensor and phase is enough: making each wanted placement once brings nothing more. (That plans of
models emit no redistribution twice is in tests/planner/solving/test_nudges.py, where such plans are at hand.)"""

import math

import pytest

from tests.oracles.brute_force import brute_force
from tests.oracles.small_spaces import random_costs


@pytest.mark.parametrize("seed", range(14))
def test_paying_each_target_once_makes_no_optimum_cheaper(seed: int) -> None:
    costs = random_costs(seed)
    best = brute_force(costs).value_us
    if math.isfinite(best):
        assert brute_force(costs, once_per_target=True).value_us == pytest.approx(best, rel=1e-12)
