"""The most prompt tokens of a step in which other sequences decode.

Every sequence that decodes in a step waits for the whole step. Prompt tokens are limited so that
the step lasts at most `max_decode_slowdown` times as long as a step that only decodes. Steps
without decoding sequences have the whole `max_num_batched_tokens`. As the stall-free batching of
Sarathi-Serve (arXiv 2403.02310), with a budget that follows the measured cost of steps.

    an H200, Llama-3-8B shape, 256 sequences: a step that decodes lasts 10 ms, with 2048 prompt
    tokens 50 ms, with 8192 182 ms, with the bound 24 to 33 ms

Let m be `max_decode_slowdown`. Where the bound applies, prompts have the share 1 - 1/m of a step:
a first token comes at most about m / (m - 1) times as late as without decoding sequences, and
prompts never starve. Four things raise the bound: prompts that queue beside few decoding sequences
and a queue of many seconds, because small steps share the read of the weights among few tokens;
prompts that queue where decodes are so fast that nobody notices a longer step; and steps that would
be no shorter with fewer tokens, because the host needs as long to launch them.
Where steps with prompts follow each other from a process's beginning, one without them comes in
between and is measured: all of them are compared with it.

    two H200s, FP8, 256 sequences, 32 adapters: a step that decodes lasts 8 ms, and 16 ms with any
    number of prompt tokens up to 768: the bound alone leaves prompts 128 tokens a step

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import EngineConfig
from engine.step_cost import TILE, StepCost
from engine.types import Sequence

# Tokens of a step, with decoding sequences: multiples of the tile of large matrix products, from
# 1,024 on coarser, as `mixed_graphs.SIZES` are. On an H200 steps of 384, 448, 512 and 1,024
# tokens last 13, 18, 14 and 25 ms.
_LARGE, _LARGE_TILE = 1024, 256
_UNMEASURED = 512  # tokens of a step while the cost of one is unknown
_GROWTH = 2.0  # times the prompt tokens that were measured
# Smaller parts of a prompt gain nothing: on every device the fixed cost outweighs them.
_LEAST = 64
# Prompts beside a few decoding sequences share the read of the weights with little else: while they
# queue, up to so many seconds of them, steps may last up to so many times as long as that read.
_QUEUE_S, _EFFICIENT = 0.1, 6.0
# Or up to so many seconds: 40 tokens/s are faster than a person reads. In FP8 or over several GPUs,
# where a decode of 256 sequences lasts 5 to 8 ms, the bound alone makes prompts expensive.
_UNNOTICED_S = 0.025
# Beyond so many seconds of queued prompts the bound is relaxed in proportion: steps grow up to
# `max_num_batched_tokens`, so that an engine under more and more prompts loses no throughput.
_PATIENCE_S = 1.5


def prompt_budget(
    config: EngineConfig,
    cost: StepCost,
    num_decoding: int,
    num_sequences: int,
    queued_tokens: int,
) -> int:
    """Returns the most prompt tokens of the next step, in which `num_decoding` sequences decode; 0
    if it is to be measured without prompts.

    `num_sequences`: running and waiting. A burst of requests will decode together, and every
    request's usual gap is then the decode step of all of them: this step is the measure, so that
    the first of a burst do not slow down the rest. `queued_tokens`: of prompts, still to compute.
    """
    most = config.max_num_batched_tokens
    if not num_decoding:
        return most
    room = max(1, most - num_decoding)  # the oldest prompt always gets on
    total = float(_UNMEASURED)
    token_s = cost.added_token_s
    if token_s:
        num_rows = max(num_decoding, min(num_sequences, config.max_num_seqs))
        limit_s = config.max_decode_slowdown * cost.decode_s(num_rows)
        queued_s = queued_tokens * token_s
        queueing_s = max(_EFFICIENT * cost.weights_s, _UNNOTICED_S)
        limit_s = max(limit_s, min(1.0, queued_s / _QUEUE_S) * queueing_s)
        limit_s *= max(1.0, queued_s / _PATIENCE_S)
        room_s = limit_s - cost.decode_s(num_decoding)
        # The first prompt tokens beside few sequences look free: the device waits for the weights.
        known = max(_UNMEASURED, _GROWTH * cost.largest_prompt)
        total = num_decoding + min(room_s / token_s, known)
        total = cost.fitting_tokens(_rounded(total), num_decoding, room_s)
    elif cost.lacks_decode_steps:
        return 0
    else:
        # No step without prompts was measured: the fit overestimates a token, if anything.
        total *= max(1.0, queued_tokens * cost.token_s / _PATIENCE_S)
    return min(room, max(_LEAST, _rounded(total) - num_decoding))


def _rounded(num_tokens: float) -> int:
    """Returns a size near this that a device computes well, smaller rather than larger."""
    if num_tokens < TILE:
        return int(num_tokens)
    if num_tokens < _LARGE + _LARGE_TILE:
        return min(int(num_tokens) // TILE * TILE, _LARGE)
    return int(min(num_tokens, 1 << 30)) // _LARGE_TILE * _LARGE_TILE


def queued_tokens(waiting: Iterable[Sequence], running: Iterable[Sequence]) -> int:
    """Returns the tokens still to prefill."""
    queued = sum(len(sequence.token_ids) for sequence in waiting)
    for sequence in running:
        remaining = len(sequence.token_ids) - sequence.num_scheduled_tokens
        queued += remaining if remaining > 1 or not sequence.num_output_tokens else 0
    return queued
