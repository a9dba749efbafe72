"""The agreement benchmark's own arithmetic, and that its committed oracle is whole."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.agreement import (
    ADAPTERS,
    Answer,
    Departure,
    NextBest,
    departures,
    figures,
    read_answers,
    write_answers,
)

ORACLE = Path(__file__).parent / "benchmarks" / "results" / "agreement-expected.jsonl"
NEAR = (NextBest(7, 0.25), NextBest(8, 1.5))


def test_a_departure_is_the_first_token_that_differs_and_its_gap(tmp_path: Path) -> None:
    answer = Answer((1, 2, 3), (NEAR, NEAR, NEAR))
    expected = [(None, (5, 6), answer), ("a", (5,), answer), ("a", (5,), answer)]
    write_answers(tmp_path / "answers", expected)
    assert read_answers(tmp_path / "answers") == expected
    found = [(1, 2, 3), (1, 8, 3), (9, 2, 3)]
    assert departures(expected, found) == (Departure(1, 1, 1.5), Departure(2, 0, None))
    line = figures(expected, found, 1.0)
    assert (line["equal_answers"], line["equal_tokens"]) == (1, 7)
    assert line["tokens_before_a_departure"] == 4
    assert line["departed_beyond_next_best"] == 1


def test_the_oracles_answers_are_of_every_adapter_and_length() -> None:
    expected = read_answers(ORACLE)
    assert {adapter for adapter, _, _ in expected} == {None, *ADAPTERS}
    assert len(expected) == 100
    lengths = {len(prompt) for _, prompt, _ in expected}
    assert min(lengths) == 1
    assert len(lengths) > 30
    for _, _, answer in expected:
        assert len(answer.tokens) == len(answer.next_best) == 32
        for token, near in zip(answer.tokens, answer.next_best, strict=True):
            assert token not in {other.token_id for other in near}
            assert 0 <= near[0].gap <= near[1].gap
