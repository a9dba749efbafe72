"""Our engine's greedy answers beside those of Hugging Face + PEFT that `agreement_oracle` wrote.

The demo's base and adapters, all requests at once (adapters mixed in every step), then one at a
time. fp32 must give every token. For bfloat16 the share of equal tokens and answers is reported,
and of each answer that departs where it does: by how much the oracle's logit of our token lies
below its own choice. Needs no tokenizer.

    python -m tests.benchmarks.agreement --expected FILE --base FOLDER --adapters FOLDER
        [--dtype float32] [--device cuda] [--eager]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from engine.config import EngineConfig
from engine.core import Engine
from engine.runner import ModelRunner
from engine.types import Request, SamplingParams
from tests.benchmarks.report import Report, spread

ADAPTERS = ("pirate", "sql", "extract")
MAX_NUM_SEQS = 100


@dataclass(frozen=True, slots=True)
class NextBest:
    token_id: int
    gap: float  # logits, below the best


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    next_best: tuple[tuple[NextBest, ...], ...]  # at each token, the nearest first


Expected = tuple[str | None, tuple[int, ...], Answer]  # adapter, prompt


@dataclass(frozen=True, slots=True)
class Departure:
    """The first token of an answer that is not the oracle's; those after it mean nothing."""

    request: int
    position: int
    gap: float | None  # None: not even among the oracle's next best


def write_answers(path: Path, expected: Sequence[Expected]) -> None:
    lines = [
        json.dumps(
            {
                "adapter": adapter,
                "prompt": prompt,
                "tokens": answer.tokens,
                "next_best": [
                    list(chain(*((n.token_id, n.gap) for n in near))) for near in answer.next_best
                ],
            },
            separators=(",", ":"),
        )
        for adapter, prompt, answer in expected
    ]
    path.write_text("\n".join(lines) + "\n")


def read_answers(path: Path) -> list[Expected]:
    found: list[Expected] = []
    for line in map(json.loads, path.read_text().splitlines()):
        next_best = tuple(
            tuple(NextBest(*pair) for pair in zip(near[::2], near[1::2], strict=True))
            for near in line["next_best"]
        )
        answer = Answer(tuple(line["tokens"]), next_best)
        found.append((line["adapter"], tuple(line["prompt"]), answer))
    return found


def departures(
    expected: Sequence[Expected], found: Sequence[tuple[int, ...]]
) -> tuple[Departure, ...]:
    departed = []
    for request, ((_, _, answer), tokens) in enumerate(zip(expected, found, strict=True)):
        assert len(tokens) == len(answer.tokens), (request, len(tokens))
        pairs = zip(answer.tokens, tokens, strict=True)
        position = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
        if position is not None:
            gaps = {near.token_id: near.gap for near in answer.next_best[position]}
            departed.append(Departure(request, position, gaps.get(tokens[position])))
    return tuple(departed)


def run(engine: Engine, expected: Sequence[Expected], tag: str) -> list[tuple[int, ...]]:
    """All at once."""
    for i, (adapter, prompt, answer) in enumerate(expected):
        params = SamplingParams(max_tokens=len(answer.tokens), temperature=0.0, ignore_eos=True)
        engine.add_request(Request(f"{tag}{i}", prompt, params, adapter, cache_salt=tag))
    tokens: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None, output
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
    return [tokens[f"{tag}{i}"] for i in range(len(expected))]


def figures(
    expected: Sequence[Expected], found: Sequence[tuple[int, ...]], seconds: float
) -> dict[str, object]:
    departed = departures(expected, found)
    lengths = [len(answer.tokens) for _, _, answer in expected]
    same = [
        theirs == ours
        for (_, _, answer), tokens in zip(expected, found, strict=True)
        for theirs, ours in zip(answer.tokens, tokens, strict=True)
    ]
    before = sum(lengths) - sum(lengths[d.request] - d.position for d in departed)
    gaps = [d.gap for d in departed if d.gap is not None]
    return {
        "requests": len(expected),
        "tokens": sum(lengths),
        "equal_answers": len(expected) - len(departed),
        "equal_tokens": sum(same),
        "tokens_before_a_departure": before,
        "gap_at_departure": spread(gaps) if gaps else None,
        "departed_beyond_next_best": len(departed) - len(gaps),
        "departures": [[d.request, d.position, d.gap] for d in departed],
        "seconds": round(seconds, 2),
    }


def timed(
    report: Report, engine: Engine, expected: Sequence[Expected], groups: Sequence[list[Expected]]
) -> list[tuple[int, ...]]:
    """One group after the other."""
    started_s = time.perf_counter()
    found = [
        tokens
        for i, group in enumerate(groups)
        for tokens in run(engine, group, f"{len(groups)} {i} ")
    ]
    seconds = time.perf_counter() - started_s
    report.emit(at_a_time=len(groups[0]), **figures(expected, found, seconds))
    return found


def open_engine(
    base: Path, adapters: Path, dtype: str, device: str, is_eager: bool, max_len: int
) -> Engine:
    config = EngineConfig(
        model_path=str(base),
        base_digest="agreement",
        device="cuda" if device == "cuda" else "cpu",
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        max_model_len=max_len,
        max_num_seqs=MAX_NUM_SEQS,
        num_blocks=MAX_NUM_SEQS * -(-max_len // 16),
        max_num_batched_tokens=2048,
        adapter_pool_bytes=64 * 1024**2,
        enforce_eager=is_eager,
    )
    runner = ModelRunner(config)
    for name in ADAPTERS:
        runner.load_adapter(name, adapters / name)
    return Engine(config, runner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expected", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report = Report(arguments.out)
    started_s = time.perf_counter()
    expected = read_answers(arguments.expected)
    max_len = max(len(prompt) + len(answer.tokens) for _, prompt, answer in expected)
    engine = open_engine(
        arguments.base,
        arguments.adapters,
        arguments.dtype,
        arguments.device,
        arguments.eager,
        max_len,
    )
    report.emit_machine(
        "agreement",
        dtype=arguments.dtype,
        device=arguments.device,
        eager=arguments.eager,
        start_s=round(time.perf_counter() - started_s, 1),
    )
    together = timed(report, engine, expected, [expected])
    alone = timed(report, engine, expected, [[one] for one in expected])
    is_equal = not departures(expected, together) and not departures(expected, alone)
    report.emit(
        benchmark="agreement",
        dtype=arguments.dtype,
        equal_together_and_alone=sum(a == b for a, b in zip(together, alone, strict=True)),
        **({"pass": is_equal} if arguments.dtype == "float32" else {}),
    )


if __name__ == "__main__":
    main()
