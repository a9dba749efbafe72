"""The loads of adapters into an engine: fetched, checked and loaded once for all waiting callers.

Files on this node's disk never wait behind a download; few downloads run at a time. Bad files are
quarantined. Files that the engine refuses would be refused again: the client gets the reason at
once, and they are read again only after a pause. `publish` reports the node's files and the load
times to the engine's process, which sends them to the ingresses. Ignorant of requests and of the
reasons for a load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ray.exceptions import RayActorError, RayTaskError

from engine.errors import NO_ROOM, REFUSALS, UnknownAdapterError, UnsupportedModelError
from engine.types import Resident
from registry.entities import AdapterVersion
from registry.errors import ArtifactError, QuarantinedError, RegistryError
from registry.quarantine import Quarantine
from serve_app.errors import AdapterUnsupportedError, ServiceUnavailableError
from serve_app.metrics.replica import LoadTimes
from serve_app.platform_view import RegistryReader
from serve_app.ray_calls import call_apart, root_cause
from serve_app.tasks import has_failed, share
from serve_app.text.adapter_text import own_files, read_adapter_files
from serve_app.text.base_text import read_files

logger = logging.getLogger(__name__)

Source = Literal["disk", "registry"]

_NUM_TRIES = 3  # of a use of an adapter that is evicted between its load and its use
_NUM_DOWNLOADS = 4  # at a time; each may wait for a slow store
_NUM_LOCAL = 2  # threads that only read local copies
_FIRST_RETRY_S = 5  # later retries: as the quarantine returns
_OTHER_RETRY_S = 30
_ROOM_WAIT_S = 60.0  # for requests to end, while all of the host tier is in use
_ROOM_POLL_S = (0.2, 2.0)  # first and longest pause: each try reads the files again
# Other processes change the disk, too: reported every 3 s, and after each load.
_PUBLISH_EVERY_S = 3.0
_PUBLISH_PAUSE_S = 0.2  # at least, between two reports: loads come in bursts

Load = Callable[[str, str, str], Awaitable[object]]  # (name, digest, folder)
# (digests on disk, mean seconds of loads from disk, from the registry)
Report = Callable[[tuple[str, ...], float, float], Awaitable[object]]


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    """A load that has succeeded. The engine may have evicted the adapter since."""

    task: asyncio.Task[Source]
    found_in: Source | None  # None: the adapter was in memory already


def slowest(sources: Sequence[Source | None]) -> Source | None:
    """Returns the place of the adapter that a request waited longest for; None: all in memory."""
    return "registry" if "registry" in sources else "disk" if "disk" in sources else None


class AdapterLoads:
    def __init__(self, registry: RegistryReader, load: Load) -> None:
        """`load`: the engine's; called once per digest, by any number of waiting callers."""
        self.times = LoadTimes()
        self._versions: dict[str, AdapterVersion] = {}  # the newest of each digest that was used
        self._has_loaded = asyncio.Event()  # set after each load; cleared by `publish`
        self._registry = registry
        self._load_into_engine = load
        self._tasks: dict[str, asyncio.Task[Source]] = {}  # by digest; kept when done
        self._logged = ""  # the reason of the last failure
        self._refused = Quarantine()  # by this engine; the registry has its own quarantine
        self._downloads = ThreadPoolExecutor(_NUM_DOWNLOADS, thread_name_prefix="download")
        self._local = ThreadPoolExecutor(_NUM_LOCAL, thread_name_prefix="local-copy")

    @property
    def refused(self) -> dict[str, str]:
        """The reasons why the engine refuses files, by digest."""
        return {digest: entry.reason for digest, entry in self._refused.verdicts().items()}

    async def ensure(self, adapter: AdapterVersion) -> LoadResult:
        """Returns once the adapter was loaded. All waiting callers share a load per digest; a
        failure fails them all, and the next call tries again."""
        self._versions[adapter.digest] = adapter
        task = self._tasks.get(adapter.digest)
        if task is not None and task.done() and not has_failed(task):
            return LoadResult(task, None)
        if task is None or task.done():
            task = share(self._load(adapter), "load-adapter")
            task.add_done_callback(has_failed)  # reads the error: all callers may have left
            self._tasks[adapter.digest] = task
        return LoadResult(task, await asyncio.shield(task))  # a cancelled caller does not stop it

    async def use(
        self,
        adapters: Sequence[AdapterVersion],
        call: Callable[[Sequence[LoadResult]], Awaitable[object]],
    ) -> None:
        """Loads the adapters, all at once, and awaits `call`, again if the engine evicted one
        meanwhile, from the device or from host memory. A failed load fails the use."""
        for tries_left in reversed(range(_NUM_TRIES)):
            loaded = await asyncio.gather(*(self.ensure(one) for one in adapters))
            try:
                await call(loaded)
                return
            except Exception as error:
                if not tries_left or not isinstance(root_cause(error), UnknownAdapterError):
                    raise
            for one, result in zip(adapters, loaded, strict=True):
                self.forget(one.digest, result)

    def forget(self, digest: str, loaded: LoadResult | None = None) -> None:
        """Has the next `ensure` load the adapter again: the engine no longer has it. With `loaded`,
        only if no other load has begun since."""
        task = self._tasks.get(digest)
        if task is not None and task.done() and (loaded is None or loaded.task is task):
            del self._tasks[digest]

    def versions(self, residents: Iterable[Resident]) -> Mapping[str, AdapterVersion]:
        """Returns the versions of the adapters in the engine's memory, by digest, and forgets the
        versions of all other adapters that are not being loaded."""
        kept = {one.digest for one in residents}
        kept |= {digest for digest, task in self._tasks.items() if not task.done()}
        self._versions = {d: version for d, version in self._versions.items() if d in kept}
        return self._versions

    async def own_text(self, adapter: AdapterVersion, base_folder: Path) -> dict[str, bytes]:
        """Returns the text files that the adapter brings, see `adapter_text.own_files`. Raises
        AdapterUnsupportedError, ServiceUnavailableError or a RegistryError."""
        local = await self.local_digests()
        threads = self._local if adapter.digest in local else self._downloads
        try:
            return await asyncio.get_running_loop().run_in_executor(
                threads, self._read_own_text, adapter, base_folder
            )
        except UnsupportedModelError as error:
            raise _unsupported(adapter, error) from None
        except (QuarantinedError, ArtifactError) as error:
            raise _unavailable(adapter, error) from None

    def _read_own_text(self, adapter: AdapterVersion, base_folder: Path) -> dict[str, bytes]:
        folder = self._registry.fetch(adapter)
        try:
            return own_files(read_files(base_folder), read_adapter_files(folder))
        finally:
            self._registry.release(folder)

    async def local_digests(self) -> frozenset[str]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._local, self._registry.local_digests)

    async def publish(self, report: Report) -> None:
        """Calls `report` when the node's files or the load times changed. Returns when the engine's
        process is gone."""
        reported: tuple[tuple[str, ...], float, float] | None = None
        while True:
            self._has_loaded.clear()
            try:
                digests = tuple(sorted(await self.local_digests()))
                current = digests, self.times.recent_s("disk"), self.times.recent_s("registry")
                if current != reported:
                    await report(*current)
                    reported = current
            except RayActorError:
                return
            except Exception:  # of the disk; routing only has older data until it recovers
                logger.exception("the adapters on this node's disk could not be listed")
            await asyncio.sleep(_PUBLISH_PAUSE_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_loaded.wait(), _PUBLISH_EVERY_S)

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
                # Registration checks files: these were registered without, or our disk is corrupt.
                if await asyncio.to_thread(self._registry.verify, adapter):
                    raise
                await self._fetch_and_load(adapter, "registry")
        except REFUSALS as error:
            self._refused.add(adapter.digest, str(error))
            raise _unsupported(adapter, error) from None
        except (QuarantinedError, ArtifactError) as error:
            raise _unavailable(adapter, error) from error
        except RegistryError as error:
            self._log_failure(adapter, str(error))
            raise
        except RayTaskError as error:
            raise _unavailable(adapter, root_cause(error)) from None
        self._refused.clear(adapter.digest)
        self._logged = ""
        self.times.observe(source, time.monotonic() - began_s)
        self._has_loaded.set()
        logger.info("adapter %s (%s) loaded", adapter.name, adapter.digest[:12])
        return source

    def _log_failure(self, adapter: AdapterVersion, words: str) -> None:
        """Logs the reason of a failure that clients do not get, once until it changes or passes:
        each request would try again."""
        if words != self._logged:
            self._logged = words
            logger.warning("adapter %s could not be loaded: %s", adapter.name, words)

    async def _fetch_and_load(self, adapter: AdapterVersion, source: Source) -> None:
        """Keeps the files in the cache while the engine reads them."""
        threads = self._local if source == "disk" else self._downloads
        loop = asyncio.get_running_loop()
        folder = await loop.run_in_executor(threads, self._registry.fetch, adapter)
        try:
            await self._read(adapter, folder)
        finally:
            self._registry.release(folder)

    async def _read(self, adapter: AdapterVersion, folder: Path) -> None:
        until_s = time.monotonic() + _ROOM_WAIT_S
        delay_s, max_delay_s = _ROOM_POLL_S
        while True:
            try:
                # Apart: Ray would cancel it with the request that began it, and others wait, too.
                await call_apart(self._load_into_engine, adapter.name, adapter.digest, str(folder))
                return
            except RayTaskError as error:
                cause = root_cause(error)
                if isinstance(cause, REFUSALS):
                    raise cause from None
                if not isinstance(cause, NO_ROOM) or time.monotonic() > until_s:
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, max_delay_s)


def _unsupported(adapter: AdapterVersion, error: Exception) -> AdapterUnsupportedError:
    return AdapterUnsupportedError.of(adapter.name, adapter.version, error)


def _unavailable(adapter: AdapterVersion, error: BaseException) -> ServiceUnavailableError:
    retry_s = _FIRST_RETRY_S if isinstance(error, ArtifactError) else _OTHER_RETRY_S
    if isinstance(error, QuarantinedError):
        retry_s = error.retry_after_s
    message = f"The adapter {adapter.name!r} cannot be loaded: {error}"
    return ServiceUnavailableError(message, retry_s)
