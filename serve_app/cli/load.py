"""A load on an OpenAI endpoint and its results: the client of `loraplex bench`.

Closed loop: `concurrency` requests are in flight at any time. Ignorant of the terminal.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx
import msgspec

from serve_app.cli.commands.client import refusal
from serve_app.cli.sse import IncompleteStreamError, StreamReader
from serve_app.home import api_headers

_WORDS = [
    *("river", "stone", "cloud", "paper", "light", "garden"),
    *("winter", "music", "table", "road", "letter", "ocean"),
]


@dataclass(frozen=True, slots=True)
class LoadSpec:
    url: str
    models: tuple[str, ...]  # request i goes to models[i % len]
    num_requests: int
    concurrency: int
    max_tokens: int
    prompt_tokens: int  # approximately: common words are one token each
    stream: bool


@dataclass(frozen=True, slots=True)
class RequestResult:
    model: str
    error: str | None = None
    first_token_s: float | None = None  # streams only
    gaps_s: tuple[float, ...] = ()  # between events of a stream
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a model; times are in milliseconds, failed requests excluded."""

    model: str
    requests: int
    failures: int
    output_tokens: int
    tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Choice(msgspec.Struct):
    finish_reason: str | None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


async def run_load(load: LoadSpec, on_result: Callable[[RequestResult], None]) -> float:
    """Returns the seconds from the first request to the end of the last."""
    waiting = iter(range(load.num_requests))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.concurrency)
    timeout = httpx.Timeout(30, read=None)  # a queued request may wait long
    started_s = time.perf_counter()
    async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=api_headers()) as client:

        async def work() -> None:
            for number in waiting:
                on_result(await _request(client, load, number))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, load.num_requests)):
                group.create_task(work())
    return time.perf_counter() - started_s


def summarize(model: str, results: Sequence[RequestResult], wall_s: float) -> Summary:
    good = [one for one in results if one.error is None]
    first = [one.first_token_s for one in good if one.first_token_s is not None]
    gaps = [gap for one in good for gap in one.gaps_s]
    output_tokens = sum(one.output_tokens for one in good)
    return Summary(
        model=model,
        requests=len(results),
        failures=len(results) - len(good),
        output_tokens=output_tokens,
        tokens_per_s=round(output_tokens / wall_s, 1),
        ttft_p50_ms=_percentile_ms(first, 50),
        ttft_p99_ms=_percentile_ms(first, 99),
        itl_p50_ms=_percentile_ms(gaps, 50),
        itl_p99_ms=_percentile_ms(gaps, 99),
    )


async def _request(client: httpx.AsyncClient, load: LoadSpec, number: int) -> RequestResult:
    model = load.models[number % len(load.models)]
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": _prompt(load, number)}],
        "max_tokens": load.max_tokens,
        "stream": load.stream,
    }
    if load.stream:
        body["stream_options"] = {"include_usage": True}
    ask = _streamed if load.stream else _whole
    try:
        return await ask(client, load.url, model, body)
    except (httpx.HTTPError, httpx.InvalidURL, IncompleteStreamError) as error:
        return RequestResult(model, str(error) or type(error).__name__)


async def _streamed(
    client: httpx.AsyncClient, url: str, model: str, body: dict[str, object]
) -> RequestResult:
    reader = StreamReader()
    started_s = time.perf_counter()
    times: list[float] = []
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise IncompleteStreamError(refusal(answer.status_code, await answer.aread()))
        async for line in answer.aiter_lines():
            if reader.read(line):
                times.append(time.perf_counter())
    reader.finish()
    return RequestResult(
        model,
        first_token_s=times[0] - started_s if times else None,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
        prompt_tokens=reader.prompt_tokens,
        # A server that sends no usage usually sends one event per token.
        output_tokens=reader.completion_tokens or len(times),
    )


async def _whole(
    client: httpx.AsyncClient, url: str, model: str, body: dict[str, object]
) -> RequestResult:
    answer = await client.post(f"{url}/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise IncompleteStreamError(refusal(answer.status_code, answer.content))
    try:
        content = msgspec.json.decode(answer.content, type=_Answer)
    except msgspec.DecodeError as error:
        raise IncompleteStreamError(f"the answer is no chat completion: {error}") from error
    if any(choice.finish_reason in (None, "error") for choice in content.choices):
        raise IncompleteStreamError("the answer has no good finish reason")
    prompt_tokens, output_tokens = content.usage.prompt_tokens, content.usage.completion_tokens
    return RequestResult(model, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def _prompt(load: LoadSpec, number: int) -> str:
    """Returns a prompt that differs from its first word on, so that no prefix cache helps."""
    draw = random.Random(f"0 {number}")
    return " ".join([str(number), *draw.choices(_WORDS, k=max(load.prompt_tokens - 1, 1))])


def _percentile_ms(values_s: Sequence[float], percent: int) -> float | None:
    """Returns the nearest-rank percentile, which is always a measured value."""
    if not values_s:
        return None
    rank = max(math.ceil(len(values_s) * percent / 100), 1)
    return round(sorted(values_s)[rank - 1] * 1000, 2)
