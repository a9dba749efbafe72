"""The benchmarks' own arithmetic, and a small run of each part that needs no GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checks.validation import check_adapter
from engine.model_config import read_model_config
from engine.weight_shapes import expected_shapes
from tests.benchmarks import kv_host
from tests.benchmarks.adapter_files import write_adapters
from tests.benchmarks.arrival import measure_arrivals
from tests.benchmarks.cases import (
    POOL_PAGES,
    AdapterSpec,
    Case,
    cases_as_json,
    cases_from_json,
    cost_cases,
    groups_of,
    select,
    shape_cases,
    standard_cases,
    tiny,
)
from tests.benchmarks.engine import SHAPE_PAGES, chosen_cases, pool_pages
from tests.benchmarks.engine import parse_args as parse_engine_args
from tests.benchmarks.gpu_trace import break_down, parse_events, triton_classes
from tests.benchmarks.grammar_tokenizer import GRAMMARS, form_schema
from tests.benchmarks.grammars import parse_args as parse_grammar_args
from tests.benchmarks.grammars import run_forced
from tests.benchmarks.grammars import run_ours as run_grammars
from tests.benchmarks.kernel_timing import LoraProblem
from tests.benchmarks.kernels import lora_cases
from tests.benchmarks.memory_adapters import AdapterNumbers, tensor_bytes
from tests.benchmarks.our_engine import OurEngine, Run, Settings, figures, to_base
from tests.benchmarks.report import Report
from tests.benchmarks.serve_base import prepare_home
from tests.benchmarks.serve_sides import prepare_vllm, vllm_command, vllm_weights_s
from tests.benchmarks.shapes import ALL_LINEARS, SHAPES, parse_targets
from tests.benchmarks.slora import Outcome, make_trace
from tests.benchmarks.slora import figures as slora_figures
from tests.benchmarks.tiers_home import TIERED, adapter_name, prepare
from tests.registry_helpers import embedded

# One thread: a second one waits for cores that other tests use.
ON_CPU: dict[str, Any] = {"device": "cpu", "num_blocks": 256, "others": {"num_threads": 1}}


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
    settings = Settings(SHAPES["tiny"], tmp_path, **ON_CPU)
    ours = OurEngine(settings, "small")
    try:
        case = Case("small", 80, 80, prompt=8, output=3)
        await ours.load_adapters(case.adapters)
        line = figures(case, [await ours.run(case, 0)])
        num_on_device = len(ours.reader.pool.on_device())
    finally:
        ours.close()
    assert 0 < num_on_device < 80
    rate = line["output_tokens_per_s"]
    assert isinstance(rate, float)
    assert rate > 0


async def test_the_pool_costs_at_least_the_tensors_and_only_those_of_new_adapters(
    tmp_path: Path,
) -> None:
    ours = OurEngine(Settings(SHAPES["tiny"], tmp_path, **ON_CPU), "on")
    two = Case("on", 2, 2, prompt=8, output=2, targets="qv", ranks=(8, 16))
    four = Case("on", 4, 4, prompt=8, output=2, targets="qv", ranks=(8, 16))
    try:
        costs = []
        for case in (two.base, two, four):
            await ours.load_adapters(case.adapters)
            costs.append(await ours.warm_up(case, 1))
        await ours.unload_adapters()
        assert ours.reader.pool.device_bytes_used == 0
    finally:
        ours.close()
    # q: 64 + 64 features, v: 64 + 32, in two layers of float32; ranks 8 and 16.
    num_bytes = (8 + 16) * (128 + 96) * 2 * 4
    assert [cost.num_adapters for cost in costs] == [0, 2, 2]
    assert [cost.tensor_bytes for cost in costs] == [0, num_bytes, num_bytes]
    assert costs[1].pool_bytes == costs[2].pool_bytes >= num_bytes
    assert costs[0].ratio is None


def test_cases_that_run_in_turns_share_a_base_and_fit_the_pool() -> None:
    groups = groups_of(cost_cases())
    for base, *others in groups:
        assert base.distinct == 0
        assert others
        assert {case.base for case in others} == {base}
        assert sum(case.num_pages for case in others) <= POOL_PAGES
    assert {case for group in groups for case in group if case.distinct} == set(cost_cases())
    assert len({case.name for group in groups for case in group}) == len(
        {case for group in groups for case in group}
    )


def test_the_comparison_of_shapes_has_a_pool_for_its_adapters_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parsed(*options: str) -> argparse.Namespace:
        monkeypatch.setattr("sys.argv", ["engine", *options])
        return parse_engine_args()

    shape = parsed("--set", "shape")
    (largest,) = {sum(c.num_pages for c in group) for group in groups_of(chosen_cases(shape))}
    assert pool_pages(shape) == SHAPE_PAGES >= largest
    assert pool_pages(parsed("--set", "shape", "--pool-pages", "64")) == 64
    assert pool_pages(parsed("--set", "cost")) is None
    own = parsed("--distinct", "0,8", "--requests", "1,32")
    assert [(case.requests, case.distinct) for case in chosen_cases(own)] == [
        (1, 0),
        (1, 8),
        (32, 0),
        (32, 8),
    ]


def test_cases_travel_as_json() -> None:
    cases = (*standard_cases(), *cost_cases(), *shape_cases())
    assert cases_from_json(cases_as_json(cases)) == cases


def test_the_ratio_to_the_base_is_that_of_each_round() -> None:
    runs = [Run(seconds, [], []) for seconds in (2.0, 4.0, 9.0)]
    base = [Run(seconds, [], []) for seconds in (1.0, 3.0, 8.0)]
    assert to_base(runs, base) == {"to_base": 0.75, "added_s": 1.0, "added_percent": 33.3}


@pytest.mark.parametrize(
    ("text", "expected"), [("all", ALL_LINEARS), ("v_proj,q_proj", "qv"), ("down_proj", "d")]
)
def test_targets_are_letters_in_the_models_order(text: str, expected: str) -> None:
    assert parse_targets(text) == expected


def test_a_target_that_is_no_linear_is_named() -> None:
    with pytest.raises(ValueError, match="'lm_head' is no linear"):
        parse_targets("q_proj,lm_head")


@pytest.mark.parametrize(
    "spec",
    [
        AdapterSpec(16, 3),
        AdapterSpec(8, 0, "qv"),
        AdapterSpec(1, 7, "d", 2),
        AdapterSpec(4, 1, "qv", 2, "dora"),
    ],
)
def test_an_adapters_digest_describes_it(spec: AdapterSpec) -> None:
    assert AdapterSpec.parse(spec.digest) == spec


def test_random_adapters_differ_and_hold_what_their_spec_says(tmp_path: Path) -> None:
    config = read_model_config(SHAPES["tiny"].write_config(tmp_path))
    numbers = AdapterNumbers(config, 16, torch.device("cpu"))
    first, second = (numbers.adapter(AdapterSpec(4, i, "qo", 2)) for i in range(2))
    attention = "model.layers.0.self_attn"
    assert set(first.modules) == {f"{attention}.q_proj", f"{attention}.o_proj"}
    name = f"{attention}.q_proj"
    assert first.modules[name].a.shape == (4, 64)
    assert not torch.equal(first.modules[name].a, second.modules[name].a)
    expected = 4 * (64 + 64) * 2  # elements of q and o
    assert first.num_parameters == expected
    assert tensor_bytes(config, AdapterSpec(4, 0, "qo", 2), 2) == 2 * expected


def test_a_fused_module_is_adapted_if_one_of_its_parts_is(tmp_path: Path) -> None:
    shape = replace(SHAPES["phi-4"], hidden_size=64, intermediate_size=96, num_layers=2)
    base = shape.write_config(tmp_path / "base")
    (folder,) = write_adapters(tmp_path, shape, (AdapterSpec(8, 0, "vd"),), "cpu")
    assert set(check_adapter(folder, base).targets) == {"qkv_proj", "down_proj"}
    numbers = AdapterNumbers(read_model_config(base), 16, torch.device("cpu"))
    found = numbers.adapter(AdapterSpec(4, 0, "vd")).modules
    assert {name.rsplit(".", 1)[1] for name in found} == {"qkv_proj", "down_proj"}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_model_is_one_that_the_engine_serves(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    shapes = expected_shapes(read_model_config(shape.write_config(tmp_path)))
    for module, (in_features, out_features) in shape.linears.items():
        assert shapes[f"model.layers.1.{module}.weight"] == (out_features, in_features)


def test_adapters_as_files_hold_their_targets_alone(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    base = shape.write_config(tmp_path / "base")
    specs = (AdapterSpec(8, 0, "qv"), AdapterSpec(8, 1, "qv"))
    for folder in write_adapters(tmp_path, shape, specs, "cpu"):
        checked = check_adapter(folder, base)
        assert (checked.rank, set(checked.targets)) == (8, {"q_proj", "v_proj"})
    with pytest.raises(ValueError, match="every 2th layer"):
        write_adapters(tmp_path, shape, (AdapterSpec(8, 0, "qv", 2),), "cpu")
    with pytest.raises(ValueError, match="of the kind dora"):
        write_adapters(tmp_path, shape, (AdapterSpec(8, 0, kind="dora"),), "cpu")


async def test_others_outlive_all_newcomers(tmp_path: Path) -> None:
    """The model's limit is so low that the others must be replaced on the way."""
    others = {"max_model_len": 150, "num_threads": 1}
    settings = Settings(SHAPES["tiny"], tmp_path, device="cpu", num_blocks=256, others=others)
    ours = OurEngine(settings, "on")
    try:
        line = await measure_arrivals(ours, 2, is_tiny=True)
    finally:
        ours.close()
    assert line["renewals"]
    assert len(line["pause_adapter_ms"]) == len(line["pause_base_ms"]) == 2  # type: ignore[arg-type]


def test_traces_with_more_adapters_have_the_same_arrivals() -> None:
    few, many = (
        make_trace(50, 40, count, cv=1.0, alpha=1.0, lengths=(8, 512), seed=0)
        for count in (5, 1000)
    )
    assert [(one.at_s, one.prompt, one.output) for one in few] == [
        (one.at_s, one.prompt, one.output) for one in many
    ]
    assert 1800 < len(few) < 2200
    assert {one.adapter for one in few} == set(range(5))
    # Zipf's law with exponent 1 over 1,000: the first has 1 / H(1000) = 13 % of the requests.
    assert 0.10 < sum(one.adapter == 0 for one in many) / len(many) < 0.17
    assert {min(one.prompt for one in many), max(one.prompt for one in many)} <= set(range(8, 513))


def test_a_traces_figures_count_from_the_arrivals() -> None:
    outcomes = [Outcome(0.1, 1.0, 1.0), Outcome(0.3, 2.0, 4.0)]
    line = slora_figures(outcomes, 2.0)
    assert line["requests_per_s"] == 0.5
    assert line["ended_while_arriving_per_s"] == 0.5
    assert line["ttft_ms"] == {"p50": 300.0, "p95": 300.0, "p99": 300.0}


def test_vllm_finds_the_same_adapters_under_the_same_names(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    names = prepare_vllm(tmp_path, shape, 2, "cpu")
    assert names == ["r16-0", "r16-1"]
    for name in names:
        folder = tmp_path / "resolved" / f"random-base:{name}"
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(tmp_path / "base")
        assert check_adapter(folder, tmp_path / "base").rank == 16
    command = vllm_command(tmp_path, 8123, 32, None)
    assert command[command.index("--model") + 1] == str(tmp_path / "base")
    assert "--max-num-batched-tokens" not in command


def test_the_time_of_vllms_weights_is_read_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("INFO Model loading took 14.99 GiB memory and 1.52 seconds\n")
    assert vllm_weights_s(log) == 1.52
    log.write_text("INFO other\n")
    assert vllm_weights_s(log) is None


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
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
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


@pytest.mark.parametrize("grammar", ["json", "mixed", "regex"])
async def test_rows_with_grammars_draw_as_many_tokens_as_rows_without(
    tmp_path: Path, grammar: str
) -> None:
    options = ["--shape", "tiny", "--device", "cpu", "--num-blocks", "64", "--repeats", "1"]
    options += ["--requests", "4", "--prompt", "5", "--output", "6", "--grammar", grammar]
    args = parse_grammar_args([*options, "--shares", "[0, 0.5, 1]", "--work", str(tmp_path)])
    lines = await run_grammars(args, Report(None))
    assert list(lines) == [0.0, 0.5, 1.0]
    assert [line["limited_gaps_ms"] is None for line in lines.values()] == [True, False, False]
    assert [line["free_gaps_ms"] is None for line in lines.values()] == [False, False, True]


async def test_forced_text_ends_the_same_forms_in_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRAMMARS, "mixed", (form_schema(0, num_fields=3),))
    options = ["--shape", "tiny", "--device", "cpu", "--num-blocks", "300", "--repeats", "1"]
    options += ["--requests", "2", "--prompt", "5", "--forced", "--work", str(tmp_path)]
    line = await run_forced(parse_grammar_args(options), Report(None))
    steps, tokens = line["steps_of_requests"], line["tokens"]
    assert isinstance(steps, dict)
    assert isinstance(tokens, dict)
    assert steps["without"] == tokens["without"]
    assert steps["forced"] < tokens["forced"]


def test_the_host_tier_of_kv_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--prompt 320 --preempted 200 --streams 2 --stream-prompt 32 --tokens 200 --steps 12"
    out = tmp_path / "out.jsonl"
    command = f"kv_host --shape tiny --device cpu {sizes} --repeats 1 --host-gib 0.02 --out {out}"
    monkeypatch.setattr("sys.argv", command.split())
    kv_host.main()
    machine, plain, *parts = (json.loads(line) for line in out.read_text().splitlines())
    assert machine["benchmark"] == "kv_host"
    assert plain["part"] == "plain blocks, ms"
    assert [part["part"] for part in parts] == [
        "engine",
        "first token of 320 tokens, ms",
        "gaps of 2 streams, ms",
        "resume of 200 tokens, ms",
    ]
    assert parts[1]["host"]["p50"] > 0
    assert parts[3]["recompute_over_swap"] > 0
