"""The benchmark of several ranks runs on a CPU with a tiny shape."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks import tensor_parallel


def _lines(monkeypatch: pytest.MonkeyPatch, folder: Path, *args: str) -> list[dict[str, object]]:
    out = folder / "lines"
    own = ("--device", "cpu", "--out", str(out), "--work", str(folder), *args)
    monkeypatch.setattr(sys, "argv", ["tensor_parallel", *own])
    tensor_parallel.main()
    return [json.loads(line) for line in out.read_text().splitlines()][1:]


def test_engines_of_one_and_two_ranks_run_in_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = ("--shape", "tiny", "--prompt", "16", "--output", "4", "--repeats", "1")
    limits = ("--max-num-seqs", "4", "--batched-tokens", "64", "--host-bytes", str(10**8))
    cases = ("--requests", "3", "--distinct", "0,2")
    lines = _lines(monkeypatch, tmp_path, *sizes, *limits, *cases)
    names = [(line["ranks"], line["case"]) for line in lines if "ranks" in line and "case" in line]
    assert names == [
        (size, f"small-{adapters}-n3-16+4") for adapters in ("base", "r16x2") for size in (1, 2)
    ]
    assert all(line["2_ranks"] for line in lines if "faster_than" in line)


def test_exchanges_are_timed_by_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = _lines(monkeypatch, tmp_path, "--exchange", "--ranks", "2")
    found = [line["us"] for line in lines]
    assert [one["bytes"] for one in found] == [8192, 65536]  # type: ignore[index]
    assert all(one["gloo"] > 0 for one in found)  # type: ignore[index]
