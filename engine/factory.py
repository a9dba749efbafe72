"""Builds the engine of a configuration: the one place where policy meets the device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engine.config import EngineConfig
from engine.core import Engine
from engine.runner import ModelRunner
from engine.service import AdapterReader, AsyncEngine

T = TypeVar("T")


class FolderReader:
    """A reader of PEFT folders: reads and checks on a worker thread, inserts into the pool between
    two steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def read(self, digest: str, path: str) -> Callable[[], None]:
        adapter = _apart(lambda: self._runner.read_adapter(digest, Path(path)))

        def insert() -> None:
            self._runner.insert_adapter(adapter)

        return insert


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
    return AsyncEngine(Engine(config, runner), reader_of(runner))
