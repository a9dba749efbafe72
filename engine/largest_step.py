"""The largest step that a configuration allows: its sizes, and a batch that has them, to measure
its memory."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.model_config import ModelConfig
from engine.step_inputs import StepLimits
from engine.types import Request, SamplingParams, ScheduledBatch, ScheduledSequence, Sequence
from kernels.paged_plan import HeadShape

# With the log-probabilities that a client may request: they need memory of their own.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=1, logprobs=20)


def max_step_tokens(config: EngineConfig) -> int:
    """Returns the tokens of the largest step: at least one token of every sequence."""
    return max(config.max_num_batched_tokens, config.max_num_seqs)


def max_draws(config: EngineConfig) -> int:
    """Returns the most tokens that a step draws. With drafts they are no more than without, so that
    logits take no more memory; but one sequence can always have a whole draft."""
    if config.speculation == "off":
        return config.max_num_seqs
    return max(config.max_num_seqs, 1 + config.num_speculative_tokens)


def step_limits(
    config: EngineConfig, model: ModelConfig, max_model_len: int, num_tables: int
) -> StepLimits:
    """`num_tables`: the block tables of a sequence, one per group of layers."""
    return StepLimits(
        config.max_num_seqs,
        max_draws(config),
        max_model_len,
        config.block_size,
        HeadShape(model.num_heads, model.num_kv_heads, model.head_dim),
        config.max_lora_rank,
        num_tables,
        1 if config.speculation == "off" else 1 + config.num_speculative_tokens,
    )


def largest_batch(
    max_tokens: int, max_seqs: int, max_model_len: int, block_size: int
) -> ScheduledBatch:
    """Returns a batch of as many tokens in as many sequences as a step may have. All share the
    entries 0, 1, ... of block tables: the results are discarded."""
    num_seqs = min(max_seqs, max_tokens)
    length = min(max_tokens // num_seqs, max_model_len)
    lengths = [length] * num_seqs
    lengths[-1] = min(max_model_len, max_tokens - length * (num_seqs - 1))
    blocks = list(range(num_blocks(max_tokens, max_model_len, block_size)))
    parts = []
    for i, count in enumerate(lengths):
        request = Request(f"largest-{i}", (0,) * count, _PARAMS)
        sequence = Sequence(request, 0, 0, [0] * count, block_table=blocks, window_table=blocks)
        parts.append(ScheduledSequence(sequence, 0, count, True))
    return ScheduledBatch(tuple(parts))


def num_blocks(max_tokens: int, max_model_len: int, block_size: int) -> int:
    """Returns the number of blocks that `largest_batch` writes to."""
    return -(-min(max_tokens, max_model_len) // block_size)
