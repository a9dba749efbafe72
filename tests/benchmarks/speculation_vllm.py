"""vLLM on the demo's rounds of `speculation`, through its public API, in a process of its own.

One engine, with or without n-gram speculation, runs every round of the file and prints a line for
each. Drafts of n-grams come from the request's own prompt and output alone. Adapters are as many as
its slots. The counters of its drafts need its statistics, which both engines therefore keep. The
answers go to a file of their own, for the comparison with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

from tests.benchmarks.report import emit, machine

_DRAFTED = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def open_vllm(args: argparse.Namespace, num_adapters: int) -> LLM:
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": args.draft_tokens,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    return LLM(
        model=str(args.model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=256,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=num_adapters,
        max_lora_rank=16,
        speculative_config=ngram if args.ngram else None,
        disable_log_stats=False,
    )


def run(
    llm: LLM,
    requests: Sequence[Mapping[str, Any]],
    adapters: Mapping[str, LoRARequest],
    stop_token_ids: list[int],
    concurrency: int,
) -> dict[str, list[int]]:
    """Steps until all requests have ended, with so many of them at a time. Returns their answers,
    with the token that ended each, as ours are."""
    engine = llm.llm_engine
    waiting, num_open = list(reversed(requests)), 0
    answers: dict[str, list[int]] = {}
    while waiting or engine.has_unfinished_requests():
        while waiting and num_open < concurrency:
            request = waiting.pop()
            adapter = request["adapter"]
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                stop_token_ids=stop_token_ids,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(
                request["id"],
                {"prompt_token_ids": request["prompt"]},
                sampling,
                lora_request=None if adapter is None else adapters[adapter],
            )
            num_open += 1
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
                num_open -= 1
    return answers


def counters(llm: LLM) -> tuple[int, int]:
    """Returns the tokens of drafts so far, and of these the accepted; 0 without speculation, which
    has no such counters."""
    found = {_DRAFTED: 0, _ACCEPTED: 0}
    for metric in llm.get_metrics():
        if metric.name in found:
            found[metric.name] += metric.value
    return found[_DRAFTED], found[_ACCEPTED]


def measure(
    llm: LLM, case: Mapping[str, Any], adapters: Mapping[str, LoRARequest], args: argparse.Namespace
) -> None:
    for number, requests in enumerate(case["rounds"]):
        before = counters(llm)
        began_s = time.perf_counter()
        answers = run(llm, requests, adapters, args.stop_token_ids, case["concurrency"])
        seconds = time.perf_counter() - began_s
        drafted, accepted = (new - old for new, old in zip(counters(llm), before, strict=True))
        assert len(answers) == len(requests)
        num_tokens = sum(map(len, answers.values()))
        place = {key: case[key] for key in ("workload", "concurrency")} | {"round": number}
        # Before the line, so that its reader finds them, also if this process is ended in between.
        with args.answers.open("a") as file:
            file.write(json.dumps({**place, "answers": answers}) + "\n")
        emit(
            side="vllm",
            speculation="ngram" if args.ngram else "off",
            **place,
            output_tokens=num_tokens,
            seconds=round(seconds, 4),
            tokens_per_s=round(num_tokens / seconds, 1),
            draft_tokens=drafted,
            accepted_tokens=accepted,
            acceptance=round(accepted / drafted, 3) if drafted else None,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the base")
    parser.add_argument("--adapters", type=Path, required=True, help="folder of their folders")
    parser.add_argument(
        "--rounds", type=Path, required=True, help="file (speculation_sides.cases_as_json)"
    )
    parser.add_argument("--answers", type=Path, required=True, help="file that gets the answers")
    parser.add_argument("--ngram", type=int, choices=[0, 1], required=True)
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--stop-token-ids", type=json.loads, required=True, help="JSON list")
    args = parser.parse_args()
    cases = json.loads(args.rounds.read_text())
    names = sorted(folder.name for folder in args.adapters.iterdir() if folder.is_dir())
    adapters = {
        name: LoRARequest(name, number, str(args.adapters / name))
        for number, name in enumerate(names, start=1)
    }
    began_s = time.perf_counter()
    llm = open_vllm(args, len(names))
    emit(
        side="vllm",
        speculation="ngram" if args.ngram else "off",
        start_s=round(time.perf_counter() - began_s, 1),
        versions=machine("vllm")["versions"],
    )
    for case in cases:
        measure(llm, case, adapters, args)


if __name__ == "__main__":
    main()
