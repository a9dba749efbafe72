"""The share of a step's time that each of its sequences is charged: by its tokens and the rank of
its adapter. The shares of a step sum to its time. Pure.

The weights are those of a token's cost in a full engine, measured on one H200 with the shape of
Llama 3 8B (see `serve_app.admission.cost`): an output token costs as much as two prompt tokens of
the base, and an adapter adds to both in proportion to its rank. 256 rows need 22 us.
"""

from __future__ import annotations

from engine.types import PROMPT_RANK, ScheduledBatch, ScheduledSequence


def charge_step(batch: ScheduledBatch, seconds: float) -> None:
    """Adds each sequence's share of `seconds` to its `engine_s`, which its next output reports."""
    weights = [
        item.sequence.output_weight if item.end - item.start == 1 else _weight(item)
        for item in batch.sequences
    ]
    if weights:
        unit_s = seconds / sum(weights)
        for item, weight in zip(batch.sequences, weights, strict=True):
            item.sequence.engine_s += weight * unit_s


def _weight(item: ScheduledSequence) -> float:
    """Returns the weight of a part of a prompt, or of a decode with a draft, whose tokens weigh as
    those of a prompt; an adapter counts where it is active."""
    request = item.sequence.request
    token_weight = PROMPT_RANK * request.adapter_rank
    if item.draft and item.known_end - item.start == 1:
        return item.sequence.output_weight + len(item.draft) * (1.0 + token_weight)
    num_active = item.end - max(item.start, request.active_from or 0)
    num_tokens = item.end - item.start
    return num_tokens + token_weight * max(0, num_active)
