"""The place from which an adapter with invocation tokens is active: aLoRA, Greenewald et al., arXiv
2504.12397.

As in PEFT's `calculate_alora_offsets`: the last occurrence of the tokens in the prompt, from its
first token on; the tokens before it are the base's, whose KV blocks they share. A prompt without
them is the base's altogether. Free of tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import replace

from engine.types import Request, ScheduledBatch, ScheduledSequence, Sequence
from kernels.lora_plan import MAX_SPLITS

_ITEM = array("q").itemsize


def find_activation(prompt: ListLike[int], invocation: ListLike[int]) -> int | None:
    """Returns the first position of the last occurrence, None if there is none. `invocation` has
    one token at least."""
    text, wanted = array("q", prompt).tobytes(), array("q", invocation).tobytes()
    end = len(text)
    while (found := text.rfind(wanted, 0, end)) >= 0:
        if found % _ITEM == 0:
            return found // _ITEM
        end = found + len(wanted) - 1  # within tokens
    return None


def adapter_at(request: Request, position: int) -> str | None:
    """Returns the key of the adapters that are active at a position."""
    is_active = request.active_from is None or position >= request.active_from
    return request.adapter if is_active else None


def activated(request: Request, invocation: ListLike[int]) -> Request:
    """Returns the request with the place where its adapter, with these invocation tokens, becomes
    active; without the adapter if they are not in the prompt."""
    found = find_activation(request.prompt_token_ids, invocation)
    if found is None:
        return replace(request, adapter=None, adapter_rank=0)
    return replace(request, active_from=found)


def by_adapter(batch: ScheduledBatch) -> ScheduledBatch:
    """Sorts a batch so that tokens of one adapter are adjacent: its weights are then read once for
    all of them. Tokens before the activation of their adapter are the base's."""

    def last_key(item: ScheduledSequence) -> str:
        return adapter_at(item.sequence.request, item.end - 1) or ""

    return ScheduledBatch(tuple(sorted(batch.sequences, key=last_key)))


def adapter_runs(parts: Iterable[ScheduledSequence]) -> Iterator[tuple[str | None, int]]:
    """Yields the adapter key and the number of tokens of each run of a step: two of a part in which
    its adapter becomes active."""
    for part in parts:
        request, start = part.sequence.request, part.start
        active_from = request.active_from
        if active_from is None:
            yield request.adapter, part.end - start
            continue
        if start < active_from < part.end:
            yield None, active_from - start
            start = active_from
        yield adapter_at(request, start), part.end - start


class StepParts:
    """The parts of one step. In `MAX_SPLITS` of them an adapter may become active; others end
    there, and go on in the next step."""

    def __init__(self) -> None:
        self._num_splits = 0

    def take(self, sequence: Sequence, start: int, end: int) -> ScheduledSequence:
        """Takes the tokens up to `end` of a sequence, or up to the activation of its adapter."""
        active_from = sequence.request.active_from
        if active_from is not None and start < active_from < end:
            self._num_splits += 1
            if self._num_splits > MAX_SPLITS:
                end = active_from
        samples = end == sequence.num_tokens
        sequence.num_scheduled_tokens = end
        sequence.num_tokens_in_flight += samples
        return ScheduledSequence(sequence, start, end, samples)
