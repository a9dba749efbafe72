"""An engine on the virtual clock that only counts.

A token is a letter, and a pure function of prompt, adapter, seed, choice and position (`letter`),
so that a reader can check an answer whichever engines made it.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.admission import EngineLimits
from engine.errors import EngineDeadError, UnknownAdapterError
from engine.prefix_digests import prefix_digests
from engine.types import (
    NO_MEMORY,
    EngineLoad,
    Request,
    Resident,
    StepOutput,
    TokenOutput,
)
from lora.errors import AdapterError
from tests.virtual_loop import VirtualLoop

LETTERS = "abcdefghijklmnopqrstuvwxyz"
POISON = "!"  # the first letter of a prompt that kills its engine before the first token
REFUSED = "refused"  # the last part of the folder of an adapter that the engine refuses
NUM_BLOCKS = 1000


def letter(prompt: str, adapter: str | None, seed: int, choice: int, position: int) -> str:
    value = zlib.crc32(f"{prompt}/{adapter}/{seed}/{choice}/{position}".encode())
    return LETTERS[value % len(LETTERS)]


@dataclass(slots=True)
class _Run:
    request: Request
    num_tokens: dict[int, int]  # of each open choice
    to_prefill: int
    added_s: float
    has_begun: bool = False


@dataclass
class StepEngine:
    """`seeds`: the seeds that each `prompt/adapter` came with, in the whole fleet."""

    loop: VirtualLoop
    limits: EngineLimits
    step_s: float
    text_of: Callable[[tuple[int, ...]], str]
    id_of: Callable[[str], int]
    seeds: dict[str, set[int]]
    loaded: dict[str, str] = field(default_factory=dict)  # digest -> name
    prefixes: set[int] = field(default_factory=set)
    crash: Callable[[], None] = lambda: None
    lacks_memory: bool = False
    is_hung: bool = False
    num_steps: int = 0
    _runs: dict[str, _Run] = field(default_factory=dict)
    _callbacks: list[Callable[[StepOutput], None]] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None
    _began_s: float = 0.0
    _is_stopped: bool = False
    _evicts: bool = False
    _cached: set[int] = field(default_factory=set)  # prefixes that the next step reports
    _evicted: set[int] = field(default_factory=set)

    @property
    def model_limits(self) -> EngineLimits:
        return self.limits

    @property
    def num_requests(self) -> int:
        return len(self._runs)

    def start(self) -> None:
        pass

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def subscribe(self, callback: Callable[[StepOutput], None]) -> None:
        self._callbacks.append(callback)

    def on_death(self, callback: Callable[[EngineDeadError], None]) -> None:
        pass

    async def submit(self, request: Request) -> None:
        await asyncio.sleep(self.loop.random.uniform(0.0, self.step_s))
        if self._is_stopped:
            raise EngineDeadError("the engine was stopped")
        if request.adapter is not None and request.adapter not in self.loaded:
            raise UnknownAdapterError(request.adapter)
        assert request.params.seed is not None
        prompt = self.text_of(request.prompt_token_ids)
        self.seeds.setdefault(f"{prompt}/{request.adapter}", set()).add(request.params.seed)
        done = {one.choice: len(one.token_ids) for one in request.resumed}
        open_choices = {choice: done.get(choice, 0) for choice in request.choices}
        run = _Run(request, open_choices, request.num_tokens, self.loop.time())
        self._runs[request.request_id] = run
        self.go_on()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        run = self._runs.get(request_id)
        if run is None:
            return
        for ended in tuple(run.num_tokens) if choice is None else (choice,):
            run.num_tokens.pop(ended, None)
        if not run.num_tokens:
            del self._runs[request_id]

    async def load_adapter(self, name: str, digest: str, path: str) -> None:
        await asyncio.sleep(self.loop.random.uniform(0.0, 0.05))
        if Path(path).name == REFUSED:
            raise AdapterError("layer 3 holds NaN")
        self.loaded[digest] = name

    async def unload_adapter(self, digest: str) -> None:
        self.loaded.pop(digest, None)

    async def adapters(self) -> tuple[Resident, ...]:
        return ()

    async def pin_adapter(self, digest: str) -> None:
        pass

    async def unpin_adapter(self, digest: str) -> None:
        pass

    async def evict_adapter(self, digest: str) -> None:
        self.loaded.pop(digest, None)

    def has_adapter(self, digest: str) -> bool:
        return digest in self.loaded

    def evict_idle(self, draw: random.Random) -> None:
        """Evicts an adapter that no request here uses, and with the next step some of the prefix
        cache."""
        used = {run.request.adapter for run in self._runs.values()}
        idle = [digest for digest in self.loaded if digest not in used]
        if idle:
            del self.loaded[draw.choice(idle)]
        self._evicts = True

    def _evict_prefixes(self) -> None:
        self._evicts = False
        for digest in sorted(self.prefixes)[::3]:
            self.prefixes.discard(digest)
            self._cached.discard(digest)
            self._evicted.add(digest)

    def load(self) -> EngineLoad:
        rows, waiting, queued = 0, 0, 0
        for run in self._runs.values():
            is_running = rows + len(run.num_tokens) <= self.limits.max_num_seqs
            rows += len(run.num_tokens) if is_running else 0
            waiting += 0 if is_running else len(run.num_tokens)
            queued += run.to_prefill
        return EngineLoad(
            num_running=rows,
            num_waiting=waiting,
            queued_tokens=queued,
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - min(rows, NUM_BLOCKS),
            num_steps=self.num_steps,
            adapters_on_device=tuple(self.loaded),
            adapters_on_host=tuple(self.loaded),
            step_fixed_s=self.step_s,
            step_token_s=self.step_s / 1000,
        )

    def last_step_age_s(self) -> float:
        is_busy = self._timer is not None or self.is_hung
        return self.loop.time() - self._began_s if is_busy and self._runs else 0.0

    def usual_step_s(self) -> float:
        return self.step_s

    def go_on(self) -> None:
        if self._timer is None and self._runs and not self._is_stopped and not self.is_hung:
            self._began_s = self.loop.time()
            self._timer = self.loop.call_later(self.step_s, self._step)

    def _step(self) -> None:
        self._timer = None
        if self.is_hung:
            return
        budget, rows = self.limits.max_num_batched_tokens, 0
        outputs: list[TokenOutput] = []
        for request_id, run in tuple(self._runs.items()):
            rows += len(run.num_tokens)
            if rows > self.limits.max_num_seqs and rows > len(run.num_tokens):
                break
            if self.text_of(run.request.prompt_token_ids[:1]) == POISON:
                self.crash()
                return
            computed = min(budget, run.to_prefill)
            run.to_prefill -= computed
            budget -= computed
            if not run.to_prefill:
                outputs += [self._next(run, choice) for choice in tuple(run.num_tokens)]
                self._note_prefixes(run.request)
            if not run.num_tokens:
                self._runs.pop(request_id, None)
        self.lacks_memory = False
        self.num_steps += 1
        if self._evicts:
            self._evict_prefixes()
        step = StepOutput(tuple(outputs), self.load(), tuple(self._cached), tuple(self._evicted))
        self._cached, self._evicted = set(), set()
        for callback in self._callbacks:
            callback(step)
        self.go_on()

    def _next(self, run: _Run, choice: int) -> TokenOutput:
        request, offset = run.request, run.num_tokens[choice]
        queued_s = 0.0 if run.has_begun else self.loop.time() - run.added_s
        run.has_begun = True
        if self.lacks_memory:
            del run.num_tokens[choice]
            return TokenOutput(
                request.request_id, choice, offset, (), finish_reason="error", error=NO_MEMORY
            )
        assert request.params.seed is not None
        prompt = self.text_of(request.prompt_token_ids)
        drawn = letter(prompt, request.adapter, request.params.seed, choice, offset)
        is_last = offset + 1 >= request.params.max_tokens
        if is_last:
            del run.num_tokens[choice]
        else:
            run.num_tokens[choice] += 1
        return TokenOutput(
            request.request_id,
            choice,
            offset,
            (self.id_of(drawn),),
            finish_reason="length" if is_last else None,
            queued_s=queued_s,
        )

    def _note_prefixes(self, request: Request) -> None:
        chunk = self.limits.prefix_chunk
        ids, salt = request.prompt_token_ids, request.cache_salt
        new = set(prefix_digests(ids, request.adapter, salt, chunk)) - self.prefixes
        self.prefixes |= new
        self._cached |= new
        self._evicted -= new
