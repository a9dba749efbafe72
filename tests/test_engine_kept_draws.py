"""The draws of drafts that are kept, read as integers and as samples."""

from __future__ import annotations

import random

from engine.outputs import kept_draws
from engine.sampler import NOT_FINITE, by_sequence, kept_by_sequence
from engine.types import Sample, ScheduledBatch, ScheduledSequence, Sequence
from tests.fakes import make_request


def test_draws_without_log_probabilities_are_kept_as_those_with_them() -> None:
    draw = random.Random(4)
    sequence = Sequence(make_request("r", 3), 0, 0, [1, 2, 3])
    for _ in range(300):
        parts, token_ids = [], list[int]()
        for _ in range(draw.randrange(1, 5)):
            draft = tuple(draw.choices(range(2), k=draw.randrange(4)))
            samples = bool(draft) or draw.random() < 0.8
            parts.append(ScheduledSequence(sequence, 2, 3 + len(draft), samples, draft))
            if samples:
                token_ids += draw.choices((-1, 0, 1), (1, 5, 5), k=1 + len(draft))
        batch = ScheduledBatch(tuple(parts))
        answers = [Sample(one) if one >= 0 else NOT_FINITE for one in token_ids]
        whole = by_sequence(batch, answers.__getitem__)
        for part, one, other in zip(parts, kept_by_sequence(batch, token_ids), whole, strict=True):
            assert (one.token_id, one.is_finite) == (other.token_id, other.is_finite)
            if part.draft and one.is_finite:
                assert one.kept == tuple(draw.token_id for draw in kept_draws(part, other))
            else:
                assert not one.kept
