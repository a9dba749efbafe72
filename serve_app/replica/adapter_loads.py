"""How one engine gets its adapters: fetched, checked, loaded, once for all who wait.

What lies on this node's disk never waits behind a download; downloads are few at a time. Bad files
go into quarantine. Files that the engine refuses would be refused again: the client gets the reason
at once, and they are read again after a pause only. Ignorant of requests and of who wants an
adapter in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ray.exceptions import RayTaskError

from engine.refusals import NO_ROOM, REFUSALS
from registry.entities import AdapterVersion
from registry.errors import ArtifactError, QuarantinedError
from registry.quarantine import Quarantine
from serve_app.errors import AdapterUnsupportedError, ServiceUnavailableError
from serve_app.metrics.adapter_loads import LoadTimes
from serve_app.platform_view import RegistryReader
from serve_app.ray_calls import root_cause
from serve_app.tasks import share

logger = logging.getLogger(__name__)

Source = Literal["disk", "registry"]

_NUM_DOWNLOADS = 4  # at a time; each may wait for a slow store
_NUM_LOCAL = 2  # threads that only look at local copies
_FIRST_RETRY_S = 5  # after that the quarantine says
_OTHER_RETRY_S = 30
_ROOM_WAIT_S = 60.0  # for requests to end, while all of the host tier is in use
_ROOM_POLL_S = (0.2, 2.0)  # the first and the last: each look reads the files again


# The engine's: (name, digest, folder); once a digest, however many ask.
Load = Callable[[str, str, str], Awaitable[object]]


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    """It was in the engine's memory a moment ago."""

    task: asyncio.Task[Source]
    found_in: Source | None  # None: it was there when it was asked for


class AdapterLoads:
    def __init__(self, registry: RegistryReader, load: Load) -> None:
        self.times = LoadTimes()
        self.has_loaded = asyncio.Event()  # set after each; who waits clears it
        self._registry = registry
        self._load_into_engine = load
        self._tasks: dict[str, asyncio.Task[Source]] = {}  # by digest; kept when done
        self._refused = Quarantine()  # by this engine; what cannot be fetched is the registry's
        self._downloads = ThreadPoolExecutor(_NUM_DOWNLOADS, thread_name_prefix="download")
        self._local = ThreadPoolExecutor(_NUM_LOCAL, thread_name_prefix="local-copy")

    @property
    def num_refused(self) -> int:
        return len(self.refused)

    @property
    def refused(self) -> dict[str, str]:
        """Digest -> why the engine refuses its files."""
        return {digest: one.reason for digest, one in self._refused.verdicts().items()}

    async def ensure(self, adapter: AdapterVersion) -> LoadResult:
        """One load a digest, shared by all who wait; a failure fails them, the next one retries."""
        task = self._tasks.get(adapter.digest)
        if task is not None and _has_succeeded(task):
            return LoadResult(task, None)
        if task is None or task.done():
            task = share(self._load(adapter), "load-adapter")
            task.add_done_callback(_was_read)
            self._tasks[adapter.digest] = task
        return LoadResult(task, await asyncio.shield(task))  # who leaves stops it for nobody

    def forget(self, digest: str, loaded: LoadResult | None = None) -> None:
        """The engine does not have it any more: the next `ensure` loads it again. `loaded`: unless
        another load has begun since."""
        task = self._tasks.get(digest)
        if task is not None and task.done() and (loaded is None or loaded.task is task):
            del self._tasks[digest]

    async def local_digests(self) -> frozenset[str]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._local, self._registry.local_digests)

    async def _load(self, adapter: AdapterVersion) -> Source:
        began_s = time.monotonic()
        try:
            self._refused.check(adapter.digest)
        except QuarantinedError as error:
            raise _unsupported(adapter, error) from None
        try:
            source: Source = "disk" if adapter.digest in await self.local_digests() else "registry"
            try:
                await self._fetch_and_load(adapter, source)
            except REFUSALS:
                # Registration validates: the registry holds what it should not, or our disk rots.
                if await asyncio.to_thread(self._registry.verify, adapter):
                    raise
                await self._fetch_and_load(adapter, "registry")
        except REFUSALS as error:
            self._refused.add(adapter.digest, str(error))
            raise _unsupported(adapter, error) from None
        except QuarantinedError as error:
            raise _unavailable(adapter, error, error.retry_after_s) from error
        except ArtifactError as error:
            raise _unavailable(adapter, error, _FIRST_RETRY_S) from error
        except RayTaskError as error:
            raise _unavailable(adapter, root_cause(error), _OTHER_RETRY_S) from None
        self._refused.clear(adapter.digest)
        self.times.observe(source, time.monotonic() - began_s)
        self.has_loaded.set()
        logger.info("adapter %s (%s) loaded", adapter.name, adapter.digest[:12])
        return source

    async def _fetch_and_load(self, adapter: AdapterVersion, source: Source) -> None:
        """Its files stay in the cache as long as the engine reads them."""
        lane = self._local if source == "disk" else self._downloads
        loop = asyncio.get_running_loop()
        folder = await loop.run_in_executor(lane, self._registry.fetch, adapter)
        try:
            await self._read(adapter, folder)
        finally:
            self._registry.release(folder)

    async def _read(self, adapter: AdapterVersion, folder: Path) -> None:
        until_s = time.monotonic() + _ROOM_WAIT_S
        delay_s, max_delay_s = _ROOM_POLL_S
        while True:
            try:
                await self._load_into_engine(adapter.name, adapter.digest, str(folder))
                return
            except RayTaskError as error:
                cause = root_cause(error)
                if isinstance(cause, REFUSALS):
                    raise cause from None
                if not isinstance(cause, NO_ROOM) or time.monotonic() > until_s:
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, max_delay_s)


def _has_succeeded(task: asyncio.Task[Source]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _was_read(task: asyncio.Task[Source]) -> None:
    """Its failure: asyncio logs a traceback where all who waited have left."""
    if not task.cancelled():
        task.exception()


def _unsupported(adapter: AdapterVersion, error: Exception) -> AdapterUnsupportedError:
    return AdapterUnsupportedError(
        f"The adapter {adapter.name!r} version {adapter.version} cannot be served: {error}"
    )


def _unavailable(
    adapter: AdapterVersion, error: BaseException, retry_after_s: int
) -> ServiceUnavailableError:
    words = f"The adapter {adapter.name!r} cannot be loaded: {error}"
    return ServiceUnavailableError(words, retry_after_s)
