"""The sequential test behind a canary's verdict: its martingale, and its least favourable rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.canary import sequential
from serve_app.canary.sequential import Proportion, log_evidence

COUNTS = st.integers(0, 400)


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.5, 0.95])
@pytest.mark.parametrize("num", [1, 10, 200])
def test_the_evidence_of_one_arm_has_mean_1_at_its_true_rate(num: int, rate: float) -> None:
    """Sums over all possible counts: with this mean Ville's inequality holds at every look."""
    mean = sum(
        math.exp(
            math.log(math.comb(num, hits))
            + hits * math.log(rate)
            + (num - hits) * math.log1p(-rate)
            + sequential._log_martingale(Proportion(hits, num), rate)
        )
        for hits in range(num + 1)
    )
    assert mean == pytest.approx(1.0)


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.sampled_from([0.0, 0.02, 0.2]))
def test_no_pair_of_rates_within_the_margin_has_less_evidence_against_it(
    stable: int, stable_others: int, canary: int, canary_others: int, margin: float
) -> None:
    arms = Proportion(stable, stable + stable_others), Proportion(canary, canary + canary_others)
    found = log_evidence(*arms, margin)
    for step in range(1, 100):
        rate = step / 100
        if arms[0].total and rate + margin < 1:
            pair = sequential._log_martingale(arms[0], rate)
            pair += sequential._log_martingale(arms[1], rate + margin)
            assert found <= max(pair, 0.0) + 1e-6


@given(COUNTS, st.integers(1, 400), COUNTS, st.integers(1, 400))
def test_a_wider_margin_is_never_passed_with_more_certainty(
    stable: int, stable_others: int, canary: int, canary_others: int
) -> None:
    arms = Proportion(stable, stable + stable_others), Proportion(canary, canary + canary_others)
    found = [max(0.0, log_evidence(*arms, margin)) for margin in (0.0, 0.01, 0.1, 0.5)]
    assert found == sorted(found, reverse=True)


def test_extremes_are_no_error() -> None:
    assert log_evidence(Proportion(0, 0), Proportion(0, 0), 0.0) == 0.0
    assert log_evidence(Proportion(0, 0), Proportion(5, 5), 0.0) == math.inf
    assert log_evidence(Proportion(0, 0), Proportion(5, 5), 1.0) == 0.0
    assert log_evidence(Proportion(0, 10**9), Proportion(10**9, 10**9), 0.0) > 1e8
    assert log_evidence(Proportion(10**9, 10**9), Proportion(10**9, 10**9), 0.02) == 0.0


def test_a_canary_that_always_fails_beside_a_stable_version_that_nearly_does_is_no_error() -> None:
    """The least favourable rate of the canary is then 1, up to rounding."""
    assert log_evidence(Proportion(129, 133), Proportion(50, 50), 0.03) < 0
    assert log_evidence(Proportion(197, 199), Proportion(50, 50), 0.01) < 0
