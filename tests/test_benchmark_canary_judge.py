"""A short form of the canary benchmark: five simulated minutes, judged each second."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.canary_judge import Arm, World, judged_after, judged_before, simulate

NUM_S = 300
USUAL = Arm(0.005, 0.05)


@pytest.mark.parametrize(
    ("rate", "weight", "arm"),
    [
        (20, 0.1, Arm(latency="lognormal")),  # the adapter's load alone
        (50, 0.5, Arm(0.05, 0.1, "wide")),
        (200, 0.1, Arm(0.01, 0.3, "pareto")),
        (200, 0.5, Arm(latency="cliff")),
    ],
)
def test_a_canary_that_equals_the_stable_version_stays(
    rate: float, weight: float, arm: Arm
) -> None:
    rng = np.random.default_rng(1)
    hours = [simulate(World(rate, weight, arm, arm), rng, NUM_S) for _ in range(2)]
    assert any(judged_before(hour) is not None for hour in hours)  # fixed thresholds fall for it
    assert [judged_after(hour) for hour in hours] == [None] * 2


@pytest.mark.parametrize(
    ("canary", "num_requests"),
    [
        (Arm(0.5, 0.05), 60),
        (Arm(0.2, 0.05), 150),
        (Arm(0.005, 0.5), 150),
        (Arm(0.005, 0.05, slowness=5.0), 60),
    ],
)
def test_a_bad_canary_is_rolled_back_within_few_of_its_requests(
    canary: Arm, num_requests: int
) -> None:
    rng = np.random.default_rng(1)
    hour = simulate(World(20, 0.1, USUAL, canary, load_s=0), rng, NUM_S)
    end = judged_after(hour)
    assert end is not None
    assert hour.canary[0][end].sum() <= num_requests
