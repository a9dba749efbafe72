"""The histograms of an engine, with vLLM's names and buckets, and the class that counts them.

A plain list and one bisection per value: 0.12 us in the process that runs the steps, compared with
0.62 us of a prometheus_client histogram.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# fmt: off
SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
GAP_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)
TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000,
    200_000,
)
# fmt: on

# name -> (documentation, buckets)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("Arrival to first token", SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two outputs of one choice", GAP_SECONDS),
    "vllm:time_per_output_token_seconds": ("Old name of inter_token_latency_seconds", GAP_SECONDS),
    "vllm:e2e_request_latency_seconds": ("Arrival to last token", REQUEST_SECONDS),
    "vllm:request_queue_time_seconds": ("Arrival at the front to the engine", REQUEST_SECONDS),
    "vllm:request_prefill_time_seconds": ("Engine admission to first token", REQUEST_SECONDS),
    "vllm:request_decode_time_seconds": ("First token to last", REQUEST_SECONDS),
    "vllm:request_inference_time_seconds": ("Engine admission to last token", REQUEST_SECONDS),
    "vllm:request_prompt_tokens": ("Prompt length", TOKENS),
    "vllm:request_generation_tokens": ("Generated, all choices", TOKENS),
    "vllm:request_max_num_generation_tokens": ("Generated, longest choice", TOKENS),
    "vllm:request_params_n": ("Choices asked for", (1, 2, 5, 10, 20)),
    "vllm:request_params_max_tokens": ("max_tokens asked for", TOKENS),
    "vllm:iteration_tokens_total": ("Tokens a step gave", TOKENS),
}
ALIASES = {"vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds"}


@dataclass(slots=True)
class Histogram:
    buckets: tuple[float, ...]  # upper bounds, inclusive
    total: float = 0.0  # sum of the observed values
    counts: list[int] = field(default_factory=list)  # per bucket, and of the values above them

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.buckets) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    @property
    def bounds(self) -> tuple[str, ...]:
        """The buckets' values of the label `le`."""
        return (*(str(float(bound)) for bound in self.buckets), "+Inf")
