"""The engine that serves on while folders are fuzzed: its answers, its steps, its loads."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.factory import open_engine
from engine.service import AsyncEngine
from engine.types import Request, SamplingParams, StepOutput
from lora.errors import AdapterError
from tests.engine_helpers import BLOCK_SIZE, random_prompt

GUARD = "guard"
PROMPTS = tuple(random_prompt(8 + 3 * i, seed=i) for i in range(6))
ANSWER_TOKENS = 12


class Guard:
    """An engine with one adapter, asked the same questions again and again."""

    def __init__(self, base: Path, adapter: Path) -> None:
        self._adapter = adapter
        config = EngineConfig(
            model_path=str(base),
            base_digest="fuzz",
            device="cpu",
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_blocks=128,
            adapter_pool_bytes=8 * 1024**2,
            adapter_host_bytes=32 * 1024**2,
        )
        self.engine: AsyncEngine = open_engine(config)
        self.engine.subscribe(self._count)
        self.num_answers = 0
        self.num_changed = 0
        self.num_steps = 0
        self.largest_gap_s = 0.0
        self._last_step_s: float | None = None
        self._expected: list[list[int]] = []
        self._num_requests = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.engine.start()
        await self.engine.load_adapter(GUARD, GUARD, str(self._adapter))
        self._expected = [await self.ask(GUARD, p, ANSWER_TOKENS) for p in PROMPTS]
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self.engine.stop)

    @property
    def is_serving(self) -> bool:
        return self._task is not None and not self._task.done()

    async def ask(self, adapter: str, prompt: list[int], num_tokens: int) -> list[int]:
        self._num_requests += 1
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(f"q{self._num_requests}", tuple(prompt), params, adapter)
        return [i async for output in self.engine.generate(request) for i in output.token_ids]

    async def load(self, digest: str, folder: Path) -> str | None:
        """Returns None, or the refusal; any other error is raised."""
        try:
            await self.engine.load_adapter(digest, digest, str(folder))
        except AdapterError as error:
            return str(error)
        return None

    async def _serve(self) -> None:
        while True:
            for prompt, expected in zip(PROMPTS, self._expected, strict=True):
                self._last_step_s = None
                answer = await self.ask(GUARD, prompt, ANSWER_TOKENS)
                self.num_answers += 1
                self.num_changed += answer != expected
                await asyncio.sleep(0.02)  # leaves the cores to those who fuzz

    def _count(self, step: StepOutput) -> None:
        self.num_steps += 1
        now = time.monotonic()
        if self._last_step_s is not None:
            self.largest_gap_s = max(self.largest_gap_s, now - self._last_step_s)
        self._last_step_s = now
