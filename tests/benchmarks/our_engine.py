"""Our engine on the offline workload: `AsyncEngine`, the loop that a server has, without a server.

All requests of a case are submitted at once; the engine's thread stamps each step's outputs.
Weights are random and made on the device, adapters come from memory.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.factory import open_engine
from engine.host_memory import total_bytes
from engine.model_config import read_model_config
from engine.runner import ModelRunner
from engine.types import Request, SamplingParams, StepOutput
from tests.benchmarks.cases import (
    POOL_PAGES,
    SMALL_POOL_PAGES,
    AdapterSpec,
    Case,
    EngineKind,
    adapter_of,
    make_prompts,
)
from tests.benchmarks.memory_adapters import MemoryReader, pool_bytes
from tests.benchmarks.report import spread
from tests.benchmarks.shapes import ModelShape

PAGES: dict[EngineKind, int] = {"off": 0, "on": POOL_PAGES, "small": SMALL_POOL_PAGES}
HOST_BYTES = min(48 * 1024**3, total_bytes() // 2)
STUCK_S = 120.0  # no case of the offline workload lasts as long


@dataclass(frozen=True, slots=True)
class Settings:
    shape: ModelShape
    folder: Path  # for config.json
    device: str = "cuda"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    memory_fraction: float = 0.8
    enable_prefix_caching: bool = False
    enforce_eager: bool = False
    mixed_graphs: bool = True
    num_blocks: int | None = None
    pool_pages: int | None = None  # of an engine that is "on"; None: `POOL_PAGES`
    others: dict[str, Any] = field(default_factory=dict)  # fields of EngineConfig that differ

    def config(self, kind: EngineKind) -> EngineConfig:
        model = read_model_config(self.shape.write_config(self.folder))
        is_cuda = self.device == "cuda"
        config = EngineConfig(
            model_path=str(self.folder),
            base_digest=f"random {self.shape.name}",
            load_format="dummy",
            device="cuda" if is_cuda else "cpu",
            dtype="bfloat16" if is_cuda else "float32",
            max_model_len=min(4096, model.max_len),
            num_blocks=self.num_blocks,
            gpu_memory_utilization=self.memory_fraction,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            enable_prefix_caching=self.enable_prefix_caching,
            enforce_eager=self.enforce_eager,
            mixed_graphs=self.mixed_graphs,
            adapter_pool_bytes=pool_bytes(model, self.pages(kind), 2 if is_cuda else 4),
            adapter_host_bytes=HOST_BYTES,
        )
        return replace(config, **self.others)

    def pages(self, kind: EngineKind) -> int:
        return PAGES[kind] if self.pool_pages is None or kind != "on" else self.pool_pages


@dataclass(slots=True)
class Timeline:
    """The times at which each request got its tokens, as the engine's thread saw them."""

    wanted: int  # requests that must end
    times_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)  # aborted by the benchmark: no errors
    may_stop: bool = False  # whether an answer may end before its limit of tokens
    num_tokens: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def on_step(self, step: StepOutput) -> None:
        now_s = time.perf_counter()
        if step.outputs:
            self.steps_s.append(now_s)
        for output in step.outputs:
            if output.token_ids:
                self.times_s[output.request_id].append(now_s)
                self.num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                is_stopped = output.request_id in self.stopped
                is_stopped |= self.may_stop and output.finish_reason == "stop"
                if output.finish_reason != "length" and not is_stopped:
                    self.errors.append(output.error or output.finish_reason)
                self.wanted -= 1
        if self.wanted == 0:
            self.done.set()

    def gaps_s(self) -> list[float]:
        return [b - a for times in self.times_s.values() for a, b in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    first_token_s: list[float]
    gaps_s: list[float]


@dataclass(frozen=True, slots=True)
class PoolCost:
    """The room of some adapters in the pool on the device, beside the bytes of their tensors."""

    num_adapters: int
    pool_bytes: int
    tensor_bytes: int

    @property
    def ratio(self) -> float | None:
        return self.pool_bytes / self.tensor_bytes if self.tensor_bytes else None


class OurEngine:
    """One engine for all cases of its kind."""

    def __init__(self, settings: Settings, kind: EngineKind) -> None:
        started_s = time.perf_counter()
        readers: list[MemoryReader] = []

        def reader_of(runner: ModelRunner) -> MemoryReader:
            readers.append(MemoryReader(runner))
            return readers[0]

        self.config = settings.config(kind)
        self.engine = open_engine(self.config, reader_of)
        self.reader = readers[0]
        gc.collect()  # as the server's engine does before it is ready
        gc.freeze()
        self.engine.start()
        self.start_s = time.perf_counter() - started_s
        self._vocab_size = self.engine.model_limits.vocab_size
        self._timeline: Timeline | None = None
        self._count = 0
        self.engine.subscribe(self._on_step)

    def _on_step(self, step: StepOutput) -> None:
        if self._timeline is not None:
            self._timeline.on_step(step)

    async def load_adapters(self, adapters: Sequence[AdapterSpec]) -> float:
        """Loads adapters into the host tier. Returns the seconds, without the draw of numbers."""
        self.reader.prepare(max((spec.rank for spec in adapters), default=1))
        started_s = time.perf_counter()
        digests = [spec.digest for spec in adapters]
        await asyncio.gather(*(self.engine.load_adapter(d, d, "") for d in digests))
        return time.perf_counter() - started_s

    async def unload_adapters(self) -> None:
        loaded = self.engine.load().adapters_on_host
        await asyncio.gather(*(self.engine.unload_adapter(digest) for digest in loaded))

    async def warm_up(self, case: Case, output: int) -> PoolCost:
        """Runs the case with few tokens, so that its adapters are on the device. Returns the cost
        of those that were not there before; the pool has room for all."""
        pool = self.reader.pool
        before, bytes_before = set(pool.on_device()), pool.device_bytes_used
        await self.run(case, salt=-1, output=output)
        new = set(pool.on_device()) - before
        num_bytes = pool.device_bytes_used - bytes_before
        return PoolCost(len(new), num_bytes, sum(map(self.reader.tensor_bytes, new)))

    async def run(self, case: Case, salt: int, output: int | None = None) -> Run:
        """Runs all requests of the case once. `output`: another number of tokens, for a
        warm-up."""
        num_tokens = output or case.output
        requests = [
            self.request(prompt, num_tokens, self._adapter(case, i))
            for i, prompt in enumerate(self.prompts(case, salt))
        ]
        start_s, timeline = await self.send(requests)
        times_s = timeline.times_s.values()
        return Run(
            max(times[-1] for times in times_s) - start_s,
            [times[0] - start_s for times in times_s],
            timeline.gaps_s(),
        )

    async def send(self, requests: Sequence[Request]) -> tuple[float, Timeline]:
        """Submits the requests at once and waits until all have their tokens. Returns the time of
        the submission, and those of the tokens."""
        with self.watch(len(requests)) as timeline:
            start_s = time.perf_counter()
            await asyncio.gather(*(self.engine.submit(request) for request in requests))
            await finish(timeline)
        for request in requests:
            assert len(timeline.times_s[request.request_id]) == request.params.max_tokens
        return start_s, timeline

    def prompts(self, case: Case, salt: int) -> list[tuple[int, ...]]:
        return make_prompts(case, self._vocab_size, salt)

    def request(self, prompt: tuple[int, ...], num_tokens: int, adapter: str | None) -> Request:
        self._count += 1
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return Request(f"request-{self._count}", prompt, params, adapter)

    @contextmanager
    def watch(self, num_requests: int) -> Iterator[Timeline]:
        self._timeline = Timeline(num_requests)
        try:
            yield self._timeline
        finally:
            self._timeline = None

    def close(self) -> None:
        self.engine.stop()
        del self.engine, self.reader
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _adapter(self, case: Case, request: int) -> str | None:
        index = adapter_of(case, request)
        return None if index is None else case.adapters[index].digest


async def finish(timeline: Timeline, limit_s: float = STUCK_S) -> None:
    if not await asyncio.to_thread(timeline.done.wait, limit_s):
        raise TimeoutError(f"{timeline.wanted} requests have not ended after {limit_s} s")
    if timeline.errors:
        raise RuntimeError(f"{len(timeline.errors)} requests failed: {timeline.errors[0]}")


def decode_rate(times_s: Collection[Sequence[float]]) -> float:
    """Returns the tokens/s between the last request's first token and the first request's last
    one: while all of them decode. Raises ValueError if there is no such time."""
    begin_s, end_s = max(times[0] for times in times_s), min(times[-1] for times in times_s)
    if end_s <= begin_s:
        raise ValueError("some requests end before the last one has begun: they need more tokens")
    tokens = sum(begin_s < time_s <= end_s for times in times_s for time_s in times)
    return tokens / (end_s - begin_s)


def figures(case: Case, runs: Sequence[Run]) -> dict[str, object]:
    """Returns the figures of the run with the median time, beside the times of all runs."""
    ordered = sorted(runs, key=lambda run: run.seconds)
    middle = ordered[len(ordered) // 2]
    median_s = statistics.median(run.seconds for run in runs)
    lines: dict[str, object] = {
        "seconds": round(median_s, 4),
        "runs_s": [round(run.seconds, 4) for run in runs],
        "output_tokens_per_s": round(case.output_tokens / median_s, 1),
        "ttft_ms": spread([1000 * s for s in middle.first_token_s], 2),
    }
    if middle.gaps_s:
        lines["inter_token_ms"] = spread([1000 * s for s in middle.gaps_s], 2)
    return lines


def relative_rate(runs: Sequence[Run], base_runs: Sequence[Run]) -> float:
    """Returns the tokens/s relative to other runs: the median over the rounds, in each of which
    both ran."""
    pairs = zip(runs, base_runs, strict=True)
    return statistics.median(base.seconds / run.seconds for run, base in pairs)


def to_base(runs: Sequence[Run], base_runs: Sequence[Run]) -> dict[str, object]:
    """Returns the tokens/s relative to the base, and the time added to it: medians over the rounds,
    in each of which both ran."""
    pairs = [(run.seconds, base.seconds) for run, base in zip(runs, base_runs, strict=False)]
    added_s = statistics.median(seconds - base_s for seconds, base_s in pairs)
    return {
        "to_base": round(relative_rate(runs, base_runs), 3),
        "added_s": round(added_s, 4),
        "added_percent": round(
            100 * statistics.median(seconds / base_s - 1 for seconds, base_s in pairs), 1
        ),
    }
