"""The tokens of a step on a device, on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.sampler import NOT_FINITE, by_sequence, kept_by_sequence, read_logprobs
from engine.types import Sample, ScheduledBatch, Sequence, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities on their way to the host, for the rows that requested them."""

    rows: tuple[int, ...]
    limits: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]  # own [n], ranks [n], top ids [n, k], top [n, k]

    def read(self, token_ids: list[int]) -> dict[int, TokenLogprobs]:
        drawn = [token_ids[row] for row in self.rows]
        return dict(zip(self.rows, read_logprobs(self.tensors, drawn, self.limits), strict=True))


@dataclass(frozen=True, slots=True)
class Drawn:
    token_ids: torch.Tensor  # [rows] int32, pinned
    done: torch.cuda.Event | None  # None in the interpreter, which has no device to wait for
    logprobs: Logprobs | None

    def read(self, batch: ScheduledBatch) -> list[Sample]:
        """Returns one sample per sequence of the batch. Called once the copy is done."""
        token_ids: list[int] = self.token_ids.tolist()
        if self.logprobs is None:
            return kept_by_sequence(batch, token_ids)
        logprobs = self.logprobs.read(token_ids)

        def answer(row: int) -> Sample:
            token_id = token_ids[row]
            return Sample(token_id, logprobs.get(row)) if token_id >= 0 else NOT_FINITE

        return by_sequence(batch, answer)


def drawn_rows(batch: ScheduledBatch) -> dict[Sequence, int]:
    """Returns the rows in which the newest tokens of sequences are drawn. Sequences with drafts
    have none: the step behind their draws is planned once their tokens are known."""
    rows: dict[Sequence, int] = {}
    row = 0
    for part in batch.sequences:
        if part.samples:
            if not part.draft:
                rows[part.sequence] = row
            row += 1 + len(part.draft)
    return rows
