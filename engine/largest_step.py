"""The largest step that a configuration allows: its sizes, and a batch that has them, to measure
its memory."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.model_config import ModelConfig
from engine.step_inputs import StepLimits
from engine.types import SamplingParams, ScheduledBatch
from engine.warm_batches import BatchShape, make_batch
from kernels.paged_plan import HeadShape

# With the log-probabilities that a client may request: they need memory of their own.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=1, logprobs=20)


def step_limits(
    config: EngineConfig, model: ModelConfig, max_model_len: int, num_tables: int
) -> StepLimits:
    """`num_tables`: the block tables of a sequence, one per group of layers."""
    max_draws, max_queries = config.max_num_seqs, 1
    if config.speculation != "off":
        # With drafts no more than without, so that logits take no more memory; but one sequence can
        # always have a whole draft.
        max_queries = 1 + config.num_speculative_tokens
        max_draws = max(max_draws, max_queries)
    return StepLimits(
        max(config.max_num_batched_tokens, config.max_num_seqs),  # a token of every sequence
        config.max_num_seqs,
        max_draws,
        max_model_len,
        config.block_size,
        HeadShape(model.num_heads, model.num_kv_heads, model.head_dim),
        config.max_lora_rank,
        num_tables,
        max_queries,
    )


def largest_batch(limits: StepLimits) -> ScheduledBatch:
    """Returns a batch of as many tokens in as many sequences as a step may have."""
    most, num_seqs = limits.max_model_len, min(limits.max_seqs, limits.max_tokens)
    length = min(limits.max_tokens // num_seqs, most)
    last = min(most, limits.max_tokens - length * (num_seqs - 1))
    shape = BatchShape(0, (length,) * (num_seqs - 1) + (last,))
    return make_batch(shape, (None,), limits, num_blocks(limits), _PARAMS)


def num_blocks(limits: StepLimits) -> int:
    """Returns the number of blocks that `largest_batch` writes to."""
    return -(-min(limits.max_tokens, limits.max_model_len) // limits.block_size)
