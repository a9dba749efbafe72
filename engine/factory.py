"""Builds the engine of a configuration: the one place where policy meets the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.core import Engine
from engine.runner import ModelRunner
from engine.service import AsyncEngine


def open_engine(config: EngineConfig) -> AsyncEngine:
    """Loads the model (minutes for a large one). The caller starts it."""
    runner = ModelRunner(config)
    return AsyncEngine(Engine(config, runner), FolderReader(runner))


class FolderReader:
    """PEFT folders: read and checked on a worker thread, put into the pool between two steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def read(self, digest: str, path: str) -> Callable[[], None]:
        adapter = self._runner.read_adapter(digest, Path(path))

        def insert() -> None:
            self._runner.insert_adapter(adapter)

        return insert
