"""The judgement of `flips` on answers: it has to see a stale, a mixed and an early answer."""

from __future__ import annotations

import pytest

from tests.benchmarks.flips_load import Answer, Expected, Flip, judge

FLIPS = (Flip("a", 1, 2, 10.0, 11.0, 1.0), Flip("a", 2, 1, 20.0, 21.0, 1.0))


@pytest.fixture
def expected() -> Expected:
    known = Expected()
    known._versions["a", "p"] = {"one": 1, "two": 2}
    return known


@pytest.mark.parametrize(
    ("sent_s", "text", "wrong"),
    [
        (5.0, "one", None),
        (5.0, "two", "too_early"),
        (9.95, "two", None),  # in flight when the call began
        (10.5, "one", None),
        (11.5, "one", None),  # it takes effect
        (11.5, "two", None),
        (12.5, "two", None),
        (12.5, "one", "stale_after_effect"),
        (19.0, "one", "stale_after_effect"),
        (21.5, "one", None),
        (22.5, "one", None),
        (22.5, "two", "stale_after_effect"),
        (12.5, "half one, half two", "mixed"),
    ],
)
def test_an_answer_is_of_the_version_of_its_time(
    expected: Expected, sent_s: float, text: str, wrong: str | None
) -> None:
    found = judge([Answer("a", "p", sent_s, sent_s + 0.1, text)], FLIPS, expected)
    assert {kind for kind, count in found.items() if count} == ({wrong} if wrong else set())


def test_an_answer_that_failed_is_an_error(expected: Expected) -> None:
    assert judge([Answer("a", "p", 1.0, 1.1, error="503")], FLIPS, expected)["errors"] == 1
