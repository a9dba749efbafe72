"""The benchmark of windowed decodes: a small run of it, on a CPU without its kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kernels.paged_plan import HeadShape
from tests.benchmarks.report import Report
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.windowed_decode import HEADS, make_shapes
from tests.benchmarks.windowed_decode import main_of as run_windowed
from tests.benchmarks.windowed_decode import parse_args as parse_windowed_args


def test_windowed_decode_measures_both_kernels_and_both_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPES["tiny"], architecture="MistralForCausalLM")
    monkeypatch.setitem(SHAPES, "tiny", shape)
    monkeypatch.setitem(HEADS, "llama-3-8b", HeadShape(4, 2, 16))
    options = ["--device", "cpu", "--context", "160", "--window", "48", "--batch", "2"]
    options += ["--replays", "1", "--heads", "llama-3-8b", "--engine", "--shape", "tiny"]
    options += ["--sequences", "2", "--output", "6", "--rounds", "1", "--work", str(tmp_path)]
    report = Report(tmp_path / "lines.jsonl")
    run_windowed(parse_windowed_args(options), report)
    lines = report.lines()
    kernels = [line for line in lines if line.get("part") == "kernel"]
    assert [(line["keys"], line["window"]) for line in kernels] == [(160, 48), (48, None)]
    engines = [line for line in lines if line.get("part") == "engine"]
    assert [line["cached_tokens_of_last_round"] for line in engines] == [2 * 144, 2 * 32]
    assert set(lines[-1]["ratios"]) == {"kernel llama-3-8b", "engine tiny"}  # type: ignore[call-overload]


def test_a_window_needs_a_base_that_has_one() -> None:
    with pytest.raises(SystemExit, match="--shape is tiny"):
        make_shapes(parse_windowed_args(["--shape", "tiny"]))
