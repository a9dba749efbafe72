"""The threads of an engine that `open_engine` makes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.factory import FolderReader, open_engine
from engine.runner import ModelRunner
from tests.engine_helpers import make_adapter, make_base


def test_the_thread_that_opens_an_engine_and_reads_adapters_keeps_no_openmp_workers(
    tmp_path: Path,
) -> None:
    """Its workers and the engine's would outnumber the cores, and then sleep between products."""
    base = make_base(tmp_path / "base", num_hidden_layers=4)
    adapter = make_adapter(tmp_path / "adapter", base, 16, ("q_proj", "down_proj"))
    readers: list[FolderReader] = []

    def reader_of(runner: ModelRunner) -> FolderReader:
        readers.append(FolderReader(runner))
        assert runner.adapters.page_bytes > 1 << 16  # else one thread zeroes the buffer alone
        return readers[0]

    def count_new_workers() -> int:
        """Returns the workers that begin at a first product: none if the thread has them."""
        torch.set_num_threads(2)
        config = EngineConfig(str(base), "base", device="cpu", num_blocks=8, num_threads=2)
        open_engine(config, reader_of).stop()
        readers[0].read("adapter", str(adapter))
        before = set(os.listdir("/proc/self/task"))
        torch.ones(1 << 20).add_(1.0)
        return len(set(os.listdir("/proc/self/task")) - before)

    own = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(count_new_workers).result() == 1
    finally:
        torch.set_num_threads(own)
