"""Watches the registry: polls, looks at once when woken, waits longer while it is down.

Keeps the last good catalog. One look at a time; a wake during one leads to exactly one more, and
however often it is woken, looking takes at most half of the time, unless looks take longer than
30 s. Ignorant of what looking is (a function that blocks) and of what the changes are for (whoever
subscribes).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress

from registry.catalog import Catalog
from registry.errors import RegistryError
from registry.events import Change, changes

logger = logging.getLogger(__name__)

Subscriber = Callable[[tuple[Change, ...]], None]

MIN_PAUSE_S = 0.1  # between two looks, however often it is woken
_MAX_BACKOFF = 10  # intervals
_MAX_BACKOFF_S = 30.0


class Watcher:
    """All methods belong to one event loop."""

    def __init__(self, look: Callable[[], Catalog], interval_s: float) -> None:
        self.catalog: Catalog | None = None  # the last good one
        self.error: str | None = None  # why the registry cannot be read; one text an outage
        self.last_success_s = 0.0  # Unix time; 0: never
        self.look_s = 0.0  # what the last good look took
        self.looked_s = 0.0  # the loop's time at which the last good look began; 0: none yet
        self.news = asyncio.Event()  # set when catalog or error changed; its reader clears it
        self._look = look
        self._interval_s = interval_s
        self._subscribers: list[Subscriber] = []
        self._woken = asyncio.Event()
        self._num_failures = 0  # since the last success
        self._failing_since_s = 0.0

    def subscribe(self, subscriber: Subscriber) -> None:
        """Called with what changed, after `catalog` did; not for the first catalog."""
        self._subscribers.append(subscriber)

    def start_with(self, stored: Catalog) -> None:
        """A catalog of an earlier run, until the registry answers; none that came meanwhile is
        replaced. Until then `error` is set."""
        if self.catalog is None:
            self.catalog = stored
            if self.error is None:
                self.error = "the registry has not answered since the start"
            self.news.set()

    def wake(self) -> None:
        """Something changed: look now."""
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()  # before the look: it may miss what wakes us while it runs
            began_s = time.monotonic()
            await self._look_once()
            await self._pause(time.monotonic() - began_s)

    async def _look_once(self) -> None:
        began_s = time.monotonic()
        looked_s = asyncio.get_running_loop().time()
        try:
            fresh = await asyncio.to_thread(self._look)
        except RegistryError as error:
            self._fail(str(error))
        except Exception as error:  # a bug of ours or of MLflow's must not end the watch
            logger.exception("looking into the registry failed")
            self._fail(f"{type(error).__name__}: {error}")
        else:
            self.look_s = time.monotonic() - began_s
            self.looked_s = looked_s
            try:
                self._succeed(fresh)
            except Exception:  # the catalog is in place; the next look comes all the same
                logger.exception("following the registry failed")

    def _fail(self, error: str) -> None:
        self._num_failures += 1
        if self.error is None:
            logger.warning("registry not readable, going on with what is known: %s", error)
            self._failing_since_s = time.monotonic()
            # Not the later texts: they name the try, and each would be news to every ingress.
            self.error = error
            self.news.set()

    def _succeed(self, fresh: Catalog) -> None:
        self.last_success_s = time.time()
        if self.error is not None and not self._num_failures:  # slow at the start, and no more
            self.error = None
            self.news.set()
        elif self.error is not None:
            logger.info(
                "registry readable again after %.0f s and %d tries",
                time.monotonic() - self._failing_since_s,
                self._num_failures,
            )
            self.error = None
            self._num_failures = 0
            self.news.set()
        known = self.catalog
        if known is not None and (fresh is known or fresh == known):
            return  # the known one has its indices already
        self.catalog = fresh
        self.news.set()
        if known is not None and (found := changes(known, fresh)):
            for subscriber in self._subscribers:
                try:
                    subscriber(found)
                except Exception:  # one that fails keeps no other from its news
                    logger.exception("a subscriber of the registry's changes failed")

    async def _pause(self, look_s: float) -> None:
        # Bounded: after one look that hung for minutes the next one must not wait for minutes.
        shortest_s = min(max(MIN_PAUSE_S, look_s), _MAX_BACKOFF_S)
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
        # At most half is left to chance: servers that lost a registry together come back apart.
        return min(limit_s, doubled_s) * random.uniform(0.5, 1.0)
