"""The benchmarks of adapter kinds and of aLoRA: their arithmetic, and a small run of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model_config import read_model_config
from tests.benchmarks.adapter_kinds import holds, make_variants, pages_of, ratios_of
from tests.benchmarks.adapter_kinds import main_of as run_kinds
from tests.benchmarks.adapter_kinds import parse_args as parse_kinds_args
from tests.benchmarks.alora import check_cached
from tests.benchmarks.alora import main_of as run_alora
from tests.benchmarks.alora import parse_args as parse_alora_args
from tests.benchmarks.cases import AdapterKind, AdapterSpec
from tests.benchmarks.memory_adapters import AdapterNumbers, tensor_bytes
from tests.benchmarks.our_engine import decode_rate
from tests.benchmarks.report import Report
from tests.benchmarks.shapes import SHAPES


def test_variants_of_kinds_hold_as_many_rows_and_fit_the_pool() -> None:
    by_name = {variant.name: variant for variant in make_variants(4)}
    rows = {name: sum(spec.rank for spec in one.specs) for name, one in by_name.items()}
    assert rows == {"base": 0, "plain": 64, "dora": 64, "bias": 64, "two_r16": 128, "one_r32": 128}
    assert by_name["two_r16"].keys[1] == "0.75*r16-1+0.5*r16-5"
    assert set(by_name["plain"].specs) < set(by_name["two_r16"].specs)
    # The pairs' halves, DoRA, biases and rank 32: 8 + 4 + 4 + 8 pages.
    assert pages_of(tuple(by_name.values())) >= 24


def test_ratios_of_kinds_are_those_of_each_round_without_the_first() -> None:
    names = ("base", "plain", "dora", "bias", "two_r16", "one_r32")
    rates = {name: [1.0, 100.0, 50.0] for name in names}
    rates |= {"dora": [9.0, 99.0, 49.0], "two_r16": [9.0, 90.0, 45.0]}
    ratios = ratios_of(rates)
    assert ratios["plain_to_base"] == 1.0
    assert ratios["dora_to_plain"] == 0.985
    assert ratios["two_r16_to_one_r32"] == 0.9
    assert not holds(ratios)
    assert holds(ratios | {"two_r16_to_one_r32": 0.97})


def test_the_decode_rate_counts_while_all_requests_decode() -> None:
    assert decode_rate([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]) == 2.0
    with pytest.raises(ValueError, match="need more tokens"):
        decode_rate([[0.0, 1.0], [1.0, 2.0]])


async def test_kinds_of_adapters_are_measured_in_turns(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--device", "cpu", "--num-blocks", "128", "--work", str(tmp_path)]
    options += ["--distinct", "2", "--requests", "1,3", "--prompt", "5", "--output", "5"]
    report = Report(tmp_path / "lines.jsonl")
    await run_kinds(parse_kinds_args([*options, "--rounds", "1"]), report)
    lines = report.lines()
    rates = [line for line in lines if line.get("part") == "rate"]
    assert len(rates) == 2 * len(make_variants(2))
    assert all(len(line["rounds"]) == 1 for line in rates)  # type: ignore[arg-type]
    assert [line["adapter_copies"] for line in lines if line.get("part") == "ratios"] == [0, 0]
    assert isinstance(lines[-1]["pass"], bool)


@pytest.mark.parametrize(("kind", "num_affine"), [("plain", 0), ("dora", 1), ("bias", 2)])
def test_random_adapters_of_a_kind_have_its_vectors(
    kind: AdapterKind, num_affine: int, tmp_path: Path
) -> None:
    config = read_model_config(SHAPES["tiny"].write_config(tmp_path))
    spec = AdapterSpec(4, 1, "q", kind=kind)
    adapter = AdapterNumbers(config, 4, torch.device("cpu")).adapter(spec)
    affine = adapter.modules["model.layers.0.self_attn.q_proj"].affine
    assert (0 if affine is None else len(affine)) == num_affine
    assert tensor_bytes(config, spec, 2) == 2 * adapter.num_parameters


async def test_an_aloras_prompt_is_found_and_a_plain_adapters_is_not(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--device", "cpu", "--num-blocks", "256", "--work", str(tmp_path)]
    report = Report(tmp_path / "lines.jsonl")
    await run_alora(parse_alora_args([*options, "--prompt", "64", "--rounds", "2"]), report)
    lines = {line.get("variant"): line for line in report.lines()}
    assert lines["alora"]["cached_tokens"] == lines["alora_second"]["cached_tokens"] == 64
    assert lines["plain"]["cached_tokens"] == lines["base_cold"]["cached_tokens"] == 0
    assert len(lines["alora"]["rounds_ms"]) == 2  # type: ignore[arg-type]


def test_a_variant_that_finds_other_blocks_than_it_should_ends_the_benchmark() -> None:
    check_cached({"base_cold": 0, "plain": 0, "alora": 64}, 70, 16)
    with pytest.raises(RuntimeError, match="plain found 64 cached"):
        check_cached({"plain": 64}, 70, 16)
    with pytest.raises(RuntimeError, match="alora found 48 cached"):
        check_cached({"alora": 48}, 70, 16)
