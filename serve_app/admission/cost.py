"""The cost of a request for an engine, in units of one prompt token of the base model. Pure.

Measured on one H200 with the shape of Llama 3 8B (tests/benchmarks/results,
2026-11-21-engine-h200.jsonl; n: requests in flight):

- prompts: 16 of 3,900 tokens need 1.483 s on the base, 1.564 s with 16 adapters of rank 16:
  24 us per token, and 5.4 % more with adapters
- outputs: a step of 256 sequences lasts 10.31 ms on the base (on-base-n256), 40 us per token, and
  11.99 ms with 32 adapters of rank 16 (on-r16x32-n256), 16 % more; with 32 in flight 5.09 and
  6.44 ms, 27 %

In a full engine an output token therefore costs 1.7 prompt tokens. The factor 2, as in Sheng et
al., "Fairness in Serving Large Language Models" (OSDI 2024), charges half-full engines a part of
their 6.7. The bytes and products of an adapter grow linearly with its rank.
"""

from __future__ import annotations

from engine.types import OUTPUT_RANK, OUTPUT_TOKEN, PROMPT_RANK


def token_cost(
    rank: int, num_prompt_tokens: float, num_output_tokens: float, num_base_tokens: int = 0
) -> float:
    """The cost of so many tokens. Prompts are charged in full, cached or not. `rank`: the
    adapter's rank, 0 for the base model. `num_base_tokens`: the tokens of the prompts before an
    aLoRA's invocation, which the base computes."""
    adapted = PROMPT_RANK * rank * (num_prompt_tokens - num_base_tokens)
    output = OUTPUT_TOKEN * (1.0 + OUTPUT_RANK * rank)
    return num_prompt_tokens + adapted + output * num_output_tokens
