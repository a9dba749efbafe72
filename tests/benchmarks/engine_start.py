"""The engine of a server as it is, with a note of what its start took: `serve --first-minute`.

The note is a file in the home: the seconds until the weights are loaded, and until the engine is
open. The functions that load weights are wrapped, nothing else is changed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.factory import open_engine
from engine.service import AsyncEngine
from engine.weights import WeightBuilder

_FILE = "engine_start.json"
_LOADERS = ("load", "fill_randomly")  # of WeightBuilder


def open_timed_engine(config: EngineConfig) -> AsyncEngine:
    """Opens the engine as `engine.factory.open_engine` does."""
    weights_s: list[float] = []
    began_s = time.perf_counter()
    with ExitStack() as wrapped:
        for name in _LOADERS:
            wrapped.enter_context(_timed(name, weights_s))
        opened = open_engine(config)
    if not weights_s:
        raise RuntimeError(f"none of {', '.join(_LOADERS)} of WeightBuilder loaded the weights")
    note = {"weights_s": sum(weights_s), "open_s": time.perf_counter() - began_s}
    path = Path(os.environ["LORAPLEX_HOME"]) / _FILE
    path.write_text(json.dumps(note))
    return opened


def take_note(home: Path) -> dict[str, float]:
    """Returns the note of the newest start and removes it."""
    path = home / _FILE
    note: dict[str, float] = json.loads(path.read_text())
    path.unlink()
    return note


@contextmanager
def _timed(name: str, seconds: list[float]) -> Iterator[None]:
    original: Callable[..., Any] = getattr(WeightBuilder, name)

    def load(*arguments: object, **options: object) -> object:
        began_s = time.perf_counter()
        weights = original(*arguments, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
        return weights

    setattr(WeightBuilder, name, load)
    try:
        yield
    finally:
        setattr(WeightBuilder, name, original)
