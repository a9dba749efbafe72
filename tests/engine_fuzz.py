"""One random engine per seed: real scheduler, blocks and adapter pool, a runner that detects broken
promises, and copies to the device that take real time.

The sizes are small and the orders random: cold adapters, pins, unloads, aborts, steps that fail or
find no memory, prompts that share prefixes. Odd seeds run behind the engine's thread, where
commands and copies meet the scheduler at any point; even seeds step by step. Without Ray and
without a model, so that a machine with a GPU runs it with the copies of CUDA itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import AdapterInUseError, UnknownAdapterError
from engine.kv_layout import KVLayout, kv_layout, num_uncommitted
from engine.service import AsyncEngine
from engine.types import Request, ResumedChoice, SamplingParams, ScheduledBatch, TokenOutput
from kernels.lora_shrink_expand import Delta
from lora.adapter import Adapter, ModuleWeights
from lora.errors import HostMemoryError, PinnedMemoryError
from lora.page_image import PageLayout
from lora.pool import AdapterPool
from lora.sites import Site, Slice
from tests.fakes import FakeModel, FakeRunner, FakeStep, solo_tokens
from tests.lora_helpers import HandCopier, HandEvent
from tests.speculation_helpers import ScriptedDrafter

_MOST_STEPS = 20_000  # to the end of all requests; an engine needs some hundred
_DEADLOCK_S = 30.0  # an engine behind its thread needs a fraction of a second
# Of models without windows, with windows in all layers, and in some of them.
_WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (7,), (9, None), (5, 5, 5, None))
_COPIES_S = (0.0, 20e-6, 100e-6, 500e-6, 2e-3)


class TimedEvent(HandEvent):
    """The end of a copy that lasts a time by the clock, as with a copy engine."""

    def __init__(self, write: Callable[[], None], before: HandEvent | None, took_s: float) -> None:
        super().__init__(write, before)
        self._ends_s = time.perf_counter() + took_s

    def query(self) -> bool:
        if time.perf_counter() >= self._ends_s:
            super().synchronize()
        return super().query()

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0)


class TimedCopier(HandCopier):
    def __init__(self, max_flying: int, copies_s: Callable[[], float]) -> None:
        super().__init__(max_flying)
        self._copies_s = copies_s

    def make_event(self, write: Callable[[], None]) -> HandEvent:
        return TimedEvent(write, self.last, self._copies_s())


class FuzzRunner(FakeRunner):
    """A runner that reads, in each step, the pages of the step's adapters as a kernel would; the
    values are checked when the engine is done, so that no step waits for the device."""

    adapters: AdapterPool  # type: ignore[assignment]

    def __init__(
        self, num_blocks: int, block_size: int, pool: AdapterPool, max_len: int, layout: KVLayout
    ) -> None:
        model = FakeModel(max_model_len=max_len)
        super().__init__(num_blocks, block_size, model=model, layout=layout)
        self.adapters = pool
        self.ranks: dict[str, int] = {}
        self._read: list[tuple[str, torch.Tensor]] = []

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        for digest in sorted({part.sequence.request.adapter or "" for part in batch.sequences}):
            if digest:
                self._read.append((digest, self._rows(digest)))
        return super().launch(batch)

    def check_pages(self) -> int:
        """Returns the number of reads, after a check of all of them."""
        for digest, rows in self._read:
            found = rows.cpu()
            assert len(found) == self.ranks[digest], f"rows of {digest}"
            assert bool((found == _value(digest)).all()), f"values of {digest}"
        return len(self._read)

    def _rows(self, digest: str) -> torch.Tensor:
        """Copies the first column of A, as a step would read it."""
        deltas = self.adapters.deltas(digest)["site"]
        return torch.cat([delta.a[:, 0] for delta in deltas if isinstance(delta, Delta)])


@dataclass(slots=True)
class ChoiceOutput:
    """The outputs of one choice."""

    tokens: list[int] = field(default_factory=list)
    end: TokenOutput | None = None


class Fuzz:
    """One engine and the requests made to it."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng = rng = random.Random(seed)
        block_size, max_len = rng.choice((1, 2, 4, 16)), rng.choice((24, 40, 64))
        max_batched = rng.choice((1, 3, 8, 64))
        windows = rng.choice(_WINDOWS)
        layout = kv_layout(windows, block_size, max_len)
        uncommitted = num_uncommitted(max_batched, runs_ahead=True)
        least, fewest = (
            layout.blocks_needed(length, uncommitted)
            for length in (max_len, rng.randint(2, max_len))
        )
        width = rng.choice((8, 64)) if device == "cpu" else rng.choice((64, 2048, 16384))
        sites = (Site("site", width, (Slice("module", width),)),)
        page_bytes = PageLayout(sites, torch.float32).page_bytes
        num_pages = rng.randint(2, 6)
        room = 1 << 40 if rng.random() < 0.7 else 5 * page_bytes
        max_flying = rng.choice((0, 1, 2, 4))
        copier = TimedCopier(max_flying, lambda: rng.choice(_COPIES_S)) if max_flying else None
        self.pool = AdapterPool(
            sites,
            num_pages * page_bytes,
            torch.float32,
            device,
            room,
            copier=copier if device == "cpu" else None,
        )
        self.num_blocks, self.width = rng.randint(fewest, 3 * least), width
        self.runner = FuzzRunner(self.num_blocks, block_size, self.pool, max_len, layout)
        self.runner.runs_ahead = rng.random() < 0.8
        self.names = [f"adapter-{i}" for i in range(1, rng.randint(2, 7))]
        self.runner.ranks = {name: rng.choice((1, 16, 17, 32)) for name in self.names}
        model = self.runner.model_config
        drafter = ScriptedDrafter(
            "half", 16, lambda s: solo_tokens(s.request, s.choice, model), seed
        )
        self.engine = Engine(
            EngineConfig(
                "",
                "base",
                block_size=block_size,
                max_num_batched_tokens=max_batched,
                max_num_seqs=rng.choice((1, 2, 5, 8)),
                enable_prefix_caching=rng.random() < 0.8,
                max_adapter_overtakes=rng.choice((0, 1, 4, 256)),
                speculation=("off", "suffix", "auto", "suffix")[seed % 4],
            ),
            self.runner,
            drafter=drafter,
        )
        self.may_fail = rng.random() < 0.4
        self.prefixes = [[rng.randint(1, 15) for _ in range(max_len)] for _ in range(3)]
        self.max_len = self.engine.limits.max_request_tokens  # less where there are few blocks
        self.requests: dict[str, Request] = {}
        self.outputs: dict[tuple[str, int], ChoiceOutput] = {}
        self.aborted: set[str] = set()

    def insert(self, name: str) -> Callable[[], None]:
        """Returns the insertion, as `AdapterReader.read` does."""
        rows = torch.full((self.runner.ranks[name], self.width), _value(name))
        weights = {"module": ModuleWeights(rows, rows)}
        packed = self.pool.pack(Adapter(name, rows.shape[0], weights, rows.numel(), False))

        def insert() -> None:
            self.pool.insert(packed)

        return insert

    def new_request(self) -> Request:
        rng = self.rng
        length = rng.randint(1, self.max_len - 1)
        max_tokens = rng.randint(0, min(12, self.max_len - length))
        n = rng.choice((1, 1, 1, 2, 3))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, max_tokens),
            n=n,
            seed=rng.randint(0, 9),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=(3, 4) if rng.random() < 0.3 else (),
            prompt_logprobs=1 if rng.random() < 0.15 else None,
            repetition_penalty=1.5 if rng.random() < 0.2 else 1.0,
        )
        request = Request(
            f"r{len(self.requests)}",
            tuple(rng.choice(self.prefixes)[:length]),
            params,
            rng.choice((None, *self.names)),
            rng.choice(("", "", "salt")),
        )
        if max_tokens < 2 or rng.random() > 0.15:
            return request
        resumed = []
        for choice in range(n):
            tokens = solo_tokens(request, choice, self.runner.model_config)
            resumed.append(ResumedChoice(choice, tokens[: rng.randrange(len(tokens))]))
        return Request(
            request.request_id,
            request.prompt_token_ids,
            params,
            request.adapter,
            request.cache_salt,
            resumed=tuple(resumed),
        )

    def note(self, request: Request) -> None:
        self.requests[request.request_id] = request
        for choice in request.choices:
            self.outputs[request.request_id, choice] = ChoiceOutput()

    def take(self, output: TokenOutput) -> None:
        told = self.outputs[output.request_id, output.choice]
        already = self._resumed(output.request_id, output.choice)
        assert told.end is None, f"{output} after its end"
        assert output.offset == len(already) + len(told.tokens), f"{output} leaves a gap"
        told.tokens += output.token_ids
        if output.finish_reason is not None:
            told.end = output

    def check_end(self) -> int:
        """Checks that every request ended with its own tokens and that no block or page is held.
        Returns the number of tokens."""
        for (request_id, choice), told in self.outputs.items():
            request, end = self.requests[request_id], told.end
            assert end is not None, f"{request_id} never ended"
            already = self._resumed(request_id, choice)
            expected = solo_tokens(request, choice, self.runner.model_config)[len(already) :]
            if request.params.max_tokens == 0:
                expected = ()
            if end.finish_reason in ("abort", "error"):
                assert tuple(told.tokens) == expected[: len(told.tokens)], request_id
                is_own = end.finish_reason == "abort" and request_id in self.aborted
                assert is_own or end.finish_reason == "error", f"{request_id}: {end}"
                is_lost = "no longer loaded" in (end.error or "")
                assert is_own or is_lost or self.may_fail, f"{request_id}: {end.error}"
            else:
                assert tuple(told.tokens) == expected, request_id
        load = self.engine.load()
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert load.num_free_blocks == self.num_blocks
        assert load.num_missed_wakeups == 0, "the engine slept beside its work"
        while self.pool.has_pending_copies():
            self.pool.wait_pending()
        assert not any(one.num_references for one in self.pool.residents())
        self.runner.check_pages()
        return sum(len(told.tokens) for told in self.outputs.values())

    def break_a_step(self) -> None:
        """Breaks the next step in one of several ways, if this engine may fail."""
        if not self.may_fail:
            return
        match self.rng.choice(("launch", "collect", "memory", "late memory", "nan")):
            case "launch":
                self.runner.fail_next = RuntimeError("a launch failed")
            case "collect":
                self.runner.fail_next_collect = RuntimeError("a step failed")
            case "memory":
                self.runner.most_tokens = self.rng.randint(1, 8)
            case "late memory":
                self.runner.fail_next_collect = MemoryError()
            case _:
                if self.requests:
                    self.runner.not_finite = {self.rng.choice(list(self.requests))}

    def _resumed(self, request_id: str, choice: int) -> tuple[int, ...]:
        resumed = self.requests[request_id].resumed
        return next((one.token_ids for one in resumed if one.choice == choice), ())


def run_stepped(fuzz: Fuzz, num_turns: int = 120) -> None:
    engine, rng = fuzz.engine, fuzz.rng
    for turn in range(_MOST_STEPS):
        if turn < num_turns:
            if rng.random() < 0.5:
                _ask(fuzz)
            if rng.random() < 0.1 and fuzz.requests:
                request_id = rng.choice(list(fuzz.requests))
                fuzz.aborted.add(request_id)
                engine.abort(request_id, rng.choice((None, 0, 1)))
            if rng.random() < 0.1:
                _change_an_adapter(fuzz, rng.choice(fuzz.names))
            if rng.random() < 0.05:
                fuzz.break_a_step()
        elif not engine.has_work:
            return
        if engine.has_work:
            for output in engine.step().outputs:
                fuzz.take(output)
            assert not (engine.is_stuck and engine.has_work), "asleep beside its work"
    raise AssertionError("the requests do not end")


def _ask(fuzz: Fuzz) -> None:
    request = fuzz.new_request()
    if request.adapter is not None and not fuzz.engine.has_adapter(request.adapter):
        try:
            fuzz.engine.prepare_for_adapter()
            fuzz.insert(request.adapter)()
            fuzz.engine.keep_adapter(request.adapter)
        except (HostMemoryError, PinnedMemoryError):
            return
    fuzz.engine.add_request(request)
    fuzz.note(request)


def _change_an_adapter(fuzz: Fuzz, name: str) -> None:
    engine = fuzz.engine
    changes = (
        engine.retire_adapter,
        engine.evict_adapter,
        engine.pin_adapter,
        engine.unpin_adapter,
    )
    with suppress(UnknownAdapterError, AdapterInUseError, PinnedMemoryError):
        fuzz.rng.choice(changes)(name)


class _Reader:
    def __init__(self, fuzz: Fuzz) -> None:
        self._fuzz = fuzz

    def read(self, digest: str, path: str) -> Callable[[], None]:
        return self._fuzz.insert(digest)


async def run_behind_its_thread(fuzz: Fuzz, num_requests: int = 60) -> None:
    engine, rng = AsyncEngine(fuzz.engine, _Reader(fuzz)), fuzz.rng
    engine.start()
    try:
        async with (
            asyncio.timeout(_DEADLOCK_S),
            _until_idle(engine),
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(num_requests):
                request = fuzz.new_request()
                fuzz.note(request)
                clients.create_task(_client(fuzz, engine, request))
                if rng.random() < 0.1:
                    clients.create_task(engine.unload_adapter(rng.choice(fuzz.names)))
                if rng.random() < 0.1:
                    fuzz.break_a_step()
                if rng.random() < 0.4:  # otherwise the next request comes at once
                    await asyncio.sleep(rng.random() * 0.004)
    finally:
        await asyncio.to_thread(engine.stop)


@asynccontextmanager
async def _until_idle(engine: AsyncEngine) -> AsyncIterator[None]:
    """Waits for the aborts of clients that left, which run after them."""
    yield
    while engine.load().num_running or engine.load().num_waiting:
        await asyncio.sleep(0.0005)


async def _client(fuzz: Fuzz, engine: AsyncEngine, request: Request) -> None:
    is_leaving = fuzz.rng.random() < 0.2
    stream = engine.generate(request)
    try:
        if request.adapter is not None:
            await engine.load_adapter(request.adapter, request.adapter, "")
        async for output in stream:
            fuzz.take(output)
            if is_leaving:
                break
    except (UnknownAdapterError, HostMemoryError, PinnedMemoryError):
        is_leaving = True
    finally:
        await stream.aclose()
    if is_leaving:  # the final outputs of its choices have no reader
        for choice in request.choices:
            fuzz.outputs.pop((request.request_id, choice))


def fuzz_one(seed: int, device: str = "cpu") -> dict[str, int]:
    """Runs the engine of this seed and returns its counts. Raises if it broke a promise."""
    fuzz = Fuzz(seed, device)
    if seed % 2:
        asyncio.run(run_behind_its_thread(fuzz))
    else:
        run_stepped(fuzz)
    num_tokens = fuzz.check_end()
    load = fuzz.engine.load()
    ends = [told.end.finish_reason for told in fuzz.outputs.values() if told.end is not None]
    return {
        "requests": len(fuzz.requests),
        "tokens": num_tokens,
        "steps": load.num_steps,
        "copies": load.num_adapter_copies,
        "preempted": load.num_preemptions,
        "prefix_hits": load.prefix_hits,
        "aborted": ends.count("abort"),
        "failed": ends.count("error"),
    }


def _value(digest: str) -> float:
    return float(digest.rpartition("-")[2])
