"""The client of `scale`, a process of its own: keeps as many streams open as the moment asks for,
reads each to its end and judges it. A line for each on standard output.

A stream is right if it ended with `[DONE]` and the finish reason "length" after as many tokens as
were asked for, without an error event, and its text is the beginning of the one that is expected.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import aiohttp

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Phase:
    streams: int  # open at a time
    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    url: str
    phases: tuple[Phase, ...]
    tokens: tuple[int, int]  # the shortest and the longest answer
    # model -> prompt -> text of the longest answer
    expected: Mapping[str, Mapping[str, str]]


@dataclass(slots=True)
class Seen:
    """One stream; times by the monotonic clock, which is the machine's."""

    model: str
    prompt: str
    num_tokens: int  # asked for
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    max_gap_s: float = 0.0
    text: str = ""
    num_received: int = 0
    finish_reason: str | None = None
    is_done: bool = False
    error: str = ""

    def verdict(self, expected: str) -> str:
        if self.error:
            return "error"
        if not self.is_done or self.finish_reason != "length":
            return "truncated"
        # A character may be cut in its middle at the end.
        return "right" if expected.startswith(self.text.rstrip("\ufffd")) else "mixed"


async def read_stream(http: aiohttp.ClientSession, seen: Seen) -> None:
    body = {
        "model": seen.model,
        "prompt": seen.prompt,
        "max_tokens": seen.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    seen.sent_s = last_s = time.monotonic()
    try:
        async with http.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                seen.error = f"{answer.status} {(await answer.text())[:300]}"
                return
            async for line in answer.content:
                if line.startswith(b"data: "):
                    _take(seen, line[6:].strip())
                    now_s = time.monotonic()
                    if seen.first_s is None:
                        seen.first_s = now_s
                    else:
                        seen.max_gap_s = max(seen.max_gap_s, now_s - last_s)
                    last_s = now_s
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.error = repr(error)
    finally:
        seen.ended_s = time.monotonic()
    if not seen.error and seen.num_received != seen.num_tokens:
        seen.error = f"{seen.num_received} of {seen.num_tokens} tokens"


def _take(seen: Seen, event: bytes) -> None:
    if event == b"[DONE]":
        seen.is_done = True
        return
    content = json.loads(event)
    if "error" in content:
        seen.error = str(content["error"])[:300]
        return
    for choice in content["choices"]:
        seen.text += choice["text"]
        seen.finish_reason = choice["finish_reason"] or seen.finish_reason
    if (usage := content.get("usage")) is not None:
        seen.num_received = usage["completion_tokens"]


def open_http(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        url,
        timeout=aiohttp.ClientTimeout(None, sock_read=300),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 20,
    )


class Streams:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._draw = random.Random(3)
        self._open: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        async with open_http(self._work.url) as http:
            ends_s = time.monotonic()
            for phase in self._work.phases:
                ends_s += phase.seconds
                while time.monotonic() < ends_s:
                    while len(self._open) < phase.streams:
                        task = asyncio.create_task(self._one(http))
                        self._open.add(task)
                        task.add_done_callback(self._open.discard)
                    await asyncio.sleep(_LOOK_S)
            await asyncio.gather(*self._open)

    async def _one(self, http: aiohttp.ClientSession) -> None:
        model = self._draw.choice(sorted(self._work.expected))
        texts = self._work.expected[model]
        prompt = self._draw.choice(sorted(texts))
        seen = Seen(model, prompt, self._draw.randint(*self._work.tokens))
        await read_stream(http, seen)
        line = asdict(seen) | {"verdict": seen.verdict(texts[prompt])}
        del line["text"]
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


async def take_texts(
    url: str, models: Sequence[str], prompts: Sequence[str], num_tokens: int
) -> dict[str, dict[str, str]]:
    """Returns the right text of every stream, from a server that nothing disturbs."""
    found: dict[str, dict[str, str]] = {}
    async with open_http(url) as http:
        for model in models:
            asked = [Seen(model, prompt, num_tokens) for prompt in prompts]
            await asyncio.gather(*(read_stream(http, one) for one in asked))
            assert all(one.verdict(one.text) == "right" for one in asked), asked
            found[model] = {one.prompt: one.text for one in asked}
    texts = [text for by_prompt in found.values() for text in by_prompt.values()]
    assert len(set(texts)) == len(texts), "two of them say the same: a mixture would not show"
    return found


def main() -> None:
    fields = json.loads(sys.stdin.read())
    phases = tuple(Phase(*phase) for phase in fields["phases"])
    tokens = tuple(fields["tokens"])
    work = Work(fields["url"], phases, (tokens[0], tokens[1]), fields["expected"])
    asyncio.run(Streams(work).run())


if __name__ == "__main__":
    main()
