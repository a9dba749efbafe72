"""An engine that costs nothing: a token per running request every 1/rate seconds, from one thread.

Stands behind the same interface as the real one, for the side stream, the Serve tests and the
`side_stream` benchmark. Token k of a choice is `prompt[k % len(prompt)]`, so readers can check it.
A prompt that begins with CRASH_TOKEN ends the process after its second token, one that begins with
POISON_TOKEN before its first. An adapter folder
that holds REFUSED is refused, and told in that file (a base folder with it starts no engine); one
that holds FAULT has the fault named there: its requests end at once. A file HANG in the base's
folder hangs the step of the engine that takes it away. As long as a file HOLD is there, no choice
gets more tokens than its text says, HELD_TOKENS if it is empty.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.admission import EngineLimits
from engine.config import EngineConfig
from engine.errors import (
    AdapterInUseError,
    EngineDeadError,
    InvalidRequestError,
    UnknownAdapterError,
)
from engine.types import (
    NO_MEMORY,
    NOT_FINITE,
    EngineLoad,
    FinishReason,
    Request,
    Resident,
    StepOutput,
    TokenLogprobs,
    TokenOutput,
)
from lora.errors import AdapterError
from tests.fakes_registry import EOS_ID

NUM_BLOCKS = 1024
CRASH_TOKEN = 250
POISON_TOKEN = 251
REFUSED = "refused"
FAULT = "fault"  # a file: one of FAULTS
HANG = "hang"
HOLD = "hold"
HELD_TOKENS = 10
FAULTS: dict[str, tuple[FinishReason, tuple[int, ...], str | None]] = {
    "empty": ("stop", (EOS_ID,), None),
    "error": ("error", (), "the step failed"),
    "non_finite": ("error", (), NOT_FINITE),
    "no_memory": ("error", (), NO_MEMORY),
}


@dataclass(slots=True)
class _Running:
    request: Request
    num_tokens: dict[int, int]  # by open choice


def _exit() -> None:
    time.sleep(0.1)  # the tokens before are on their way
    os._exit(1)


@dataclass(slots=True)
class PacedEngine:
    """`aborted` and `loaded` record what a test asks about."""

    rate: float = 100.0
    block_size: int = 16
    max_num_seqs: int = 256  # requests that run at a time; the others wait
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    loaded: dict[str, str] = field(default_factory=dict)  # digest -> name
    pinned: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)  # unloads that wait for requests
    steps: int = 0
    faults: dict[str, str] = field(default_factory=dict)  # by digest
    crash: Callable[[], None] = _exit
    no_memory: bool = False  # what runs ends for lack of it
    hang: Path | None = None  # as HANG
    hold: Path | None = None  # as HOLD
    hung_s: float | None = None  # since when a step hangs, on the monotonic clock
    usual_s: float = 0.0
    pause_at: int | None = None  # tokens of a choice; more come when it is None again
    _running: dict[str, _Running] = field(default_factory=dict)
    _callbacks: list[Callable[[StepOutput], None]] = field(default_factory=list)
    _on_death: list[Callable[[EngineDeadError], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def model_limits(self) -> EngineLimits:
        return EngineLimits(
            max_model_len=4096,
            vocab_size=1 << 20,
            max_kv_tokens=NUM_BLOCKS * 16,
            max_num_seqs=self.max_num_seqs,
        )

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="paced-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    async def submit(self, request: Request) -> None:
        if self._stopped.is_set():
            raise EngineDeadError("the engine was stopped")
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if request.adapter is not None and not self.has_adapter(request.adapter):
            raise UnknownAdapterError(request.adapter)
        with self._lock:
            done = {one.choice: len(one.token_ids) for one in request.resumed}
            self._running[request.request_id] = _Running(
                request, {choice: done.get(choice, 0) for choice in request.choices}
            )

    def abort(self, request_id: str, choice: int | None = None) -> None:
        with self._lock:
            self.aborted.append((request_id, choice))
            running = self._running.get(request_id)
            if running is None:
                return
            for ended in tuple(running.num_tokens) if choice is None else (choice,):
                running.num_tokens.pop(ended, None)
            if not running.num_tokens:
                del self._running[request_id]

    def subscribe(self, callback: Callable[[StepOutput], None]) -> None:
        self._callbacks.append(callback)

    def on_death(self, callback: Callable[[EngineDeadError], None]) -> None:
        self._on_death.append(callback)

    def die(self) -> None:
        """The loop ends as if a step had broken it."""
        self.stop()
        for callback in self._on_death:
            callback(EngineDeadError("the step loop ended"))

    async def load_adapter(self, name: str, digest: str, path: str) -> None:
        refused = Path(path, REFUSED)
        if refused.exists():
            with refused.open("a") as tries:
                tries.write("read\n")
            raise AdapterError("layer 3 holds NaN")
        if (fault := Path(path, FAULT)).exists():
            self.faults[digest] = fault.read_text()
        self.leaving.discard(digest)
        self.loaded[digest] = name

    async def unload_adapter(self, digest: str) -> None:
        self.leaving.add(digest)
        while digest in self.leaving and self._num_requests(digest):
            await asyncio.sleep(1 / self.rate)
        if digest in self.leaving:
            self.leaving.discard(digest)
            self.pinned.discard(digest)
            self.loaded.pop(digest, None)

    def has_adapter(self, digest: str) -> bool:
        return digest in self.loaded and digest not in self.leaving

    async def adapters(self) -> tuple[Resident, ...]:
        return tuple(
            Resident(
                digest,
                True,
                1024,
                1,
                self._num_requests(digest),
                digest in self.pinned,
                digest in self.leaving,
                0.0,
            )
            for digest in self.loaded
        )

    async def pin_adapter(self, digest: str) -> None:
        if not self.has_adapter(digest):
            raise UnknownAdapterError(digest)
        self.pinned.add(digest)

    async def unpin_adapter(self, digest: str) -> None:
        self.pinned.discard(digest)

    async def evict_adapter(self, digest: str) -> None:
        if not self.has_adapter(digest):
            raise UnknownAdapterError(digest)
        if digest in self.pinned:
            raise AdapterInUseError(f"adapter {digest} is pinned: unpin it first")
        if count := self._num_requests(digest):
            raise AdapterInUseError(f"adapter {digest} is in use by {count} requests")
        del self.loaded[digest]

    def load(self) -> EngineLoad:
        requests = tuple(self._running.values())
        num = min(self.max_num_seqs, len(requests))
        return EngineLoad(
            num_running=num,
            num_waiting=len(requests) - num,
            queued_tokens=sum(len(one.request.prompt_token_ids) for one in requests[num:]),
            num_blocks=NUM_BLOCKS,
            num_free_blocks=max(0, NUM_BLOCKS - num),
            num_steps=self.steps,
            adapters_on_device=tuple(self.loaded),
            num_pinned_adapters=len(self.pinned),
        )

    def last_step_age_s(self) -> float:
        return 0.0 if self.hung_s is None else time.monotonic() - self.hung_s

    def usual_step_s(self) -> float:
        return self.usual_s

    def _num_requests(self, digest: str) -> int:
        with self._lock:
            return sum(one.request.adapter == digest for one in self._running.values())

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stopped.is_set():
            due_s += 1 / self.rate
            if self._stopped.wait(max(0.0, due_s - time.monotonic())):
                return
            if self._running and self._takes_hang():
                self._stopped.wait()
                return
            outputs = self._step()
            if outputs:
                self.steps += 1
                step = StepOutput(outputs, self.load())
                for callback in self._callbacks:
                    callback(step)

    def _takes_hang(self) -> bool:
        if self.hung_s is None and self.hang is not None:
            with suppress(FileNotFoundError):
                self.hang.unlink()
                self.hung_s = time.monotonic()
        return self.hung_s is not None

    def _held_at(self) -> int | None:
        if self.hold is not None:
            with suppress(FileNotFoundError):
                return int(self.hold.read_text() or HELD_TOKENS)
        return None

    def _step(self) -> tuple[TokenOutput, ...]:
        outputs: list[TokenOutput] = []
        held_at = self._held_at() if self._running else None
        pause_at = self.pause_at if held_at is None else held_at
        with self._lock:
            for request_id, running in tuple(self._running.items())[: self.max_num_seqs]:
                prompt = running.request.prompt_token_ids
                is_poison = prompt[0] == POISON_TOKEN
                if is_poison or (
                    prompt[0] == CRASH_TOKEN and max(running.num_tokens.values()) >= 2
                ):
                    self.crash()
                    self._stopped.set()
                    return ()
                outputs += [
                    self._next(running, choice)
                    for choice, num_tokens in tuple(running.num_tokens.items())
                    if pause_at is None or num_tokens < pause_at
                ]
                if not running.num_tokens:
                    del self._running[request_id]
        return tuple(outputs)

    def _next(self, running: _Running, choice: int) -> TokenOutput:
        request, offset = running.request, running.num_tokens[choice]
        prompt = request.prompt_token_ids
        reason: FinishReason | None = None
        if offset + 1 >= request.params.max_tokens:
            reason = "length"
        token_ids: tuple[int, ...] = (prompt[offset % len(prompt)],)
        error: str | None = None
        fault = "no_memory" if self.no_memory else self.faults.get(request.adapter or "")
        if fault is not None:
            reason, token_ids, error = FAULTS[fault]
        if reason is None:
            running.num_tokens[choice] += 1
        else:
            del running.num_tokens[choice]
        logprobs = tuple(TokenLogprobs(token_id, -1.0, 1, ()) for token_id in token_ids)
        return TokenOutput(
            request.request_id,
            choice,
            offset,
            token_ids,
            () if request.params.logprobs is None else logprobs,
            finish_reason=reason,
            error=error,
        )


def open_paced_engine(config: EngineConfig) -> PacedEngine:
    """An EngineFactory: the pace is the `seed` of the configuration, in tokens a second."""
    if Path(config.model_path, REFUSED).exists():
        raise ValueError("layer 3 of the base holds NaN")
    engine = PacedEngine(float(config.seed or 100), config.block_size, config.max_num_seqs)
    engine.hang, engine.hold = Path(config.model_path, HANG), Path(config.model_path, HOLD)
    return engine
