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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

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
STUCK_S = 120.0  # no case takes as long


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
    piecewise_graphs: bool = True
    num_blocks: int | None = None

    def config(self, kind: EngineKind) -> EngineConfig:
        model = read_model_config(self.shape.write_config(self.folder))
        is_cuda = self.device == "cuda"
        return EngineConfig(
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
            piecewise_graphs=self.piecewise_graphs,
            adapter_pool_bytes=pool_bytes(model, PAGES[kind], 2 if is_cuda else 4),
            adapter_host_bytes=HOST_BYTES,
        )


@dataclass(slots=True)
class Timeline:
    """When each request got its tokens, as the engine's thread saw it."""

    wanted: int  # requests that must end
    times_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def on_step(self, step: StepOutput) -> None:
        now_s = time.perf_counter()
        if step.outputs:
            self.steps_s.append(now_s)
        for output in step.outputs:
            if output.token_ids:
                self.times_s[output.request_id].append(now_s)
            if output.finish_reason is not None:
                if output.finish_reason != "length":
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


class OurEngine:
    """One engine for all cases of its kind."""

    def __init__(self, settings: Settings, kind: EngineKind) -> None:
        started_s = time.perf_counter()
        readers: list[MemoryReader] = []

        def reader_of(runner: ModelRunner) -> MemoryReader:
            readers.append(MemoryReader(runner))
            return readers[0]

        self.engine = open_engine(settings.config(kind), reader_of)
        self.reader = readers[0]
        self.engine.start()
        self.start_s = time.perf_counter() - started_s
        self.num_pages = self.reader.num_pages if PAGES[kind] else 0
        self._vocab_size = self.engine.model_limits.vocab_size
        self._timeline: Timeline | None = None
        self._count = 0
        self.engine.subscribe(self._on_step)

    def _on_step(self, step: StepOutput) -> None:
        if self._timeline is not None:
            self._timeline.on_step(step)

    async def load_adapters(self, case: Case) -> float:
        """Into the host tier; seconds. Those of another rank leave."""
        started_s = time.perf_counter()
        if case.distinct:
            wanted = [adapter_digest(case.rank, i) for i in range(case.distinct)]
            for digest in self.engine.load().adapters_on_host:
                if not digest.startswith(f"r{case.rank}-"):
                    await self.engine.unload_adapter(digest)
            self.reader.prepare(case.rank)
            rank = str(case.rank)
            await asyncio.gather(*(self.engine.load_adapter(d, d, rank) for d in wanted))
        return time.perf_counter() - started_s

    async def run(self, case: Case, salt: int, output: int | None = None) -> Run:
        """All of it once. `output`: another number of tokens, for a warm-up."""
        num_tokens = output or case.output
        requests = [
            self.request(prompt, num_tokens, self._adapter(case, i))
            for i, prompt in enumerate(self.prompts(case, salt))
        ]
        with self.watch(len(requests)) as timeline:
            start_s = time.perf_counter()
            await asyncio.gather(*(self.engine.submit(request) for request in requests))
            await finish(timeline)
        assert all(len(times) == num_tokens for times in timeline.times_s.values())
        return Run(
            max(times[-1] for times in timeline.times_s.values()) - start_s,
            [times[0] - start_s for times in timeline.times_s.values()],
            timeline.gaps_s(),
        )

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
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _adapter(self, case: Case, request: int) -> str | None:
        index = adapter_of(case, request)
        return None if index is None else adapter_digest(case.rank, index)


def adapter_digest(rank: int, index: int) -> str:
    return f"r{rank}-{index}"


async def finish(timeline: Timeline) -> None:
    if not await asyncio.to_thread(timeline.done.wait, STUCK_S):
        raise TimeoutError(f"{timeline.wanted} requests have not ended after {STUCK_S} s")
    if timeline.errors:
        raise RuntimeError(f"{len(timeline.errors)} requests failed: {timeline.errors[0]}")


def figures(case: Case, runs: Sequence[Run]) -> dict[str, object]:
    """Of the run with the median time, beside all times."""
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
