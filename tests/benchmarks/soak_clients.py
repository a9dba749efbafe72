"""The requests of `soak`, and the clients that send them, leave them and check what comes back."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.service import AsyncEngine
from engine.types import Request, SamplingParams, TokenOutput
from tests.benchmarks.cases import AdapterSpec
from tests.benchmarks.shapes import ALL_LINEARS
from tests.benchmarks.soak_grammars import EXPRESSIONS, AnswerTexts

_NUM_PREFIXES = 8
_MAX_ERRORS = 100  # kept with their words
_PROBE_TOKENS = 16
# The settings that a request may have beside its lengths: each with the values it takes in turn.
_SETTINGS: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 0.3, 1.0, 1.7),
    "top_k": (1, 5, 50),
    "top_p": (0.1, 0.9),
    "min_p": (0.05, 0.5),
    "presence_penalty": (-1.0, 1.5),
    "frequency_penalty": (-0.5, 2.0),
    "repetition_penalty": (0.8, 1.3),
    "logit_bias": (((20, 5.0), (21, -5.0)), ((30, -100.0),)),
    "seed": (0, 7, -1, 2**40),
    "n": (2, 3, 4),
    "stop_token_ids": ((11, 12, 13), tuple(range(10, 42))),
    "ignore_eos": (True,),
    "logprobs": (0, 1, 5),
    "prompt_logprobs": (0, 2),
    "speculation": ("off", "suffix", "auto"),
}
_SHARE = 0.2  # of the requests that have a setting
_LEAVING = 0.15  # of the clients that leave before the end


def odd_adapters(count: int, max_rank: int, seed: int) -> list[AdapterSpec]:
    """Returns adapters of ranks from 1 to `max_rank`, on random sets of linears, some of them on
    every second or third layer only. The first has the largest rank on all linears."""
    draw = random.Random(f"{seed} adapters")
    specs = [AdapterSpec(max_rank, 0)]
    for index in range(1, count):
        rank = min(max_rank, round(2 ** (draw.random() * (max_rank.bit_length() - 1))))
        letters = draw.sample(ALL_LINEARS, draw.randint(1, len(ALL_LINEARS)))
        targets = "".join(letter for letter in ALL_LINEARS if letter in letters)
        specs.append(AdapterSpec(rank, index, targets, draw.choice((1, 1, 1, 2, 3))))
    return specs


class Mix:
    """A seeded sequence of requests."""

    def __init__(
        self,
        adapters: Sequence[str],
        vocab_size: int,
        longest: int,
        seed: int,
        constrained: float = 0.0,
    ) -> None:
        """`constrained`: the share of requests with a grammar."""
        self._adapters = adapters
        self._highest = vocab_size - 16  # away from the special ids
        self._longest = longest
        self._constrained = constrained
        self._draw = random.Random(f"{seed} requests")
        self._prefixes = [self._tokens(longest) for _ in range(_NUM_PREFIXES)]
        self._count = 0

    def next(self) -> Request:
        draw, half = self._draw, self._longest // 2
        prefix = draw.choice(self._prefixes)[: draw.randint(0, half)]
        prompt = prefix + self._tokens(draw.randint(1, half))
        adapter = draw.choice(self._adapters) if draw.random() < 0.9 else None
        max_tokens = draw.randint(1, self._longest)
        params = SamplingParams(
            max_tokens=max_tokens, min_tokens=draw.choice((0, 0, 0, max_tokens // 2))
        )
        for name, values in _SETTINGS.items():
            if draw.random() < _SHARE:
                params = replace(params, **{name: draw.choice(values)})
        if params.n > 1:  # the KV of all choices must fit
            params = replace(params, max_tokens=max(1, max_tokens // params.n), min_tokens=0)
        if draw.random() < self._constrained:  # an answer ends by itself
            grammar = draw.choice(tuple(EXPRESSIONS))
            params = replace(params, grammar=grammar, ignore_eos=False, min_tokens=0)
        salt = draw.choice(("", "", "tenant"))
        return self._request(prompt, params, adapter, salt)

    def probes(self, salt: str, num_adapters: int) -> list[Request]:
        """Returns the same requests for every salt, over the base and some adapters. Their KV is
        shared with no other request, so that each run computes the same."""
        draw = random.Random("probes")
        step = max(1, len(self._adapters) // num_adapters)
        requests = []
        for adapter in (None, *self._adapters[::step][:num_adapters]):
            prompt = tuple(draw.choices(range(10, self._highest), k=min(48, self._longest)))
            for params in (
                SamplingParams(max_tokens=_PROBE_TOKENS, temperature=0.0, ignore_eos=True),
                SamplingParams(max_tokens=_PROBE_TOKENS, top_p=0.9, seed=3, ignore_eos=True),
            ):
                requests.append(self._request(prompt, params, adapter, f"probe {salt}"))
        return requests

    def leaves_after(self, request: Request) -> int | None:
        """Returns after how many outputs the client leaves; None: at the end."""
        if self._draw.random() > _LEAVING:
            return None
        return self._draw.randint(0, request.params.max_tokens)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(range(10, self._highest), k=count))

    def _request(
        self, prompt: tuple[int, ...], params: SamplingParams, adapter: str | None, salt: str
    ) -> Request:
        self._count += 1
        return Request(f"soak-{self._count}", prompt, params, adapter, salt)


class Clients:
    def __init__(
        self, engine: AsyncEngine, mix: Mix, patience_s: float, texts: AnswerTexts | None = None
    ) -> None:
        """`patience_s`: a request without an output for longer counts as stuck. `texts`: None if
        no request is constrained."""
        self._engine, self._mix, self._patience_s = engine, mix, patience_s
        self._texts = texts
        self.errors: list[str] = []
        self.settings: Counter[str] = Counter()
        self.first_s: list[float] = []
        self._ended: Counter[str] = Counter()
        self._num_tokens = 0
        self._num_valid = 0  # answers of grammars, whole ones and beginnings
        self._pace = random.Random("pace")

    @property
    def counts(self) -> dict[str, object]:
        return {
            "requests": self._ended.total(),
            "left_early": self._ended["left"],
            "failed": self._ended["failed"],
            "valid": self._num_valid,
            "tokens": self._num_tokens,
        }

    async def closed_loop(self, num_clients: int, seconds: float) -> float:
        """Keeps so many requests open. Returns the requests that end per second, in the second half
        of the time."""
        half_s, end_s = (time.perf_counter() + seconds * part for part in (0.5, 1.0))

        async def one_client() -> None:
            while time.perf_counter() < end_s:
                await self._one(self._mix.next())

        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(one_client())
            await asyncio.sleep(half_s - time.perf_counter())
            before, began_s = self._ended.total(), time.perf_counter()
            await asyncio.sleep(end_s - time.perf_counter())
            rate = (self._ended.total() - before) / (time.perf_counter() - began_s)
        if rate <= 0:
            raise RuntimeError(f"no request ended in {seconds / 2:g} s: take more time")
        return rate

    async def open_loop(self, rate: float, seconds: float) -> None:
        """Sends requests at random times, so many per second, whatever becomes of those before.
        Returns when the last has ended."""
        start_s = time.perf_counter()
        at_s = 0.0
        async with asyncio.TaskGroup() as clients:
            while at_s < seconds:
                delay_s = start_s + at_s - time.perf_counter()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                clients.create_task(self._one(self._mix.next()))
                at_s += self._pace.expovariate(rate)

    async def probe(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Runs requests alone, one after the other. Returns their tokens."""
        answers = []
        for request in requests:
            tokens: list[int] = []
            try:
                async with asyncio.timeout(self._patience_s):
                    async for output in self._engine.generate(request):
                        tokens += output.token_ids
                        if output.finish_reason not in (None, "length"):
                            self._fail(request, f"a probe ended with {output.finish_reason}")
            except TimeoutError:
                self._fail(
                    request, f"a probe has {len(tokens)} tokens after {self._patience_s:g} s"
                )
            answers.append(tuple(tokens))
        return answers

    async def _one(self, request: Request) -> None:
        """Sends one request and reads it, to its end or until its client leaves."""
        params = request.params
        for name in _SETTINGS:
            self.settings[name] += getattr(params, name) != getattr(SamplingParams(), name)
        leaves_after = self._mix.leaves_after(request)
        self.settings["grammar"] += params.grammar is not None
        seen = {choice: Answer(request, self._texts) for choice in request.choices}
        sent_s = time.perf_counter()
        num_outputs, is_leaving = 0, leaves_after == 0
        stream = self._engine.generate(request)
        try:
            while not is_leaving:
                async with asyncio.timeout(self._patience_s):
                    output = await anext(stream, None)
                if output is None:
                    break
                if not num_outputs:
                    self.first_s.append(time.perf_counter() - sent_s)
                num_outputs += 1
                self._num_tokens += len(output.token_ids)
                seen[output.choice].add(output)
                is_leaving = leaves_after is not None and num_outputs >= leaves_after
        except TimeoutError:
            self._fail(request, f"no output for {self._patience_s:g} s after {num_outputs}")
            return
        except Exception as error:
            self._fail(request, repr(error))
            return
        finally:
            await stream.aclose()
        if is_leaving:
            self._ended["left"] += 1
            return
        faults = [fault for answer in seen.values() for fault in answer.faults()]
        if faults:
            self._fail(request, faults[0])
        else:
            self._ended["whole"] += 1
            self._num_valid += len(seen) if params.grammar is not None else 0

    def _fail(self, request: Request, reason: str) -> None:
        self._ended["failed"] += 1
        if len(self.errors) < _MAX_ERRORS:
            self.errors.append(f"{request.request_id} ({request.adapter}): {reason}")


class Answer:
    """The outputs of one choice, and their faults."""

    def __init__(self, request: Request, texts: AnswerTexts | None = None) -> None:
        self._params, self._num_prompt = request.params, len(request.prompt_token_ids)
        self._texts = texts
        self._token_ids: list[int] = []  # of an answer with a grammar
        self._num_tokens = self._num_logprobs = self._num_prompt_logprobs = 0
        self._num_gaps = 0
        self._end: TokenOutput | None = None
        self._is_after_end = False

    def add(self, output: TokenOutput) -> None:
        self._is_after_end |= self._end is not None
        self._num_gaps += output.offset != self._num_tokens
        self._num_tokens += len(output.token_ids)
        if self._params.grammar is not None:
            self._token_ids += output.token_ids
        self._num_logprobs += len(output.logprobs)
        self._num_prompt_logprobs += len(output.prompt_logprobs)
        if output.finish_reason is not None:
            self._end = output

    def faults(self) -> Iterator[str]:
        params, end = self._params, self._end
        if end is None:
            yield "the stream ended without a last output"
            return
        if end.finish_reason not in ("stop", "length"):
            yield f"it ended with {end.finish_reason}: {end.error}"
        if self._is_after_end or self._num_gaps:
            yield f"{self._num_gaps} outputs out of order"
        least = params.max_tokens if end.finish_reason == "length" else params.min_tokens
        if not least <= self._num_tokens <= params.max_tokens:
            yield f"{self._num_tokens} tokens, asked for {least} to {params.max_tokens}"
        if self._num_logprobs != (0 if params.logprobs is None else self._num_tokens):
            yield f"{self._num_logprobs} log-probabilities of {self._num_tokens} tokens"
        wanted = 0 if params.prompt_logprobs is None else self._num_prompt
        if self._num_prompt_logprobs not in (wanted, 0 if params.n > 1 else wanted):
            yield f"{self._num_prompt_logprobs} log-probabilities of the prompt, not {wanted}"
        grammar, token_ids = params.grammar, self._token_ids
        if grammar is not None and self._texts is not None:
            # A stop id of the client's is text as any other where the grammar allows it.
            is_whole = end.finish_reason == "stop" and end.stop_token_id is None
            token_ids = token_ids if end.stop_token_id is None else token_ids[:-1]
            if problem := self._texts.problem(grammar, token_ids, is_whole=is_whole):
                yield problem
