"""Log-probabilities of a large answer, rendered in parts by text workers.

Two million entries, the most that one answer may have, take the interpreter 3 s, in which every
other stream of the ingress would stand still. A rendering is a generator: it asks for the JSON of
one part after another and returns bytes. Its caller decides where a part is rendered.
Ignorant of requests and of processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, TypeVar

import msgspec

from engine.errors import InvalidRequestError, UnsupportedModelError
from engine.types import TokenLogprobs
from serve_app.errors import ServiceUnavailableError
from serve_app.openai.logprobs import CompletionLogprobs, Json, chat_entry, prompt_entries
from serve_app.text.tokenizer import TextTokenizer

PART_ENTRIES = 4096  # about 5 ms of work, and 1 ms to encode for a worker

Shape = Literal["chat", "completion", "prompt"]
# The token's id, its numbers (None: nothing came before it) and its offset in the text.
Position = tuple[int, TokenLogprobs | None, int]
Lists = dict[str, bytes]  # by the list's name: the JSON of its items, without brackets
T = TypeVar("T")
R = TypeVar("R")


class LogprobsPart(msgspec.Struct, frozen=True, array_like=True):
    """Positions that follow each other. `num_top`: alternatives that are shown at each."""

    shape: Shape
    num_top: int
    positions: tuple[Position, ...]

    @property
    def num_entries(self) -> int:
        return len(self.positions) * (self.num_top + 1)


Rendering = Generator[LogprobsPart, Lists, R]
Render = Callable[[LogprobsPart], Awaitable[Lists]]


def render_part(part: LogprobsPart, tokenizer: TextTokenizer) -> Lists:
    num_top = part.num_top
    entries = [entry for _, entry, _ in part.positions]
    lists: dict[str, Sequence[object]]
    if part.shape == "prompt":
        lists = {"entries": prompt_entries(entries, num_top, tokenizer)}
    elif part.shape == "chat":
        known = (entry for entry in entries if entry is not None)
        lists = {"content": [chat_entry(entry, num_top, tokenizer) for entry in known]}
    else:
        columns = CompletionLogprobs()
        columns.extend(part.positions, num_top, tokenizer)
        lists = columns.lists()
    return {name: msgspec.json.encode(items)[1:-1] for name, items in lists.items()}


def chat_lists(positions: Iterable[Position], num_top: int) -> Rendering[Json]:
    lists = yield from _gathered("chat", ("content",), positions, num_top)
    return {**lists, "refusal": None}


def completion_lists(positions: Iterable[Position], num_top: int) -> Rendering[Json]:
    names = tuple(CompletionLogprobs().lists())
    lists = yield from _gathered("completion", names, positions, num_top)
    return {**lists}


def prompt_list(entries: Sequence[TokenLogprobs | None], num_top: int) -> Rendering[msgspec.Raw]:
    """vLLM's `prompt_logprobs`."""
    positions = ((0, entry, 0) for entry in entries)
    lists = yield from _gathered("prompt", ("entries",), positions, num_top)
    return lists["entries"]


def rendered_here(rendering: Rendering[R], tokenizer: TextTokenizer) -> R:
    """Blocks."""
    try:
        part = next(rendering)
        while True:
            part = rendering.send(render_part(part, tokenizer))
    except StopIteration as end:
        result: R = end.value
        return result


class PartsRenderer:
    """Drives the renderings of one read: the first entries on the spot, the others elsewhere."""

    def __init__(self, tokenizer: TextTokenizer, elsewhere: Render | None) -> None:
        self._tokenizer = tokenizer
        self._elsewhere = elsewhere
        self._num_left = PART_ENTRIES

    async def run(self, rendering: Rendering[R]) -> R:
        try:
            part = next(rendering)
            while True:
                part = rendering.send(await self._render(part))
        except StopIteration as end:
            result: R = end.value
            return result

    async def _render(self, part: LogprobsPart) -> Lists:
        self._num_left -= part.num_entries
        if self._num_left >= 0 or self._elsewhere is None:
            return render_part(part, self._tokenizer)
        try:
            return await self._elsewhere(part)
        except (ServiceUnavailableError, InvalidRequestError, UnsupportedModelError):
            # No worker can do it: it ended, or could not read the tokenizer within its memory.
            # The answer is there and is not lost for that: a part is short, and others had their
            # turn before it.
            return render_part(part, self._tokenizer)


def _gathered(
    shape: Shape, names: Sequence[str], positions: Iterable[Position], num_top: int
) -> Rendering[dict[str, msgspec.Raw]]:
    """The whole lists as JSON."""
    items: dict[str, list[bytes]] = {name: [] for name in names}
    for some in _batched(positions, max(1, PART_ENTRIES // (num_top + 1))):
        for name, data in (yield LogprobsPart(shape, num_top, some)).items():
            items[name].append(data)
    return {name: msgspec.Raw(b"[" + b",".join(parts) + b"]") for name, parts in items.items()}


def _batched(values: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    iterator = iter(values)
    while batch := tuple(islice(iterator, size)):
        yield batch
