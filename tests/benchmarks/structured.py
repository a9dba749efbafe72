"""Answers of a random base to random schemas: every ended answer validates with jsonschema.

    python -m tests.benchmarks.structured [--first 0] [--schemas 1000] [--seeds 20] [--out FILE]

A random base is the hardest adversary of a grammar: it writes whatever the mask allows. A wrong
answer is printed with its schema, the run goes on, and the exit code is 1. The report has the steps
per token as well, with the tokens that grammars force. `--first` is the number of the first schema:
the schemas are the same in every run, so that parts of them can run apart.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema

from engine.core import Engine
from engine.types import Request, SamplingParams
from tests.benchmarks.report import Report
from tests.engine_helpers import BLOCK_SIZE, make_base, make_runner, random_prompt
from tests.fakes import make_config
from tests.grammar_helpers import EOS, VOCAB, grammars, random_schema, schema_grammar, text

_EVERY = 1000  # answers between two lines of progress
_AT_ONCE = 64
_MAX_TOKENS = 900


def run(first: int, schemas: int, seeds: int, report: Report) -> bool:
    """Returns True if no ended answer was wrong."""
    report.emit_machine("structured", first=first, schemas=schemas, seeds=seeds)
    counts: Counter[str] = Counter()
    started_s = time.perf_counter()
    with TemporaryDirectory() as folder:
        base = make_base(
            Path(folder),
            vocab_size=VOCAB,
            eos_token_id=EOS,
            num_hidden_layers=1,
            max_position_embeddings=1024,
        )
        runner = make_runner(base, num_blocks=16384)
    settings = make_config(
        block_size=BLOCK_SIZE, max_num_batched_tokens=2048, max_num_seqs=_AT_ONCE
    )
    engine = Engine(settings, runner, grammars=grammars())
    waiting = _requests(first, schemas, seeds)
    running: dict[str, tuple[dict[str, object], list[int]]] = {}
    is_over = False
    while not is_over or running:
        while not is_over and len(running) < 2 * _AT_ONCE:
            following = next(waiting, None)
            is_over = following is None
            if following is not None:
                engine.add_request(following[0])
                running[following[0].request_id] = following[1], []
        for output in engine.step().outputs:
            schema, token_ids = running[output.request_id]
            token_ids += output.token_ids
            counts["outputs"] += 1
            if output.finish_reason is None:
                continue
            del running[output.request_id]
            counts["answers"] += 1
            counts["tokens"] += len(token_ids)
            counts[output.finish_reason] += 1
            if output.finish_reason == "error":
                report.emit(wrong=output.error, schema=schema)
            elif output.finish_reason == "stop" and not _is_valid(token_ids, schema):
                counts["wrong"] += 1
                report.emit(wrong=text(token_ids), schema=schema)
            if counts["answers"] % _EVERY == 0:
                report.emit(**counts, seconds=round(time.perf_counter() - started_s, 1))
    is_right = not counts["wrong"] and not counts["error"]
    seconds = round(time.perf_counter() - started_s, 1)
    report.emit(
        benchmark="structured", first=first, **counts, seconds=seconds, **{"pass": is_right}
    )
    return is_right


def _requests(first: int, schemas: int, seeds: int) -> Iterator[tuple[Request, dict[str, object]]]:
    generator = random.Random(0)
    params = SamplingParams(max_tokens=_MAX_TOKENS)
    for number in range(first + schemas):
        schema = random_schema(generator, generator.randint(1, 3))
        if number < first:
            continue
        grammar = schema_grammar(schema)
        for seed in range(seeds):
            own = replace(params, grammar=grammar, seed=seed, temperature=float(seed % 3))
            prompt = tuple(random_prompt(5, seed))
            yield Request(f"{number}-{seed}", prompt, own), schema


def _is_valid(token_ids: list[int], schema: dict[str, object]) -> bool:
    try:
        jsonschema.validate(json.loads(text([t for t in token_ids if t != EOS])), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    return int(not run(arguments.first, arguments.schemas, arguments.seeds, Report(arguments.out)))


if __name__ == "__main__":
    raise SystemExit(main())
