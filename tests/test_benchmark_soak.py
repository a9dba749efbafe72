"""A short soak passes, and each promise of it can be broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.blocks import BlockPool
from engine.types import EngineLoad, Request, Resident, SamplingParams, TokenOutput
from tests.benchmarks.grammar_tokenizer import write_tokenizer
from tests.benchmarks.report import Report
from tests.benchmarks.shapes import ALL_LINEARS, SHAPES
from tests.benchmarks.soak import parse_args, soak
from tests.benchmarks.soak_clients import Answer, Mix, odd_adapters
from tests.benchmarks.soak_grammars import EXPRESSIONS, AnswerTexts
from tests.benchmarks.soak_judge import Evidence, MemorySample, broken_promises, window_of

pytestmark = pytest.mark.slow

MIB = 1024**2
SHORT = "--shape tiny --device cpu --seconds 1.5 --calibration 1 --longest 16 --seqs 8"


def resident(num_references: int) -> Resident:
    values: dict[str, Any] = {field.name: 0 for field in fields(Resident)}
    return Resident(**(values | {"digest": "a", "num_references": num_references}))


def evidence(**changes: object) -> Evidence:
    clean = Evidence(
        errors=(),
        load=EngineLoad(num_blocks=8, num_free_blocks=8),
        residents=(resident(0),),
        changed_probes=0,
        num_probes=4,
        samples=tuple(MemorySample(float(s), 100 * MIB, 0) for s in range(300)),
        window_s=60.0,
        slack_bytes=MIB,
    )
    return replace(clean, **changes)  # type: ignore[arg-type]


def test_an_engine_that_kept_every_promise_is_not_accused() -> None:
    assert broken_promises(evidence()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"errors": ("soak-1: lost",)}, "1 requests failed: soak-1: lost"),
        ({"load": EngineLoad(num_blocks=8, num_free_blocks=7)}, "1 KV blocks are held"),
        ({"load": EngineLoad(num_running=1)}, "1 sequences run and 0 wait"),
        ({"load": EngineLoad(num_waiting=2)}, "0 sequences run and 2 wait"),
        ({"load": EngineLoad(num_missed_wakeups=1)}, "the engine slept beside its work 1 times"),
        (
            {"residents": (resident(1),)},
            "1 adapters are referenced: a",
        ),
        ({"changed_probes": 1}, "1 of 4 answers have changed"),
        (
            {"samples": tuple(MemorySample(float(s), (100 + s) * MIB, 0) for s in range(300))},
            "the memory has grown by 239.0 MiB",
        ),
    ],
)
def test_each_broken_promise_is_named(changes: dict[str, object], words: str) -> None:
    assert broken_promises(evidence(**changes)) == [words]


def test_memory_of_the_first_minute_alone_is_no_growth() -> None:
    samples = [MemorySample(float(s), min(s, 60) * MIB, 0) for s in range(300)]
    assert broken_promises(evidence(samples=tuple(samples))) == []
    assert window_of(600) == 60
    assert window_of(20) == 5


def test_adapters_have_odd_forms() -> None:
    specs = odd_adapters(150, 64, 0)
    assert len({spec.digest for spec in specs}) == 150
    assert (specs[0].rank, specs[0].targets) == (64, ALL_LINEARS)
    assert min(spec.rank for spec in specs) == 1
    assert len({spec.rank for spec in specs}) > 20
    assert len({spec.targets for spec in specs}) > 50
    assert {spec.every for spec in specs} == {1, 2, 3}


def test_requests_use_every_sampling_setting() -> None:
    mix = Mix(["a", "b"], 1024, 64, 0, constrained=0.2)
    requests = [mix.next() for _ in range(300)]
    for name in SamplingParams.__dataclass_fields__:
        assert len({getattr(request.params, name) for request in requests}) > 1, name
    assert {request.adapter for request in requests} == {None, "a", "b"}
    starts = [request.prompt_token_ids[:8] for request in requests]
    assert len(set(starts)) < 250  # shared prefixes


def test_the_same_probes_have_another_salt() -> None:
    mix = Mix(["a", "b"], 1024, 64, 0)
    before, after = mix.probes("before", 2), mix.probes("after", 2)
    assert [(r.prompt_token_ids, r.params, r.adapter) for r in before] == [
        (r.prompt_token_ids, r.params, r.adapter) for r in after
    ]
    assert {r.cache_salt for r in before}.isdisjoint(r.cache_salt for r in after)


def whole() -> list[TokenOutput]:
    return [
        TokenOutput("r", 0, 0, (5,)),
        TokenOutput("r", 0, 1, (6, 7), finish_reason="length"),
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda outputs: outputs, None),
        (lambda outputs: outputs[:1], "the stream ended without a last output"),
        (lambda outputs: outputs[1:], "1 outputs out of order"),
        (
            lambda outputs: [replace(outputs[0], finish_reason="error", error="boom")],
            "it ended with error: boom",
        ),
        (
            lambda outputs: [outputs[0], replace(outputs[1], token_ids=(6,))],
            "2 tokens, asked for 3 to 3",
        ),
    ],
)
def test_a_faulty_answer_is_noticed(
    change: Callable[[list[TokenOutput]], list[TokenOutput]], fault: str | None
) -> None:
    answer = Answer(Request("r", (1, 2), SamplingParams(max_tokens=3)))
    for output in change(whole()):
        answer.add(output)
    assert next(answer.faults(), None) == fault


def test_an_answer_that_is_not_of_its_grammar_is_noticed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, SHAPES["tiny"])
    tokenizer, texts = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), AnswerTexts(tmp_path)
    by_kind = {grammar.kind: grammar for grammar in EXPRESSIONS}
    answers = {
        "regex": "ab-c-07",
        "lark": "a choice of several words",
        "json_schema": '{"kind": "small", "count": 7, "names": ["a", "bcd"], "is_new": true}',
    }
    for kind, text in answers.items():
        params = SamplingParams(max_tokens=99, grammar=by_kind[kind])
        for end, stop_id, shown, is_valid in (
            ("stop", None, text, True),
            ("stop", None, text[:-1], False),
            ("stop", None, text + "x", False),
            ("stop", 99, text[:-1] + "x", True),
            ("length", None, text[:-2], True),
            ("length", None, text[:2] + "?", False),
        ):
            ids = tuple(tokenizer.encode(shown).ids)
            limit = len(ids) if end == "length" else 99
            answer = Answer(Request("r", (1,), replace(params, max_tokens=limit)), texts)
            answer.add(TokenOutput("r", 0, 0, ids, finish_reason=end, stop_token_id=stop_id))
            faults = [fault for fault in answer.faults() if "of its grammar" in fault]
            assert (not faults) is is_valid, (shown, faults)


async def test_a_short_soak_leaves_nothing_over(tmp_path: Path) -> None:
    report = Report(tmp_path / "soak.jsonl")
    args = parse_args([*SHORT.split(), "--adapters", "8", "--probed", "1", "--work", str(tmp_path)])
    assert await soak(args, report), report.lines()[-1]
    assert report.lines()[-1]["requests"]
    assert report.lines()[-1]["valid"]


async def test_a_block_that_is_not_given_back_fails_the_soak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, calls = BlockPool.release, iter(range(10**9))

    def forget_one(pool: BlockPool, blocks: list[int]) -> None:
        release(pool, blocks[1:] if next(calls) == 10 else blocks)

    monkeypatch.setattr(BlockPool, "release", forget_one)
    report = Report(tmp_path / "soak.jsonl")
    args = parse_args([*SHORT.split(), "--adapters", "4", "--probed", "1", "--work", str(tmp_path)])
    assert not await soak(args, report)
    assert report.lines()[-1]["broken"] == ["1 KV blocks are held"]
