"""The rule that rolls a canary back: tables, and the counts that it is applied to."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.canary.arm_stats import ArmStats, outcome_of
from serve_app.canary.split import read_traffic
from serve_app.canary.trials import Trials
from serve_app.canary.verdict import judge, mostly_fails, non_finite
from serve_app.config import CanaryArgs
from serve_app.errors import (
    AdapterUnsupportedError,
    ApiError,
    ClientGoneError,
    EngineFailureError,
    NonFiniteError,
    OverloadedError,
    ServiceUnavailableError,
)
from serve_app.metrics.histograms import Histogram
from serve_app.tally import ARM_SECONDS, ArmCounts, quantile
from tests.canary_factory import BASE, CANARY, STABLE, adapter, catalog, key, report, tally

RULE = CanaryArgs()


@pytest.mark.parametrize(
    ("stable", "canary", "words"),
    [
        (tally(ok=500), tally(ok=50), None),
        (tally(ok=500), tally(ok=49, error=1), None),  # 2 points, not more
        (tally(ok=500), tally(ok=48, error=2), None),  # more than 2 points, but by chance?
        (tally(ok=500), tally(ok=25, error=25), "25 errors in 50 requests against 0 in 500"),
        (tally(ok=50), tally(ok=25, error=25), "25 errors in 50 requests against 0 in 50"),
        (tally(ok=500), tally(error=49), None),  # too few
        (tally(ok=9000, error=1000), tally(ok=880, error=120), None),  # 2 points
        (tally(ok=90_000, error=10_000), tally(ok=8300, error=1700), "more than 2 points"),
        (ArmCounts(), tally(ok=35, error=15), "against 0 in 0"),  # all the traffic is the canary's
        (tally(ok=500), tally(ok=95, empty=5), None),
        (tally(ok=500), tally(ok=60, empty=40), "40 empty outputs in 100 requests"),
        (tally(ok=400, empty=100), tally(ok=78, empty=22), None),
        (tally(ok=500), tally(ok=500, refused=500), None),  # not the version's fault
        (tally(ok=500), tally(ok=500, left=500), "500 clients left in 1000 requests"),
        (tally(ok=500), tally(left=50), "50 clients left in 50 requests"),
        (tally(ok=300, left=200), tally(ok=300, left=200), None),  # clients have their reasons
        (tally(0.05, ok=500), tally(0.09, ok=50), None),
        (tally(0.05, ok=500), tally(0.15, ok=50), "more than 2 times"),
        (tally(0.05, ok=49), tally(0.5, ok=50), None),  # too few to compare with
        (tally(0.5, ok=500), tally(0.05, ok=50), None),
    ],
)
def test_the_rule(stable: ArmCounts, canary: ArmCounts, words: str | None) -> None:
    reason = judge(stable, canary, RULE).reason
    assert (reason is None) == (words is None)
    assert words is None or (reason is not None and words in reason)


def test_the_rules_numbers_are_the_operators() -> None:
    rule = CanaryArgs(
        min_requests=5, max_error_rate_increase=0.5, max_non_finite=1, max_latency_ratio=20
    )
    stable = tally(0.05, ok=500)
    assert judge(stable, tally(0.5, ok=250, error=249), rule).reason is None
    assert judge(stable, tally(ok=4, error=46), rule).reason is not None
    assert judge(stable, tally(error=4), rule).reason is None
    assert judge(stable, tally(2.0, ok=50), rule).reason is not None
    lax = CanaryArgs(min_requests=5, max_non_finite=90)
    assert judge(stable, tally(ok=4, non_finite=16), lax).reason is not None  # errors, too


@pytest.mark.parametrize(
    ("canary", "allowed", "words"),
    [
        (tally(non_finite=1), 0, "1 of 1 outputs not finite, 0 allowed"),
        (tally(ok=999, non_finite=1), 0, "1 of 1000 outputs not finite"),
        (tally(ok=999, non_finite=1), 1, None),
        (tally(error=999), 0, None),
    ],
)
def test_outputs_that_are_not_finite_count_from_the_first_on(
    canary: ArmCounts, allowed: int, words: str | None
) -> None:
    found = non_finite(canary, CanaryArgs(max_non_finite=allowed))
    assert (found is None) == (words is None)
    assert words is None or (found is not None and words in found)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_one_more_good_answer_never_condemns(ok: int, bad: int, others: int, empty: int) -> None:
    stable = tally(ok=others)
    before = judge(stable, tally(ok=ok + 50, error=bad, empty=empty), RULE).reason
    after = judge(stable, tally(ok=ok + 51, error=bad, empty=empty), RULE).reason
    assert before is not None or after is None


@given(st.lists(st.floats(min_value=0.0011, max_value=700), min_size=1, max_size=200))
def test_a_quantile_lies_in_the_bucket_of_the_value_itself(seconds: list[float]) -> None:
    histogram = Histogram(ARM_SECONDS)
    for value in seconds:
        histogram.observe(value)
    found = quantile(histogram.counts, 0.95)
    exact = sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]
    assert found is not None
    assert exact / 1.42 <= found <= exact * 1.42
    assert quantile([0] * len(histogram.counts), 0.95) is None


# Counting


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (EngineFailureError("x"), "error"),
        (ServiceUnavailableError("the adapter cannot be loaded"), "error"),
        (AdapterUnsupportedError("the adapter cannot be served"), "error"),
        (RuntimeError("ours"), "error"),
        (NonFiniteError("NaN"), "non_finite"),
        (OverloadedError("busy"), "refused"),
        (ApiError(400, "no"), "refused"),
        (ClientGoneError(), "left"),
        (asyncio.CancelledError(), "left"),
    ],
)
def test_whose_fault_an_end_is(error: BaseException, outcome: str) -> None:
    assert outcome_of(error) == outcome


async def test_a_request_ends_once_and_in_its_arm() -> None:
    arms = ArmStats()
    watch = arms.begin(key("canary", CANARY))
    watch.first_token()
    watch.done(has_text=True, num_tokens=7)
    watch.left(9)
    silent = arms.begin(key("canary", CANARY))
    silent.failed(NonFiniteError("NaN"), 0)
    ((named, counted),) = arms.counts()
    assert named == key("canary", CANARY)
    assert (counted.count("ok"), counted.count("non_finite"), counted.count("left")) == (1, 1, 0)
    assert (sum(counted.first_token), sum(counted.latency), counted.output_tokens) == (1, 1, 7)
    arms.retain({("pirate", STABLE.digest)})
    assert arms.counts() == ()


async def test_a_wait_for_the_adapters_load_is_not_charged_to_the_version() -> None:
    arms = ArmStats()
    for is_warm in (False, True):
        answered, given_up = (arms.begin(key("canary", CANARY)) for _ in range(2))
        if is_warm:
            answered.warm()
            given_up.warm()
        answered.first_token()
        answered.done(has_text=True, num_tokens=1)
        given_up.left(0)
    ((_, counted),) = arms.counts()
    assert (sum(counted.first_token), counted.count("left")) == (2, 2)  # as /metrics shows them
    assert (sum(counted.warm_first_token), counted.num_warm_left) == (1, 1)
    assert counted + counted - counted == counted
    cold = replace(tally(9.0, ok=500), warm_first_token=ArmCounts().warm_first_token)
    assert judge(tally(0.05, ok=500), cold, RULE).reason is None


# A trial


def trials(rule: CanaryArgs = RULE, **settings: str) -> Trials:
    begun = Trials(rule)
    begun.add_report(report(), 0.0)  # the ingress is known
    follow(begun, 0.0, **settings)
    return begun


def follow(known: Trials, now_s: float, **settings: str) -> None:
    wished = {"canary_weight": "1"} | settings  # so that stable needs no requests
    known.follow(read_traffic(catalog(**wished), {BASE.digest}, {}).splits, now_s)


def reason(known: Trials, now_s: float) -> str | None:
    return known.verdicts(now_s)["pirate"].reason


def test_ingresses_are_added_up_and_a_lost_report_does_no_harm() -> None:
    known = trials()
    known.add_report(report("two"), 0.0)
    known.add_report(report("one", canary=tally(ok=15, error=10)), 1.0)
    assert reason(known, 1.0) is None
    known.add_report(report("two", canary=tally(ok=10)), 1.0)
    known.add_report(report("two", canary=tally(ok=15, error=10)), 5.0)  # two were lost
    assert known.by_name["pirate"].counts("canary").num_judged == 50
    assert reason(known, 5.0) is not None


def test_an_ingress_that_is_gone_still_counts() -> None:
    known = trials()
    known.add_report(report("one", canary=tally(ok=15, error=10)), 1.0)
    known.add_report(report("two"), 100.0)
    known.add_report(report("two", canary=tally(ok=15, error=10)), 101.0)
    assert reason(known, 101.0) is not None


def test_what_an_ingress_counted_before_it_was_known_is_not_this_trials() -> None:
    known = trials()
    known.add_report(report("new", canary=tally(error=500)), 1.0)
    assert reason(known, 1.0) is None
    known.add_report(report("new", canary=tally(error=500, ok=50)), 2.0)
    assert reason(known, 2.0) is None


def test_a_canary_that_is_started_again_begins_anew() -> None:
    known = trials()
    known.add_report(report(canary=tally(error=50)), 1.0)
    assert reason(known, 1.0) is not None
    follow(known, 2.0, canary_weight="0")
    assert known.verdicts(2.0) == {}
    assert known.by_name["pirate"].counts("canary").num_judged == 50  # to be read
    follow(known, 3.0)
    known.add_report(report(canary=tally(error=50, ok=50)), 4.0)
    assert reason(known, 4.0) is None


def test_an_alias_that_moves_is_a_new_trial_and_the_old_ones_stragglers_are_not_its_own() -> None:
    known = trials()
    known.add_report(report(canary=tally(error=40)), 1.0)
    moved = catalog(STABLE, adapter(3, "canary"), canary_weight="0.5")
    known.follow(read_traffic(moved, {BASE.digest}, {}).splits, 2.0)
    known.add_report(report(canary=tally(error=60)), 3.0)
    assert reason(known, 3.0) is None
    assert known.by_name["pirate"].counts("canary").num_judged == 0


@pytest.mark.parametrize("stable", [ArmCounts(), tally(ok=1), tally(ok=1, error=1)])
def test_a_canary_that_mostly_fails_goes_though_stable_had_hardly_a_request(
    stable: ArmCounts,
) -> None:
    """This happens with a single client whose requests all go to the canary."""
    known = trials(canary_weight="0.5")
    known.add_report(report(stable=stable, canary=tally(error=49)), 1.0)
    assert reason(known, 1.0) is None
    known.add_report(report(stable=stable, canary=tally(error=55)), 2.0)
    assert "55 errors in 55 requests" in (reason(known, 2.0) or "")


@pytest.mark.parametrize(
    ("stable", "canary"),
    [
        (ArmCounts(), tally(ok=500, error=500)),  # stable may be as bad, for all that is known
        (ArmCounts(), tally(ok=20, error=35)),  # by chance?
        (ArmCounts(), tally(empty=500)),  # the client may ask for as much
        (tally(error=20), tally(error=500)),  # no version's fault
    ],
)
def test_a_canary_without_comparison_stays_for_lesser_reasons(
    stable: ArmCounts, canary: ArmCounts
) -> None:
    known = trials(canary_weight="0.5")
    known.add_report(report(stable=stable, canary=canary), 1.0)
    assert reason(known, 1.0) is None


def test_a_canary_is_rarely_condemned_without_comparison_where_half_of_all_fails() -> None:
    """Judged after each of 1,000 requests; the false rollbacks of an hour are 1 % at most."""
    draw = random.Random(1).random
    num_condemned = 0
    for _ in range(200):
        errors = list(accumulate(draw() < 0.5 for _ in range(1000)))
        num_condemned += any(
            mostly_fails(ArmCounts(), tally(ok=num - bad, error=bad), RULE) is not None
            for num, bad in enumerate(errors, 1)
            if bad > 0.52 * num
        )
    assert num_condemned == 0


def test_an_old_good_time_does_not_hide_a_bad_present() -> None:
    rule = CanaryArgs(window_s=60)
    known = trials(rule)
    for second in range(1, 601):
        known.add_report(
            report(stable=tally(ok=100 * second), canary=tally(ok=100 * second)), second
        )
        assert reason(known, float(second)) is None
    known.add_report(report(stable=tally(ok=60_000), canary=tally(ok=60_000, error=500)), 630.0)
    assert rule.max_error_rate_increase > 500 / 60_500  # of the whole trial
    assert reason(known, 630.0) is not None


def test_the_whole_window_counts_and_not_just_its_end() -> None:
    known = trials(CanaryArgs(window_s=600))
    for step in range(11):
        known.add_report(report(canary=tally(ok=100 * step)), 50.0 * step)
        assert reason(known, 50.0 * step) is None
    known.add_report(report(canary=tally(ok=1048, error=2)), 550.0)  # 2 of the last 50
    assert reason(known, 550.0) is None


def test_a_window_with_too_few_requests_reaches_farther_back() -> None:
    known = trials(CanaryArgs(window_s=10))
    for minute in range(1, 60):
        known.add_report(report(canary=tally(ok=minute, error=minute)), 60.0 * minute)
        assert (reason(known, 60.0 * minute) is None) == (2 * minute < 50)


def test_points_do_not_pile_up() -> None:
    known = trials(CanaryArgs(window_s=10, min_requests=5))
    for step in range(1000):
        canary = tally(ok=max(0, step - 500) // 100)
        known.add_report(report(stable=tally(ok=step), canary=canary), 10.0 * step)
        assert reason(known, 10.0 * step) is None
        assert len(known.by_name["pirate"]._checkpoints) <= 24
