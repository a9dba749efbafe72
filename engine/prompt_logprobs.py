"""Log-probabilities of prompt tokens: the logits of many rows, computed some rows at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.inputs import ForwardInputs, num_prompt_logprobs
from engine.model import Model
from engine.sampler import finite_rows, token_logprobs
from engine.types import Sample, ScheduledBatch, TokenLogprobs
from lora.pool import AdapterPool

_ROWS = 128  # prompt rows whose logits exist at a time: 25 MB for a vocabulary of 49152


def with_prompt_logprobs(
    batch: ScheduledBatch,
    samples: Sequence[Sample],
    inputs: ForwardInputs,
    hidden: torch.Tensor,  # [rows whose logits are requested, H]
    model: Model,
    pool: AdapterPool,
) -> tuple[Sample, ...]:
    """Returns the samples, completed for the sequences that request them. A sequence whose prompt
    logits are not finite gives no token either: the same weights and KV produced both."""
    completed: list[Sample] = []
    first = inputs.num_samples
    for part, sample in zip(batch.sequences, samples, strict=True):
        count = num_prompt_logprobs(part)
        if count == 0:
            completed.append(sample)
            continue
        tokens = part.sequence.token_ids[part.start + 1 : part.start + 1 + count]
        limit = part.sequence.request.params.prompt_logprobs or 0
        found = _of_rows(inputs, hidden, first, tokens, limit, model, pool)
        first += count
        completed.append(
            Sample(None, is_finite=False)
            if found is None
            else Sample(sample.token_id, sample.logprobs, found, sample.is_finite)
        )
    return tuple(completed)


def _of_rows(
    inputs: ForwardInputs,
    hidden: torch.Tensor,
    first: int,
    tokens: Sequence[int],
    limit: int,
    model: Model,
    pool: AdapterPool,
) -> tuple[TokenLogprobs, ...] | None:
    """Returns None if the logits are not finite."""
    found: list[TokenLogprobs] = []
    for begin in range(0, len(tokens), _ROWS):
        chunk = tokens[begin : begin + _ROWS]
        row = first + begin
        logits = model.logits(hidden[row : row + len(chunk)], inputs, row, pool)
        if not all(finite_rows(logits)):
            return None
        found += token_logprobs(logits, chunk, [limit] * len(chunk))
    return tuple(found)
