"""Log-probabilities in the two shapes of the OpenAI API, and in vLLM's for prompts.

Every number is finite (JSON has no infinity), and a position's own number and its entry among the
most likely tokens are the same float: lm-eval compares them for equality.

Long lists are rendered in parts. Two million entries, the most that one response may have, take the
interpreter 3 s, which would stall every other stream of the ingress. A rendering is a generator: it
yields one part after another, receives the JSON of each, and returns bytes. Its driver decides
where a part is rendered. This module is independent of requests and of processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from itertools import islice
from typing import Literal, TypeVar

import msgspec

from engine.errors import InvalidRequestError, UnsupportedModelError
from engine.types import TokenLogprobs
from serve_app.errors import ServiceUnavailableError
from serve_app.openai.responses import Json
from serve_app.text.tokenizer import TextTokenizer

MIN_LOGPROB = -9999.0
PART_ENTRIES = 4096  # about 5 ms of work, and 1 ms to encode for a worker

Shape = Literal["chat", "completion", "prompt"]
# Token id, log-probabilities (None for the first token of a prompt, which has no prediction), and
# the token's offset in the text.
Position = tuple[int, TokenLogprobs | None, int]
Lists = dict[str, bytes]  # list name -> JSON of its items, without brackets
T = TypeVar("T")
R = TypeVar("R")

_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")  # of /v1/completions
_LISTS: Mapping[Shape, tuple[str, ...]] = {
    "chat": ("content",),
    "completion": _COLUMNS,
    "prompt": ("entries",),
}


class LogprobsPart(msgspec.Struct, frozen=True, array_like=True):
    """A run of consecutive positions; `num_top` is the number of alternatives shown at each."""

    shape: Shape
    num_top: int
    positions: tuple[Position, ...]

    @property
    def num_entries(self) -> int:
        return len(self.positions) * (self.num_top + 1)


PAUSE = LogprobsPart("chat", 0, ())  # a rendering yields it to let the event loop run

Rendering = Generator[LogprobsPart, Lists, R]
Render = Callable[[LogprobsPart], Awaitable[Lists]]


def finite(logprob: float) -> float:
    """Returns at least MIN_LOGPROB, also for NaN."""
    return logprob if logprob >= MIN_LOGPROB else MIN_LOGPROB


def chat_logprobs(
    entries: Iterable[TokenLogprobs], num_top: int, tokenizer: TextTokenizer
) -> list[Json]:
    """Returns the `content` list of a chat choice."""
    return [
        {
            **_chat_token(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [
                _chat_token(i, entry.logprob if i == entry.token_id else logprob, tokenizer)
                for i, logprob in entry.top[:num_top]
            ],
        }
        for entry in entries
    ]


def completion_logprobs(
    positions: Iterable[Position], num_top: int, tokenizer: TextTokenizer
) -> Json:
    """Returns the parallel lists of /v1/completions; positions without log-probabilities are null
    in two of them."""
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []
    for token_id, entry, offset in positions:
        tokens.append(tokenizer.token_text(token_id))
        token_logprobs.append(None if entry is None else finite(entry.logprob))
        top_logprobs.append(None if entry is None else _top_by_text(entry, num_top, tokenizer))
        text_offset.append(offset)
    return dict(zip(_COLUMNS, (tokens, token_logprobs, top_logprobs, text_offset), strict=True))


def render_part(part: LogprobsPart, tokenizer: TextTokenizer) -> Lists:
    entries = [entry for _, entry, _ in part.positions]
    lists: Mapping[str, object]
    if part.shape == "prompt":
        lists = {"entries": [_prompt_entry(entry, part.num_top, tokenizer) for entry in entries]}
    elif part.shape == "chat":
        generated = (entry for entry in entries if entry is not None)
        lists = {"content": chat_logprobs(generated, part.num_top, tokenizer)}
    else:
        lists = completion_logprobs(part.positions, part.num_top, tokenizer)
    return {name: msgspec.json.encode(items)[1:-1] for name, items in lists.items()}


class PartsRenderer:
    """Drives the renderings of one read: the first PART_ENTRIES entries inline, later parts through
    `render_elsewhere` if it is given."""

    def __init__(self, tokenizer: TextTokenizer, render_elsewhere: Render | None) -> None:
        self._tokenizer = tokenizer
        self._render_elsewhere = render_elsewhere
        self._num_inline_left = PART_ENTRIES

    async def run(self, rendering: Rendering[R]) -> R:
        try:
            part = next(rendering)
            while True:
                part = rendering.send(await self._render(part))
        except StopIteration as end:
            result: R = end.value
            return result

    async def _render(self, part: LogprobsPart) -> Lists:
        if part is PAUSE:
            await asyncio.sleep(0)
            return {}
        self._num_inline_left -= part.num_entries
        if self._num_inline_left >= 0 or self._render_elsewhere is None:
            return render_part(part, self._tokenizer)
        try:
            return await self._render_elsewhere(part)
        except (ServiceUnavailableError, InvalidRequestError, UnsupportedModelError):
            # The worker died, or could not load the tokenizer within its memory limit. The tokens
            # exist and must not be lost for that: a part is short, and other requests ran before.
            return render_part(part, self._tokenizer)


def batched(values: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Yields tuples of `size` values; the last may be shorter."""
    iterator = iter(values)
    while batch := tuple(islice(iterator, size)):
        yield batch


def list_rendering(shape: Shape, positions: Iterable[Position], num_top: int) -> Rendering[Json]:
    """Returns every list of the shape whole, as JSON."""
    items: dict[str, list[bytes]] = {name: [] for name in _LISTS[shape]}
    for batch in batched(positions, max(1, PART_ENTRIES // (num_top + 1))):
        for name, data in (yield LogprobsPart(shape, num_top, batch)).items():
            items[name].append(data)
    return {name: msgspec.Raw(b"[" + b",".join(parts) + b"]") for name, parts in items.items()}


def _chat_token(token_id: int, logprob: float, tokenizer: TextTokenizer) -> Json:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _top_by_text(entry: TokenLogprobs, num_top: int, tokenizer: TextTokenizer) -> dict[str, float]:
    """Returns the alternatives by their text, with the sampled token always among them. Tokens that
    share a text collapse to the most likely of them."""
    logprob = finite(entry.logprob)
    top: dict[str, float] = {}
    for token_id, value in ((entry.token_id, logprob), *entry.top[:num_top]):
        if token_id == entry.token_id:
            value = logprob
        text = tokenizer.token_text(token_id)
        top[text] = max(finite(value), top.get(text, MIN_LOGPROB))
    return top


def _prompt_entry(
    entry: TokenLogprobs | None, num_top: int, tokenizer: TextTokenizer
) -> Json | None:
    """Returns an entry of vLLM's `prompt_logprobs`: from token id to number, rank and text."""
    if entry is None:
        return None
    ranked = {
        token_id: (rank, value) for rank, (token_id, value) in enumerate(entry.top[:num_top], 1)
    }
    ranked[entry.token_id] = (entry.rank, entry.logprob)
    return {
        str(token_id): {
            "logprob": finite(value),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (rank, value) in ranked.items()
    }
