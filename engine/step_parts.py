"""A step repeated in parts, after the whole of it ran out of memory.

KV blocks and adapters have their memory from the start. A step's other allocations grow with its
tokens, so fewer tokens at a time need less, and preempting a sequence would free nothing. Free of
tensors and of the runner's kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.errors import EngineDeadError
from engine.types import Runner, Sample, ScheduledBatch, ScheduledSequence

# Enough to halve the largest step down to one token and to find a few sequences that never fit.
_MAX_FAILURES = 48


def run_in_parts(runner: Runner, batch: ScheduledBatch) -> tuple[Sample | None, ...]:
    """Returns the samples in the batch's order; None for a sequence of which not even one token
    fits into memory.

    The token ids of all sequences must be on the host: no step is in flight. Each failure halves
    the tokens of a part, and after `_MAX_FAILURES` the rest is given up. Other errors of the runner
    pass through.
    """
    left = deque(enumerate(batch.sequences))
    found: list[Sample | None] = [None] * len(left)
    limit, num_failures = max(1, batch.num_tokens // 2), 0
    can_grow = False
    while left and num_failures < _MAX_FAILURES:
        taken = tuple(_take(left, limit))
        part = ScheduledBatch(tuple(item for _, item in taken))
        samples = _try(runner, part)
        if samples is not None:
            for (index, _), sample in zip(taken, samples, strict=True):
                found[index] = _joined(found[index], sample)
            limit *= 2 if can_grow else 1
            continue
        num_failures += 1
        can_grow = part.num_tokens == 1  # this sequence does not fit, others may as before
        limit = max(1, part.num_tokens // 2)
        if part.num_tokens > 1:
            _put_back(left, taken)
            continue
        index = taken[0][0]
        found[index] = None
        if left and left[0][0] == index:
            left.popleft()  # the rest of its tokens
    for index, _ in left:
        found[index] = None
    return tuple(found)


def _take(
    left: deque[tuple[int, ScheduledSequence]], limit: int
) -> Iterator[tuple[int, ScheduledSequence]]:
    """Takes up to a number of tokens from the front; the last sequence is cut if it has more."""
    while left and limit > 0:
        index, item = left.popleft()
        middle = item.start + limit
        if item.end > middle:
            sequence = item.sequence
            left.appendleft((index, ScheduledSequence(sequence, middle, item.end, item.samples)))
            item = ScheduledSequence(sequence, item.start, middle, False)
        limit -= item.end - item.start
        yield index, item


def _put_back(
    left: deque[tuple[int, ScheduledSequence]], taken: tuple[tuple[int, ScheduledSequence], ...]
) -> None:
    for index, item in reversed(taken):
        if left and left[0][0] == index:  # the other side of a cut
            _, rest = left.popleft()
            item = ScheduledSequence(item.sequence, item.start, rest.end, rest.samples)
        left.appendleft((index, item))


def _try(runner: Runner, part: ScheduledBatch) -> tuple[Sample, ...] | None:
    try:
        step = runner.launch(part)
        step.draw()
        return step.collect()
    except EngineDeadError:
        raise
    except Exception as error:
        if not runner.is_out_of_memory(error):
            raise
    # Not in the handler: the error's traceback keeps the part's allocations alive.
    runner.free_cache()
    return None


def _joined(first: Sample | None, second: Sample) -> Sample:
    """Joins the samples of two neighbouring ranges of one sequence."""
    if first is None:
        return second
    if not first.is_finite:
        return first
    return Sample(
        second.token_id,
        second.logprobs,
        first.prompt_logprobs + second.prompt_logprobs,
        second.is_finite,
    )
