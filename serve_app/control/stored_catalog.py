"""The last good catalog on a node's disk: a manager starts with it while the registry is down.

For the event loop: the disk is read and written in threads.
"""

from __future__ import annotations

import asyncio
import logging

from registry.catalog import Catalog
from serve_app.control.watcher import Watcher
from serve_app.platform_view import RegistryReader
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

# Time for a first answer of the registry, once it is open; then the stored catalog is used.
REGISTRY_WAIT_S = 5.0
_RETRY_S = 30.0  # after a catalog that could not be written


class StoredCatalog:
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._opened_s: float | None = None  # when the registry was opened, the loop's clock
        self._has_read = False
        self._stored: Catalog | None = None  # as on disk
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_current(self) -> bool:
        return self._stored is self._watcher.catalog and self._writing is None

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
