"""What a request costs an engine, in units of one prompt token of the base model. Pure.

Measured on one H200 with the shape of Llama 3 8B (tests/benchmarks/results,
2026-11-21-engine-h200.jsonl; n: requests in flight):

- prompts: 16 of 3,900 tokens take 1.483 s of the base, 1.564 s with 16 adapters of rank 16:
  24 us a token, and 5.4 % more with them
- outputs: a step of 256 takes 10.31 ms of the base (on-base-n256), 40 us a token, and 11.99 ms
  with 32 adapters of rank 16 (on-r16x32-n256), 16 % more; with 32 in flight 5.09 and 6.44 ms, 27 %

An output token so costs 1.7 prompt tokens in a full engine; 2, as in Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024), charges half-full ones a part of their 6.7.
"""

from __future__ import annotations

from dataclasses import dataclass

_OUTPUT_TOKEN = 2.0
# Per rank row; an adapter's bytes and products grow with its rank, so a line is right.
_PROMPT_RANK = 0.054 / 16
_OUTPUT_RANK = 0.16 / 16


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Of one token. What the prefix cache saves is nobody's merit: prompts count whole."""

    prompt: float = 1.0
    output: float = _OUTPUT_TOKEN

    def of(self, num_prompt_tokens: float, num_output_tokens: float) -> float:
        return self.prompt * num_prompt_tokens + self.output * num_output_tokens


def price(rank: int) -> TokenCost:
    """`rank`: of the adapter; 0 without one."""
    return TokenCost(1.0 + _PROMPT_RANK * rank, _OUTPUT_TOKEN * (1.0 + _OUTPUT_RANK * rank))
