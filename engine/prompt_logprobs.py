"""Log-probabilities of prompt tokens: the logits of many rows, computed some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.inputs import ForwardInputs, num_prompt_logprobs
from engine.model import Model
from engine.sampler import finite_rows, token_logprobs
from engine.types import Sample, ScheduledBatch, TokenLogprobs
from lora.pool import AdapterPool

Found = tuple[TokenLogprobs, ...] | None  # of one sequence; None: its logits are not finite
_ROWS = 128  # prompt rows whose logits exist at a time: 25 MB for a vocabulary of 49152


def find_prompt_logprobs(
    batch: ScheduledBatch,
    inputs: ForwardInputs,
    hidden: torch.Tensor,  # [rows whose logits are requested, H]
    model: Model,
    pool: AdapterPool,
) -> list[Found]:
    """Returns the prompt log probabilities of each sequence in this step."""
    found: list[Found] = []
    first = inputs.num_samples
    for part in batch.sequences:
        count = num_prompt_logprobs(part)
        tokens = part.sequence.token_ids[part.start + 1 : part.start + 1 + count]
        limit = part.sequence.request.params.prompt_logprobs or 0
        own: list[TokenLogprobs] = []
        for begin, logits in prompt_logits(inputs, hidden, first, count, model, pool):
            chunk = tokens[begin : begin + len(logits)]
            own += token_logprobs(logits, chunk, [limit] * len(chunk))
        found.append(tuple(own) if len(own) == count else None)
        first += count
    return found


def prompt_logits(
    inputs: ForwardInputs,
    hidden: torch.Tensor,
    first: int,
    count: int,
    model: Model,
    pool: AdapterPool,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the logits of `count` rows of the step's result from `first` on: their place among
    these, and [rows, V] float32. Ends before rows that are not finite; the same on every rank."""
    for begin in range(0, count, _ROWS):
        row = first + begin
        logits = model.logits(hidden[row : row + min(_ROWS, count - begin)], inputs, row, pool)
        if not all(finite_rows(logits)):
            return
        yield begin, logits


def run_prompt_logits(
    inputs: ForwardInputs,
    hidden: torch.Tensor,
    counts: Sequence[int],  # of each sequence that has prompt rows, in order
    model: Model,
    pool: AdapterPool,
) -> None:
    """Computes the logits of all prompt rows beside a rank that reads them."""
    first = inputs.num_samples
    for count in counts:
        for _ in prompt_logits(inputs, hidden, first, count, model, pool):
            pass
        first += count


def completed(samples: Sequence[Sample], found: Sequence[Found]) -> tuple[Sample, ...]:
    """Adds the log-probabilities to the samples. A sequence whose prompt logits are not finite
    gives no token either: the same weights and KV produced both."""
    return tuple(
        Sample(None, is_finite=False)
        if own is None
        else sample._replace(prompt_logprobs=own)
        if own
        else sample
        for sample, own in zip(samples, found, strict=True)
    )
