"""The engine's async interface: submit, abort and load from any thread, tokens back once per step.

Every command that touches the engine is handed to its loop and runs between two steps. Worker
threads read adapter files, so that a load never stalls a step. When the loop ends, waiting callers
get EngineDeadError. Free of tensors, HTTP and Ray.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeVar

from engine.admission import EngineLimits
from engine.core import Engine
from engine.errors import EngineDeadError, InvalidRequestError
from engine.loop import EngineLoop
from engine.types import EngineLoad, Request, Resident, StepOutput, TokenOutput

logger = logging.getLogger(__name__)
T = TypeVar("T")

NUM_READERS = 2  # threads that read adapter files

Output = TokenOutput | EngineDeadError
Outputs = asyncio.Queue[Output]


class AdapterReader(Protocol):
    def read(self, digest: str, path: str) -> Callable[[], object]:
        """Reads and checks the files, on any thread. The returned function, called between two
        steps, registers the adapter with the engine."""
        ...


class EngineInterface(Protocol):
    """The methods of an engine that its owning process uses."""

    @property
    def model_limits(self) -> EngineLimits: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    async def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str, choice: int | None = None) -> None: ...
    def subscribe(self, callback: Callable[[StepOutput], None]) -> None: ...
    def on_death(self, callback: Callable[[EngineDeadError], None]) -> None: ...
    async def load_adapter(self, name: str, digest: str, path: str) -> None: ...
    async def unload_adapter(self, digest: str) -> None: ...
    async def adapters(self) -> tuple[Resident, ...]: ...
    async def pin_adapter(self, digest: str) -> None: ...
    async def unpin_adapter(self, digest: str) -> None: ...
    async def evict_adapter(self, digest: str) -> None: ...
    def has_adapter(self, digest: str) -> bool: ...
    def load(self) -> EngineLoad: ...
    def last_step_age_s(self) -> float: ...
    def usual_step_s(self) -> float: ...


class AsyncEngine(EngineLoop):
    def __init__(self, engine: Engine, reader: AdapterReader) -> None:
        super().__init__(engine)
        self._reader = reader
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="adapter-reader")
        self._loading: dict[str, Future[None]] = {}
        self._loading_lock = threading.Lock()
        # By request id, of the open generators: written by their event loops.
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, Outputs]] = {}
        self.subscribe(self._notify_step)
        self.on_death(self._notify_death)

    @property
    def model_limits(self) -> EngineLimits:
        return self._engine.limits

    def stop(self) -> None:
        super().stop()
        self._engine.close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    async def submit(self, request: Request) -> None:
        """Returns when the request is admitted; its tokens go to the subscribers."""
        admitted = self.call(lambda: self._engine.add_request(request))
        try:
            await asyncio.wrap_future(admitted)
        except asyncio.CancelledError:
            # It may be admitted already; without a reader it must then be aborted.
            admitted.add_done_callback(lambda done: self._abort_if_admitted(request, done))
            raise

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Aborts a request, or one of its choices, before the next step. Any thread may call it."""
        self.call(lambda: self._engine.abort(request_id, choice))

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """Yields the outputs of all choices as they come. Closing the generator aborts unfinished
        choices."""
        outputs: Outputs = asyncio.Queue()
        stream = asyncio.get_running_loop(), outputs
        if self._streams.setdefault(request.request_id, stream) is not stream:
            raise InvalidRequestError(f"request id {request.request_id} is in use", "request_id")
        num_open = 0
        try:
            await self.submit(request)
            num_open = len(request.choices)
            while num_open:
                output = await outputs.get()
                if isinstance(output, EngineDeadError):
                    raise output
                num_open -= output.finish_reason is not None
                yield output
        finally:
            del self._streams[request.request_id]
            if num_open:
                self.abort(request.request_id)

    async def load_adapter(self, name: str, digest: str, path: str) -> None:
        """Loads an adapter, once per digest however many callers ask at the same time. `name` is
        for the log only."""
        # Asked again after the unloads that were requested earlier.
        if self.has_adapter(digest) and await self._between_steps(lambda: self.has_adapter(digest)):
            return
        loading = self._begin_loading(name, digest, path)
        try:
            await asyncio.shield(asyncio.wrap_future(loading))
        except asyncio.CancelledError:
            if loading.cancelled():  # by `stop`, before a reader began
                raise EngineDeadError("the engine was stopped") from None
            raise

    async def unload_adapter(self, digest: str) -> None:
        """Blocks new requests at once; returns when requests that use the adapter have ended, or
        when a load has cancelled the unload."""
        await asyncio.shield(asyncio.wrap_future(self.call_when_true(self._retirement(digest))))

    async def adapters(self) -> tuple[Resident, ...]:
        """Returns the adapters as they are between two steps."""
        return await self._between_steps(self._engine.adapters)

    async def pin_adapter(self, digest: str) -> None:
        """Raises UnknownAdapterError, or a refusal if the pins would leave too little room."""
        await self._between_steps(lambda: self._engine.pin_adapter(digest))

    async def unpin_adapter(self, digest: str) -> None:
        await self._between_steps(lambda: self._engine.unpin_adapter(digest))

    async def evict_adapter(self, digest: str) -> None:
        """Raises UnknownAdapterError or AdapterInUseError."""
        await self._between_steps(lambda: self._engine.evict_adapter(digest))

    def has_adapter(self, digest: str) -> bool:
        return self._engine.has_adapter(digest)

    def _notify_step(self, step: StepOutput) -> None:
        if self._streams:  # a server subscribes to steps and opens no generator
            self._put((output.request_id, output) for output in step.outputs)

    def _notify_death(self, error: EngineDeadError) -> None:
        self._put((request_id, error) for request_id in tuple(self._streams))

    def _put(self, items: Iterable[tuple[str, Output]]) -> None:
        """Hands outputs to the generators of their requests and wakes each event loop once."""
        due: dict[asyncio.AbstractEventLoop, list[tuple[Outputs, Output]]] = {}
        for request_id, output in items:
            if (stream := self._streams.get(request_id)) is not None:
                loop, outputs = stream
                due.setdefault(loop, []).append((outputs, output))
        for loop, found in due.items():
            with suppress(RuntimeError):  # the reader's loop was closed meanwhile
                loop.call_soon_threadsafe(_put_all, found)

    async def _between_steps(self, command: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.wrap_future(self.call(command)))

    def _abort_if_admitted(self, request: Request, admitted: Future[None]) -> None:
        if not admitted.cancelled() and admitted.exception() is None:
            self.abort(request.request_id)

    def _begin_loading(self, name: str, digest: str, path: str) -> Future[None]:
        with self._loading_lock:
            loading = self._loading.get(digest)
            if loading is None:
                try:
                    loading = self._readers.submit(self._read_and_insert, name, digest, path)
                except RuntimeError:  # shut down meanwhile
                    raise EngineDeadError("the engine was stopped") from None
                self._loading[digest] = loading
        return loading

    def _read_and_insert(self, name: str, digest: str, path: str) -> None:
        try:
            insert = self._reader.read(digest, path)

            def insert_and_keep() -> None:
                self._engine.prepare_for_adapter()
                insert()
                self._engine.keep_adapter(digest)

            self.call(insert_and_keep).result()
            logger.info("adapter %s loaded as %s", digest, name)
        finally:
            with self._loading_lock:
                del self._loading[digest]

    def _retirement(self, digest: str) -> Callable[[], bool]:
        has_begun = False

        def is_over() -> bool:
            nonlocal has_begun
            if has_begun and not self._engine.is_retiring(digest):
                return True  # a load cancelled it
            has_begun = True
            return self._engine.retire_adapter(digest)

        return is_over


def _put_all(found: Sequence[tuple[Outputs, Output]]) -> None:
    for outputs, output in found:
        outputs.put_nowait(output)
