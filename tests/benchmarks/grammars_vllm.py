"""vLLM on the workload of `grammars`, through its public API, in a process of its own.

The gaps between tokens are not measured here: the offline API returns whole answers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from itertools import cycle

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.sampling_params import StructuredOutputsParams  # type: ignore[import-not-found]

from tests.benchmarks.grammar_tokenizer import GRAMMARS
from tests.benchmarks.report import emit, machine
from tests.benchmarks.vllm_engine import GRAPH_SIZES

WARM_UP_TOKENS = 8


def run(llm: LLM, args: argparse.Namespace, share: float, output: int, salt: int) -> float:
    """Returns the seconds from all prompts to all tokens."""
    draw = random.Random(salt)
    prompts = [
        {"prompt_token_ids": [draw.randrange(300, 1000) for _ in range(args.prompt)]}
        for _ in range(args.requests)
    ]
    free = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    kind = "regex" if args.grammar == "regex" else "json"
    limited = [
        SamplingParams(
            temperature=0.0,
            max_tokens=output,
            detokenize=False,
            structured_outputs=StructuredOutputsParams(**{kind: text}),
        )
        for text in GRAMMARS[args.grammar]
    ]
    turns = cycle(limited)
    chosen = [
        next(turns) if int((i + 1) * share) > int(i * share) else free for i in range(args.requests)
    ]
    start_s = time.perf_counter()
    results = llm.generate(prompts, chosen, use_tqdm=False)
    seconds = time.perf_counter() - start_s
    assert sum(len(r.outputs[0].token_ids) for r in results) == args.requests * output
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--grammar", choices=GRAMMARS, required=True)
    parser.add_argument("--shares", type=json.loads, required=True)
    for name in ("requests", "prompt", "output", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    llm = LLM(
        model=args.model,
        load_format="dummy",
        max_model_len=4096,
        max_num_seqs=args.requests,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": GRAPH_SIZES},
    )
    runs: dict[float, list[float]] = {share: [] for share in args.shares}
    for share in args.shares:
        run(llm, args, share, min(WARM_UP_TOKENS, args.output), salt=-1)
    for number in range(args.repeats):
        for share in args.shares:
            runs[share].append(run(llm, args, share, args.output, salt=number))
    base_s = runs[args.shares[0]]
    for share, seconds in runs.items():
        median_s = statistics.median(seconds)
        ratios = [base / one for base, one in zip(base_s, seconds, strict=True)]
        emit(
            side="vllm",
            requests=args.requests,
            grammar=args.grammar,
            share=share,
            seconds=round(median_s, 4),
            output_tokens_per_s=round(args.requests * args.output / median_s, 1),
            to_base=round(statistics.median(ratios), 3),
            versions=machine("vllm")["versions"],
        )


if __name__ == "__main__":
    main()
