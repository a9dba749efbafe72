"""The benchmark of speculation, on an engine without a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.types import Request, SamplingParams
from tests.benchmarks.demo_questions import ADAPTERS, ADAPTERS_DIR
from tests.benchmarks.report import Report
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.speculation import ReplayedDrafter, Variant, main, measure
from tests.benchmarks.speculation_sides import (
    Case,
    Round,
    cases_as_json,
    compare,
    run_vllm,
    write_plain_adapter,
)
from tests.benchmarks.suffix_drafts import main as measure_suffix_drafts
from tests.fakes import FakeRunner, make_config, make_request

# As much of vLLM as `speculation_vllm` calls: a request is answered in two steps by its prompt
# reversed, two of three tokens of drafts are right.
VLLM = {
    "__init__": """
from types import SimpleNamespace as Record
from vllm.sampling_params import SamplingParams

class LLM:
    def __init__(self, model, speculative_config, enable_lora, max_loras, **others):
        assert enable_lora and not others["enable_prefix_caching"]
        assert not others["disable_log_stats"]
        self.ngram, self.max_loras, self.llm_engine = speculative_config, max_loras, self
        self.open, self.steps = {}, 0

    def add_request(self, name, prompt, params, lora_request=None):
        assert name not in self.open and len(self.open) < 2
        assert params.stop_token_ids == [2] and params.max_tokens == 96
        assert lora_request is None or 1 <= lora_request.number <= self.max_loras
        self.open[name] = [prompt["prompt_token_ids"], 2]

    def has_unfinished_requests(self):
        return bool(self.open)

    def step(self):
        self.steps += 1
        for request in self.open.values():
            request[1] -= 1
        ended = [name for name, (_, left) in self.open.items() if not left]
        texts = {name: self.open.pop(name)[0][::-1] for name in ended}
        return [
            Record(request_id=name, finished=True, outputs=[Record(token_ids=text)])
            for name, text in texts.items()
        ]

    def get_metrics(self):
        names = ("draft", 3 * self.steps), ("accepted", 2 * self.steps)
        return [Record(name="vllm:other", text="")] + [
            Record(name=f"vllm:spec_decode_num_{name}_tokens", value=value)
            for name, value in names if self.ngram
        ]
""",
    "sampling_params": """
from types import SimpleNamespace as SamplingParams

class RequestOutputKind:
    FINAL_ONLY = 2
""",
    "lora/request": """
class LoRARequest:
    def __init__(self, name, number, path):
        self.number = number
""",
}


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_replayed_drafts_have_the_acceptance_that_was_asked_for(
    acceptance: float, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, drafter = FakeRunner(num_blocks=400), ReplayedDrafter(acceptance)
    config = make_config(enable_prefix_caching=False, num_speculative_tokens=3)
    variants = [
        Variant(mode, config, runner, drafter)  # type: ignore[arg-type]
        for mode in ("off", "suffix")
    ]
    rounds = [
        [make_request(f"r{i}", 5, seed=i + number, max_tokens=21) for i in range(4)]
        for number in range(3)
    ]
    measure("fake", variants, rounds, 2, drafter)
    plain, drafted = map(json.loads, capsys.readouterr().out.splitlines())
    assert plain["tokens_per_step"] == pytest.approx(2.0)
    assert (plain["draft_tokens"], plain["acceptance"]) == (0, None)
    assert drafted["acceptance"] == acceptance
    assert drafted["different_answers"] == 0
    # One token beside the prompt, then four a step.
    steps = 21 if acceptance == 0.0 else 6
    assert drafted["tokens_per_step"] == pytest.approx(2 * 21 / steps, abs=1e-3)


def make_case(workload: str = "sql", num_rounds: int = 3) -> Case:
    params = SamplingParams(max_tokens=96, temperature=0.0)
    adapter = None if workload == "base" else workload
    rounds = [
        [Request(f"{workload}-{i}", (7, 8 + number, i), params, adapter) for i in range(4)]
        for number in range(num_rounds)
    ]
    return Case(workload, 2, rounds)


def test_the_rounds_of_a_case_go_to_vllm_with_their_adapters() -> None:
    sql, base = json.loads(cases_as_json([make_case("sql"), make_case("base", 1)]))
    assert (sql["workload"], sql["concurrency"], len(sql["rounds"])) == ("sql", 2, 3)
    expected = {"id": "sql-3", "prompt": [7, 9, 3], "adapter": "sql", "max_tokens": 96}
    assert sql["rounds"][1][3] == expected
    assert base["rounds"][0][0]["adapter"] is None


def test_vllm_runs_every_round_with_and_without_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in VLLM.items():
        file = tmp_path / "packages" / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shape = SHAPES["tiny"]
    base = shape.write_config(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    args = argparse.Namespace(vllm=str(tmp_path / "packages"), vllm_timeout=60.0, draft_tokens=7)
    cases = [make_case("sql"), make_case("base")]
    sides = run_vllm(cases, base, args, Report())
    lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [line["speculation"] for line in lines] == ["ngram"] * 7 + ["off"] * 7
    assert {line.get("acceptance") for line in lines[1:7]} == {0.667}
    assert {line["draft_tokens"] for line in lines[8:]} == {0}
    assert list(sides) == ["vllm ngram", "vllm off"]
    for figures in sides.values():
        assert [len(rounds) for rounds in figures.values()] == [3, 3]
        assert figures["base", 2][1].answers["base-3"] == (3, 9, 7)
        assert figures["sql", 2][0].num_tokens == 12


def test_the_comparison_leaves_the_first_round_apart_and_a_lost_side_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rounds(*seconds: float, answer: tuple[int, ...] = (1, 2)) -> list[Round]:
        return [Round(100, one, {"a": answer, "b": (3,)}) for one in seconds]

    sides = {
        "ours off": {("sql", 4): rounds(9, 2, 2), ("base", 4): rounds(9, 4, 4)},
        "ours auto": {("sql", 4): rounds(5, 1, 1), ("base", 4): rounds(9, 4, 4)},
        "vllm ngram": {("sql", 4): rounds(8, 2, 2, answer=(1, 9)), ("base", 4): rounds(9, 8, 8)},
        "vllm off": {("sql", 4): rounds(8, 4, 4)},  # ended before the base
    }
    compare(sides, Report())
    sql, base, total = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["compared"] for line in (sql, base, total)] == ["sql", "base", "total"]
    assert sql["tokens_per_s"] == {
        "ours off": 50.0,
        "ours auto": 100.0,
        "vllm ngram": 50.0,
        "vllm off": 25.0,
    }
    assert sql["first_round_tokens_per_s"]["ours auto"] == 20.0
    assert (sql["auto_to_ngram"], sql["off_to_off"]) == (2.0, 2.0)
    assert sql["same_answers_as_ours_off"]["vllm ngram"] == 0.5
    assert (base["tokens_per_s"]["vllm off"], base["off_to_off"]) == (None, None)
    assert total["tokens_per_s"]["ours auto"] == 40.0  # 400 tokens in 10 s
    assert total["auto_to_ngram"] == 2.0


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_scales_of_an_adapters_modules_are_in_its_copy_for_vllm(
    name: str, tmp_path: Path
) -> None:
    write_plain_adapter(ADAPTERS_DIR / name, tmp_path / name)
    before, after = (
        load_file(folder / name / "adapter_model.safetensors")
        for folder in (ADAPTERS_DIR, tmp_path)
    )
    config = json.loads((tmp_path / name / "adapter_config.json").read_text())
    assert not config["alpha_pattern"]
    assert config["r"] <= 16
    assert before.keys() == after.keys()
    for key, tensor in after.items():
        scale = 0.5 if name == "extract" and "v_proj.lora_B" in key else 1.0
        assert tensor.dtype == before[key].dtype
        torch.testing.assert_close(tensor, scale * before[key], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda", "--vllm", "absent"], "there is no folder absent"),
        (["--device", "cuda", "--vllm", "."], "no package vllm in ."),
        (["--vllm", "absent"], "only with --device cuda"),
    ],
)
def test_a_folder_without_vllm_is_refused_before_anything_runs(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    captured = capsys.readouterr()
    assert words in captured.err
    assert not captured.out


def test_the_cost_of_drafts_is_measured_for_each_number_of_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    budget = 300_000
    measure_suffix_drafts(
        ["--out", str(out), "--budget", str(budget), "--sequences", "[1, 3]", "--proposals", "60"]
    )
    capsys.readouterr()
    first, *lines, last = map(json.loads, out.read_text().splitlines())
    assert first["benchmark"] == "suffix_drafts"
    times = [line for line in lines if line["part"] == "times"]
    assert [(line["sequences"], line["steps"]) for line in times] == [(1, 60), (3, 20)]
    assert all(line["propose_us_a_step"]["p50"] > 0 for line in times)
    held = {line["work"]: line for line in lines if line["part"] == "bytes"}
    assert list(held) == ["ended", "waiting", "many_salts"]
    for line in held.values():
        # Enough text that some was dropped, and what is left is below the budget.
        assert 0 < line["held_bytes"] <= line["most_bytes"] < budget
        assert line["pass"]
    assert "pass" in last
