"""The clients of `flips`: requests at a fixed rate, half of them to the adapter that is flipped,
and the judgement of every answer afterwards.

An answer is known by its text: each version of each adapter answers each prompt differently, and
the texts were taken beforehand with the version named in the request. Ignorant of the registry.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import aiohttp

MAX_TOKENS = 4
SETTLED = 25  # answers of the new version in a row: a change has taken effect everywhere
_IN_FLIGHT = 400


@dataclass(frozen=True, slots=True)
class Answer:
    adapter: str
    prompt: str
    sent_s: float  # monotonic, like all times here
    done_s: float
    text: str = ""
    cached_tokens: int = 0
    error: str = ""


@dataclass(slots=True)
class Flip:
    adapter: str
    old: int
    new: int
    began_s: float  # before the call to the registry
    returned_s: float  # after it
    effect_s: float = 0.0  # from `returned_s`; answers to what is sent later are the new version's
    cached_before: list[int] = field(default_factory=list)
    cached_after: int = -1
    is_text_right: bool = False


def make_prompt(draw: random.Random, letters: int) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=letters))


class Client:
    def __init__(self, url: str, base: str) -> None:
        # Ray Serve brings aiohttp; httpx would take more of the two cores than the server's front.
        self._http = aiohttp.ClientSession(
            url,
            timeout=aiohttp.ClientTimeout(60),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._base = base

    async def close(self) -> None:
        await self._http.close()

    async def ask(self, adapter: str, prompt: str, suffix: str = "") -> Answer:
        body = {
            "model": f"{self._base}:{adapter}{suffix}",
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        sent_s = time.monotonic()
        try:
            async with self._http.post("/v1/completions", json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return Answer(adapter, prompt, sent_s, time.monotonic(), error=repr(error))
        done_s = time.monotonic()
        if response.status != 200:
            words = f"{response.status} {text[:200]}"
            return Answer(adapter, prompt, sent_s, done_s, error=words)
        content = json.loads(text)
        cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Answer(
            adapter, prompt, sent_s, done_s, content["choices"][0]["text"], cached_tokens=cached
        )


class Expected:
    """The text of each version, by adapter and prompt."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], dict[str, int]] = {}

    async def take(self, client: Client, names: Sequence[str], prompts: Sequence[str]) -> None:
        everything = set()
        for name in names:
            for prompt in prompts:
                both = [await client.ask(name, prompt, f"@{version}") for version in (1, 2)]
                assert not any(answer.error for answer in both), both
                texts = {answer.text: number for number, answer in enumerate(both, 1)}
                assert len(texts) == 2, f"the versions of {name} answer {prompt} alike"
                everything |= {(prompt, text) for text in texts}
                self._versions[name, prompt] = texts
        assert len(everything) == 2 * len(names) * len(prompts), "two adapters answer alike"

    def version(self, answer: Answer) -> int | None:
        """Returns the version of the answer, or None if it is of neither: of a mixture."""
        return self._versions[answer.adapter, answer.prompt].get(answer.text)


class Load:
    """Requests at a fixed rate until stopped, whatever becomes of them."""

    def __init__(
        self, client: Client, names: Sequence[str], prompts: Sequence[str], rate: float
    ) -> None:
        self.answers: list[Answer] = []
        self.probed = names[0]
        self.seconds = 0.0
        self._client, self._names, self._prompts = client, names, prompts
        self._rate = rate
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        draw = random.Random(7)
        loop = asyncio.get_running_loop()
        began_s = time.monotonic()
        count = 0
        while not self._is_stopping:
            is_probe = count % 2 == 0
            adapter = self.probed if is_probe else draw.choice(self._names)
            task = loop.create_task(self._send(adapter, draw.choice(self._prompts)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            assert len(self._tasks) < _IN_FLIGHT, "the server does not keep up with the rate"
            count += 1
            await asyncio.sleep(max(0.0, began_s + count / self._rate - time.monotonic()))
        self.seconds = time.monotonic() - began_s
        await asyncio.gather(*self._tasks)

    def stop(self) -> None:
        self._is_stopping = True

    def answers_since(self, began_s: float, adapter: str) -> list[Answer]:
        """Returns the answers in the order of sending."""
        recent = takewhile(lambda answer: answer.done_s > began_s, reversed(self.answers))
        found = [one for one in recent if one.adapter == adapter and one.sent_s > began_s]
        return sorted(found, key=lambda answer: answer.sent_s)

    async def _send(self, adapter: str, prompt: str) -> None:
        self.answers.append(await self._client.ask(adapter, prompt))


async def wait_for_effect(load: Load, expected: Expected, flip: Flip, limit_s: float) -> None:
    """Fills in `effect_s`: all answers to what was sent later are the new version's."""
    while time.monotonic() - flip.returned_s < limit_s:
        await asyncio.sleep(0.1)
        seen = load.answers_since(flip.began_s, flip.adapter)
        stale = [i for i, answer in enumerate(seen) if expected.version(answer) != flip.new]
        settled = seen[stale[-1] + 1 :] if stale else seen
        if len(settled) >= SETTLED:
            flip.effect_s = max(0.0, settled[0].sent_s - flip.returned_s)
            return
    raise TimeoutError(f"{flip.adapter} did not become version {flip.new} within {limit_s} s")


def judge(answers: Sequence[Answer], flips: Sequence[Flip], expected: Expected) -> dict[str, int]:
    """Counts the faults of all answers, when the time of each flip's effect is known."""
    by_adapter: dict[str, list[Flip]] = {}
    for flip in flips:
        by_adapter.setdefault(flip.adapter, []).append(flip)
    found = {"errors": 0, "mixed": 0, "stale_after_effect": 0, "too_early": 0}
    for answer in answers:
        if answer.error:
            found["errors"] += 1
        elif (version := expected.version(answer)) is None:
            found["mixed"] += 1
        else:
            wrong = _wrong_version(version, answer, by_adapter.get(answer.adapter, []))
            if wrong is not None:
                found[wrong] += 1
    return found


def _wrong_version(version: int, answer: Answer, flips: Sequence[Flip]) -> str | None:
    """`flips`: of the answer's adapter, in order."""
    current, next_one = 1, 2
    for flip in flips:
        if answer.done_s < flip.began_s:
            break
        if answer.sent_s < flip.returned_s + flip.effect_s:
            return None  # while it takes effect either version is right
        current, next_one = flip.new, flip.old
    if version == current:
        return None
    has_effect = any(answer.sent_s > flip.returned_s for flip in flips)
    return "stale_after_effect" if has_effect and version == next_one else "too_early"
