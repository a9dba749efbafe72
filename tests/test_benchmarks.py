"""The benchmarks' own arithmetic, and a small run of each part that needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checks.validation import check_adapter
from tests.benchmarks.cases import Case, select, standard_cases, tiny
from tests.benchmarks.gpu_trace import break_down, parse_events, triton_classes
from tests.benchmarks.kernel_timing import LoraProblem
from tests.benchmarks.kernels import lora_cases
from tests.benchmarks.our_engine import OurEngine, Settings, figures
from tests.benchmarks.report import Report
from tests.benchmarks.serve_base import prepare_home
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.tiers_home import TIERED, adapter_name, prepare
from tests.registry_helpers import embedded


def kernel(name: str, start: float, duration: float, launch: int) -> dict[str, object]:
    args = {"correlation": launch}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "args": args}


def test_a_decode_step_is_split_into_classes_and_gaps() -> None:
    events = [
        kernel("nvjet_gemm" if i % 2 else "_rms_norm_kernel", 1000.0 * step + 5.0 * i, 3.0, step)
        for step in range(4)
        for i in range(100)
    ]
    result = break_down(parse_events({"traceEvents": events}), 99)
    assert result.steps == 3  # whole ones, from graph to graph
    assert result.step_us == 1000.0
    assert result.by_class_us["GEMM"] == 150.0
    assert result.by_class_us["norm, RoPE, SiLU"] == 150.0
    assert result.by_class_us["gaps"] == 700.0


def test_every_triton_kernel_has_a_class() -> None:
    assert {"LoRA", "attention", "sampling", "norm, RoPE, SiLU"} <= set(triton_classes().values())


def test_cases_have_names_of_their_own_and_are_chosen_by_pattern() -> None:
    cases = standard_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.engine for case in select(cases, "off-*,small-*")} == {"off", "small"}
    with pytest.raises(SystemExit, match="no case is called nonsense"):
        select(cases, "nonsense")


def test_tokens_of_a_lora_case_are_sorted_by_adapter() -> None:
    for case in lora_cases():
        assert list(case.idx) == sorted(case.idx)
        assert set(case.idx) == set(range(len(case.ranks)))


def test_the_lora_reference_adds_each_token_its_adapter() -> None:
    case = next(case for case in lora_cases() if case.name == "decode-T8-D8-r16")
    problem = LoraProblem(32, (16, 8), case, "cpu", 0)
    token, adapter = 5, problem.idx[5]
    wanted = problem.y0[token].double()
    for part, start in enumerate(problem.offs[:2]):
        a, b = problem.A[adapter][part].double(), problem.B[adapter][part].double()
        size = problem.Ns[part]
        delta = (problem.x[token].double() @ a.T) @ b.T
        wanted[start : start + size] += problem.scales[adapter] * delta
    torch.testing.assert_close(problem.reference()[token], wanted)


async def test_a_case_runs_with_more_adapters_than_the_pool_holds(tmp_path: Path) -> None:
    settings = Settings(SHAPES["tiny"], tmp_path, device="cpu", num_blocks=256)
    ours = OurEngine(settings, "small")
    try:
        case = Case("small", 40, 40, prompt=8, output=3)
        await ours.load_adapters(case)
        line = figures(case, [await ours.run(case, 0)])
    finally:
        ours.close()
    assert ours.num_pages == 32
    rate = line["output_tokens_per_s"]
    assert isinstance(rate, float)
    assert rate > 0


def test_a_tiny_case_keeps_its_engine_and_rank() -> None:
    for case in standard_cases():
        small = tiny(case)
        assert (small.engine, small.rank) == (case.engine, case.rank)
        assert small.requests <= 4


def test_a_report_keeps_what_it_has_said(tmp_path: Path) -> None:
    report = Report(tmp_path / "lines.jsonl")
    report.emit(side="ours", case="a")
    report.emit(side="vllm", case="b")
    assert [line["case"] for line in report.lines()] == ["a", "b"]


def test_a_base_without_weights_and_its_adapters_can_be_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_HOME", str(tmp_path))
    names = prepare_home(tmp_path, SHAPES["tiny"], 2, has_weights=False, device="cpu")
    assert names == ["r16-0", "r16-1"]


def test_quickly_registered_adapters_are_whole_and_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    registry = embedded(tmp_path)
    prepare(tmp_path, {TIERED: 2})
    first, second = registry.snapshot().adapters
    assert (first.name, second.name) == (adapter_name(TIERED, 0), adapter_name(TIERED, 1))
    assert first.digest != second.digest
    assert check_adapter(tmp_path / "made" / first.name, tmp_path / "made" / TIERED).rank == 16
