"""Tokens from the engine's thread to the event loops of their readers, once per step."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import EngineDeadError
from engine.types import TokenOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Stream:
    """The outputs of one request, read in one event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[TokenOutput | EngineDeadError]

    async def next(self) -> TokenOutput:
        item = await self.queue.get()
        if isinstance(item, EngineDeadError):
            raise item
        return item


class Streams:
    """The open streams: opened and closed by readers, fed by the engine's thread."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()

    def open(self, request_id: str) -> Stream | None:
        """Returns None if this request is already being read."""
        with self._lock:
            if request_id in self._streams:
                return None
            stream = Stream(asyncio.get_running_loop(), asyncio.Queue())
            self._streams[request_id] = stream
            return stream

    def close(self, request_id: str) -> None:
        with self._lock:
            del self._streams[request_id]

    def feed(self, outputs: tuple[TokenOutput, ...]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, TokenOutput]]] = {}
        with self._lock:
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, items in by_loop.items():
            _call(loop, items)

    def fail(self, error: EngineDeadError) -> None:
        with self._lock:
            streams = tuple(self._streams.values())
        for stream in streams:
            _call(stream.loop, [(stream, error)])


def _call(
    loop: asyncio.AbstractEventLoop, items: Sequence[tuple[Stream, TokenOutput | EngineDeadError]]
) -> None:
    def put() -> None:
        for stream, item in items:
            stream.queue.put_nowait(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:  # the reader's loop was closed meanwhile
        logger.warning("an event loop was closed while %d outputs were due", len(items))
