"""The pauses of a bad version, and the memory of its reason."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from registry.errors import QuarantinedError
from registry.quarantine import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    FolderQuarantine,
    Quarantine,
    pause_s,
)

A, B = "a" * 64, "b" * 64


class Clock:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=["memory", "folder"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: str, folder: Path, clock: Clock) -> Quarantine:
    if kind == "memory":
        return Quarantine(clock, lambda: 1.0)
    return FolderQuarantine(folder, clock, lambda: 1.0)


def test_pauses_double_up_to_a_cap_and_are_spread() -> None:
    longest = [pause_s(n, 1.0) for n in range(1, 12)]
    assert longest[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert longest[-1] == LONGEST_PAUSE_S
    assert [pause_s(n, 0.0) for n in range(1, 12)] == [pause / 2 for pause in longest]
    assert pause_s(10**6, 1.0) == LONGEST_PAUSE_S


def test_the_reason_comes_back_until_the_pause_is_over(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    quarantine = make(kind, tmp_path, clock)
    quarantine.check(A)
    quarantine.add(A, "layer 3 holds NaN")
    with pytest.raises(QuarantinedError, match="layer 3 holds NaN") as caught:
        quarantine.check(A)
    assert caught.value.retry_after_s == 5
    assert str(pickle.loads(pickle.dumps(caught.value))) == "layer 3 holds NaN"
    quarantine.check(B)
    clock.now_s += 5.1
    quarantine.check(A)


def test_failing_again_waits_longer_and_a_success_is_a_new_start(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    quarantine = make(kind, tmp_path, clock)
    pauses = []
    for _ in range(3):
        pauses.append(quarantine.add(A, "bad").retry_at_s - clock.now_s)
        clock.now_s += 100
    assert pauses == [5, 10, 20]
    assert set(quarantine.verdicts()) == {A}
    quarantine.clear(A)
    assert quarantine.verdicts() == {}
    assert quarantine.add(A, "bad").num_failures == 1


def test_a_day_without_a_try_is_forgotten(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    quarantine = make(kind, tmp_path, clock)
    quarantine.add(A, "bad")
    clock.now_s += 25 * 3600
    assert quarantine.verdicts() == {}


def test_a_clock_that_was_set_back_locks_nobody_out(kind: str, tmp_path: Path) -> None:
    clock = Clock()
    quarantine = make(kind, tmp_path, clock)
    quarantine.add(A, "bad")
    clock.now_s -= 365 * 24 * 3600
    quarantine.check(A)


def test_a_folder_is_read_by_all_and_damage_is_no_verdict(tmp_path: Path) -> None:
    FolderQuarantine(tmp_path).add(A, "bad")
    FolderQuarantine(tmp_path).add(B, "worse")
    (tmp_path / A).write_text('{"reason": "ba')
    (tmp_path / "notes.txt").write_text("somebody's")
    late = FolderQuarantine(tmp_path)
    late.check(A)
    with pytest.raises(QuarantinedError, match="worse"):
        late.check(B)
    assert set(late.verdicts()) == {B}


def test_a_reason_of_any_length_is_kept_short() -> None:
    assert len(Quarantine().add(A, "x" * 100_000).reason) == 2000
