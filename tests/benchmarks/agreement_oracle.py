"""The answers of Hugging Face + PEFT to 100 prompts: the file that `agreement` compares with.

Greedy, fp32 on the CPU, one prompt at a time, the demo's base and three of its adapters, past any
end-of-text. Beside each token stand the next best ones and how far their logits lie below: a
device that rounds differently may differ where that is little, and nowhere else.

    python -m tests.benchmarks.agreement_oracle --write FILE [--prompts 100] [--tokens 32]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from notebooks.demo_adapters import extract, pirate, sql
from serve_app.cli.demo.prepare import ADAPTERS_DIR, convert_base
from serve_app.config import default_home
from tests.benchmarks.agreement import ADAPTERS, Answer, NextBest, write_answers
from tests.benchmarks.workload import make_jobs
from tests.hf_reference import HuggingFaceReference

TARGETS: tuple[str | None, ...] = (None, *ADAPTERS)
SEED = 41
NUM_NEXT_BEST = 2


def make_prompts(oracle: HuggingFaceReference, count: int) -> list[tuple[str | None, list[int]]]:
    """The targets in turn. Most get prompts of their task, every fifth one what another was made
    for; every tenth is bare text without a chat template; from 1 to 133 tokens."""
    texts = {
        None: [job.text for job in make_jobs((None,), count, seed=SEED)],
        "extract": [example.prompt for example in extract.held_out_examples(SEED, count)],
        "sql": [example.prompt for example in sql.held_out_examples(SEED, count)],
        "pirate": [example.prompt for example in pirate.held_out_questions(SEED, 40)],
    }
    prompts: list[tuple[str | None, list[int]]] = []
    for i in range(count):
        target = TARGETS[i % len(TARGETS)]
        of_target = texts[TARGETS[(i + 1) % len(TARGETS)] if i % 5 == 4 else target]
        text = of_target[i % len(of_target)]
        if i % 10 == 3:
            ids = oracle.prompt_ids(text[: 4 + i])
        else:
            ids = oracle.chat_ids([{"role": "user", "content": text}])
        prompts.append((target, ids))
    return prompts


def answer(oracle: HuggingFaceReference, prompt: Sequence[int], num_tokens: int) -> Answer:
    """Returns the answer of the adapter that is set, with the model's own KV cache."""
    tokens: list[int] = []
    next_best: list[tuple[NextBest, ...]] = []
    cache = None
    inputs = torch.tensor([list(prompt)])
    while len(tokens) < num_tokens:
        out = oracle.model(inputs, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        values, ids = out.logits[0, -1].topk(1 + NUM_NEXT_BEST)
        tokens.append(int(ids[0]))
        gaps = (values[0] - values[1:]).tolist()
        next_best.append(
            tuple(
                NextBest(int(i), float(f"{gap:.4g}")) for i, gap in zip(ids[1:], gaps, strict=True)
            )
        )
        inputs = ids[:1].view(1, 1)
    return Answer(tuple(tokens), tuple(next_best))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    adapters = {name: ADAPTERS_DIR / name for name in ADAPTERS}
    oracle = HuggingFaceReference(convert_base(default_home()), adapters)
    prompts = make_prompts(oracle, arguments.prompts)
    answers: dict[int, Answer] = {}
    with torch.inference_mode():
        for target in ADAPTERS:
            oracle.model.set_adapter(target)
            for i, (owner, prompt) in enumerate(prompts):
                if owner == target:
                    answers[i] = answer(oracle, prompt, arguments.tokens)
        with oracle.model.disable_adapter():
            for i, (owner, prompt) in enumerate(prompts):
                if owner is None:
                    answers[i] = answer(oracle, prompt, arguments.tokens)
    write_answers(
        arguments.write,
        [(owner, tuple(prompt), answers[i]) for i, (owner, prompt) in enumerate(prompts)],
    )


if __name__ == "__main__":
    main()
