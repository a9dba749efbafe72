"""Builds the engine of a configuration: the one place where policy meets the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.grammars import Grammars
from engine.runner import ModelRunner
from engine.service import NUM_READERS, AdapterReader, AsyncEngine
from lora.convert import compute_alone
from lora.page_image import PackedAdapter

T = TypeVar("T")


class FolderReader:
    """A reader of PEFT folders: reads and checks on a worker thread, inserts into the pool between
    two steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        # The buffers that no thread reads into: `AsyncEngine` has a thread for each.
        self._buffers = deque(runner.make_read_buffer() for _ in range(NUM_READERS))

    def read(self, digest: str, path: str) -> Callable[[], object]:
        buffer = self._buffers.pop()

        def read() -> PackedAdapter:
            compute_alone()
            return self._runner.read_adapter(digest, Path(path), buffer)

        try:
            adapter = _apart(read)
        finally:
            torch.set_num_threads(self._runner.num_threads)  # of threads that begin later
            self._buffers.append(buffer)

        return partial(self._runner.adapters.insert, adapter)


def _apart(work: Callable[[], T]) -> T:
    """Runs the work in a thread that ends with it: only the engine's own thread may keep OpenMP
    workers.

    libgomp gives each computing thread a team of its own. Once all teams together outnumber the
    cores, their workers sleep between products instead of spinning: on 2 cores a small product took
    72 us instead of 7, a step of 16 sequences with adapters 210 ms instead of 107.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def open_engine(
    config: EngineConfig, reader_of: Callable[[ModelRunner], AdapterReader] = FolderReader
) -> AsyncEngine:
    """Loads the model (minutes for a large model). The caller starts the engine."""
    runner = _apart(lambda: ModelRunner(config))
    try:
        # A reader zeroes its first buffer, with OpenMP workers.
        return _engine_of(config, runner, _apart(lambda: reader_of(runner)))
    except BaseException:
        runner.close()
        raise


def _engine_of(config: EngineConfig, runner: ModelRunner, reader: AdapterReader) -> AsyncEngine:
    model = runner.model_config
    # Before the engine is ready: it takes some tenths of a second, in which no thread can step.
    grammars = Grammars.load(Path(config.model_path), model.vocab_size, model.eos_token_ids)
    engine = AsyncEngine(Engine(config, runner, grammars=grammars), reader)
    # Otherwise the engine's thread would take over the number of the threads that read adapters.
    engine.call(partial(torch.set_num_threads, runner.num_threads))
    if runner.group is not None:
        runner.group.watch(engine.fail)
    return engine
