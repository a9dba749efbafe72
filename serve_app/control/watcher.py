"""Watches the registry: polls it, reads it at once when woken, waits longer while it is down.

Keeps the last good catalog. A single read runs at a time; a wake during a read leads to exactly one
more. However often it is woken, reading uses at most half of the time, unless a read lasts longer
than 30 s. Logs and counts the changes. Ignorant of how the registry is read (by a function that
blocks) and of the use that is made of changes. `register_webhook` has the registry send wakes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from registry.catalog import Catalog
from registry.errors import RegistryError
from registry.events import KINDS, Change, changes
from serve_app.config import WEBHOOK_SECRET, secret
from serve_app.metrics.exposition import as_text, counter, gauge
from serve_app.platform_view import RegistryReader
from serve_app.tasks import share, spawn

logger = logging.getLogger(__name__)

OnChanges = Callable[[tuple[Change, ...]], None]

MIN_PAUSE_S = 0.1  # between two reads, however often it is woken
_MAX_BACKOFF = 10  # intervals
_MAX_BACKOFF_S = 30.0
_WEBHOOK_RETRY_S = 60.0
# Time for a first answer of the registry, once it is open; then the stored catalog is used.
REGISTRY_WAIT_S = 5.0
_SILENT_S = 60.0  # of a read; listing many thousand versions takes seconds
_RETRY_S = 30.0  # after a catalog that could not be written
_SHOWN_CHANGES = 20  # logged of one snapshot


class Watcher:
    """All methods belong to the event loop."""

    def __init__(
        self,
        read: Callable[[], Catalog],
        interval_s: float,
        on_changes: OnChanges = lambda changed: None,
    ) -> None:
        """`on_changes`: called with the changes after each new catalog but the first."""
        self.catalog: Catalog | None = None  # the last good catalog
        self.error: str | None = None  # why the registry cannot be read; a single text per outage
        self.last_success_s = 0.0  # Unix time; 0: never
        self.read_duration_s = 0.0  # duration of the last good read
        self.read_began_s = 0.0  # when the last good read began, the loop's clock; 0: none yet
        self.changed = asyncio.Event()  # set when catalog or error changed, or a round is due
        self._read = read
        self._interval_s = interval_s
        self._on_changes = on_changes
        self._num_changes: Counter[str] = Counter()  # by kind
        self._woken = asyncio.Event()
        self._num_failures = 0  # since the last success
        self._failing_since_s = 0.0

    def start_with(self, stored: Catalog) -> None:
        """Uses the catalog of an earlier run until the registry answers, unless it has answered
        meanwhile. Until then `error` is set."""
        if self.catalog is None:
            self.catalog = stored
            if self.error is None:
                self.error = "the registry has not answered since the start"
            self.changed.set()

    def wake(self) -> None:
        """Reads the registry now: something in it changed."""
        self._woken.set()

    def metrics(self, reconcile_age_s: float) -> bytes:
        """There is a single manager, so no label names a process."""
        is_up = self.error is None and self.catalog is not None
        num_changes = {kind: self._num_changes[kind] for kind in KINDS}
        return as_text(
            gauge("loraplex_registry_up", float(is_up)),
            gauge("loraplex_registry_last_success_timestamp_seconds", self.last_success_s),
            gauge("loraplex_registry_snapshot_seconds", self.read_duration_s),
            gauge("loraplex_reconcile_age_seconds", reconcile_age_s),
            counter("loraplex_registry_changes", num_changes, {}, "kind"),
        )

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when catalog or error changed since the last call, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        self.changed.clear()

    async def run(self) -> None:
        while True:
            self._woken.clear()  # before the read, which may miss a change that wakes us during it
            began_s = time.monotonic()
            await self._read_once()
            await self._pause(time.monotonic() - began_s)

    async def _read_once(self) -> None:
        began_s = time.monotonic()
        loop_began_s = asyncio.get_running_loop().time()
        try:
            fresh = await self._answer()
        except RegistryError as error:
            self._fail(str(error))
        except Exception as error:  # a bug here or in MLflow must not end the watch
            logger.exception("reading the registry failed")
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self.read_duration_s = time.monotonic() - began_s
            self.read_began_s = loop_began_s
            try:
                self._succeed(fresh)
            except Exception:  # the catalog is stored, and the next read follows
                logger.exception("publishing the registry's changes failed")

    async def _answer(self) -> Catalog:
        """Reads the registry. Without an answer for long it counts as down, though the read goes
        on: it consists of many calls, of which each has a limit."""
        reading = share(asyncio.to_thread(self._read), "read-registry")
        try:
            done, _ = await asyncio.wait((reading,), timeout=_SILENT_S)
            if not done:
                self._fail(f"no answer for {_SILENT_S:g} s")
            return await reading
        finally:
            reading.cancel()

    def _fail(self, error: str) -> None:
        self._num_failures += 1
        if self.error is None:
            use = "no catalog of it is known yet"
            if self.catalog is not None:
                use = "its last good catalog stays in use"
            logger.warning("the registry cannot be read, %s: %s", use, error)
            self._failing_since_s = time.monotonic()
            # Later texts are dropped: they count the tries, and each would be a new view.
            self.error = error
            self.changed.set()

    def _succeed(self, fresh: Catalog) -> None:
        self.last_success_s = time.time()
        if self.error is not None:
            if self._num_failures:  # otherwise it was only slow at the start
                logger.info(
                    "the registry can be read again after %.0f s and %d failed reads",
                    *(time.monotonic() - self._failing_since_s, self._num_failures),
                )
            self.error = None
            self._num_failures = 0
            self.changed.set()
        known = self.catalog
        if known is not None and (fresh is known or fresh == known):
            return  # the known catalog has built its indices already
        self.catalog = fresh
        self.changed.set()
        if known is not None and (found := changes(known, fresh)):
            self._num_changes.update(change.kind for change in found)
            for change in found[:_SHOWN_CHANGES]:
                logger.info("registry: %s", change)
            if len(found) > _SHOWN_CHANGES:
                logger.info("registry: and %d more changes", len(found) - _SHOWN_CHANGES)
            self._on_changes(found)

    async def _pause(self, duration_s: float) -> None:
        # Bounded: after a read that hung for minutes the next must not wait for minutes.
        shortest_s = min(max(MIN_PAUSE_S, duration_s), _MAX_BACKOFF_S)
        await asyncio.sleep(shortest_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._delay_s() - shortest_s)):
                await self._woken.wait()

    def _delay_s(self) -> float:
        interval_s = self._interval_s
        if not self._num_failures:
            return interval_s
        limit_s = max(interval_s, min(interval_s * _MAX_BACKOFF, _MAX_BACKOFF_S))
        doubled_s = interval_s * 2.0 ** min(self._num_failures - 1, 10)
        # Up to half is random: servers that lost a registry at the same time return apart.
        return min(limit_s, doubled_s) * random.uniform(0.5, 1.0)


class StoredCatalog:
    """The last good catalog on this node's disk, with which a manager starts while the registry is
    down. The disk is read and written in threads."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._opened_s: float | None = None  # when the registry was opened, the loop's clock
        self._has_read = False
        self._stored: Catalog | None = None  # as on disk
        self._writing: asyncio.Task[None] | None = None

    async def start(self, registry: RegistryReader) -> None:
        """Gives the watcher the stored catalog if the registry fails or does not answer. Called
        until the watcher has a catalog."""
        if self._has_read:
            return
        watcher, now_s = self._watcher, asyncio.get_running_loop().time()
        if self._opened_s is None:
            self._opened_s = now_s
        if watcher.error is None and now_s - self._opened_s < REGISTRY_WAIT_S:
            return
        self._has_read = True
        stored = await asyncio.to_thread(registry.stored_catalog)
        why = watcher.error or f"no answer for {REGISTRY_WAIT_S:g} s"
        if stored is None:
            logger.error(
                "the registry does not answer and this node has stored no catalog of it: nothing "
                "is served until it answers (%s)",
                why,
            )
        elif watcher.catalog is None:
            logger.warning(
                "the registry does not answer, starting with the stored catalog: %s", why
            )
            self._stored = stored
            watcher.start_with(stored)

    def keep(self, registry: RegistryReader) -> None:
        """Begins to write the watcher's catalog if it is new and no write runs. Returns at once."""
        catalog = self._watcher.catalog
        is_news = catalog is not self._stored and self._watcher.error is None
        # A catalog without a base would serve no model.
        if catalog is None or not catalog.bases or not is_news or self._writing is not None:
            return
        self._stored = catalog
        self._writing = spawn(self._write(registry, catalog), "store-catalog")

    async def _write(self, registry: RegistryReader, catalog: Catalog) -> None:
        try:
            await asyncio.to_thread(registry.store_catalog, catalog)
        except Exception:  # e.g. a full disk: retried later, not in each round
            logger.exception(
                "the catalog could not be stored; it is tried again in %.0f s", _RETRY_S
            )
            await asyncio.sleep(_RETRY_S)
            self._stored = None
        finally:
            self._writing = None


async def register_webhook(registry: RegistryReader, url: str) -> None:
    """Has the registry call `url` after each change; tries until it succeeds. Polling sees every
    change without it, only later."""
    key = secret(WEBHOOK_SECRET)
    if key is None:
        logger.error(
            "the webhook %s is not registered: set %s; polling continues", url, WEBHOOK_SECRET
        )
        return
    while True:
        try:
            await asyncio.to_thread(registry.ensure_webhook, url, key)
            logger.info("the registry calls %s after each change", url)
            return
        except RegistryError as error:
            logger.warning(
                "the webhook %s is not registered yet, polling continues: %s", url, error
            )
        except Exception:
            logger.exception("the webhook %s is not registered yet, polling continues", url)
        await asyncio.sleep(_WEBHOOK_RETRY_S)
