"""The text sides of adapters that bring files of their own, as requests need them.

An ingress has the files of each running base. Those of an adapter version come from an engine
replica of its base at the version's first request, which waits for them: an adapter is never served
with its base's template in place of its own. A version without such files costs one look-up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass, replace

from engine.errors import UnsupportedModelError
from registry.entities import AdapterVersion
from serve_app.dispatch.base_handle import BaseHandle, Route
from serve_app.errors import AdapterUnsupportedError, ServiceUnavailableError
from serve_app.ray_calls import RAY_ERRORS, root_cause
from serve_app.routing.lru import LruDict
from serve_app.tasks import share
from serve_app.text.adapter_text import AdapterTexts, Key, key_of

logger = logging.getLogger(__name__)

_MAX_VERSIONS = 1024  # whose own files are kept, a few kilobytes each
_TIMEOUT_S = 60.0  # the version may have to be downloaded first
_FETCH_S = 300.0  # of the fetch that many requests share: a lost call must not stay theirs
_RETRY_S = 2

Version = tuple[str, str]  # digests of the base and of the adapter


@dataclass(frozen=True, slots=True)
class _Own:
    """The files that a version brings, or why its base cannot serve them."""

    files: Mapping[str, bytes]
    key: Key
    refusal: str = ""


class TextSides:
    """All methods belong to the event loop."""

    def __init__(self, texts: AdapterTexts | None = None) -> None:
        self._texts = texts or AdapterTexts()
        self._own: LruDict[Version, _Own] = LruDict(_MAX_VERSIONS)
        self._opening: dict[Version, asyncio.Task[None]] = {}

    async def with_text(self, route: Route) -> Route:
        """Returns the route with the text side of its adapter. `route`: as the gateway returned it.
        Raises AdapterUnsupportedError, ServiceUnavailableError or a RegistryError."""
        adapter = route.resolution.adapter
        if adapter is None or not adapter.text:
            return route
        while (found := self.find(route.handle, adapter)) is None:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await asyncio.shield(self.begin(route.handle, adapter))
            except TimeoutError:
                raise _unavailable(adapter, f"did not arrive within {_TIMEOUT_S:g} s") from None
        return replace(route, handle=found)

    def find(self, base: BaseHandle, adapter: AdapterVersion) -> BaseHandle | None:
        """Returns the base's handle with the adapter's text side, or None while that is not here.
        Raises AdapterUnsupportedError."""
        if not adapter.text:
            return base
        own = self._own.get(_version(base, adapter))
        if own is None:
            return None
        if own.refusal:
            raise AdapterUnsupportedError(own.refusal)
        if not own.files:
            return base
        text = self._texts.find(own.key)
        return None if text is None else base.with_adapter(text, own.files)

    def begin(self, base: BaseHandle, adapter: AdapterVersion) -> asyncio.Task[None]:
        """Begins to fetch and to open a text side, once for all that wait for it."""
        version = _version(base, adapter)
        task = self._opening.get(version)
        if task is None:
            # In a context of its own: Serve's router cannot distinguish calls of one HTTP request.
            task = share(self._open(base, adapter), "open-adapter-text", Context())
            self._opening[version] = task
            task.add_done_callback(lambda done: self._forget(version, done))
        return task

    def _forget(self, version: Version, task: asyncio.Task[None]) -> None:
        del self._opening[version]
        if not task.cancelled() and task.exception() is not None:
            logger.warning("the text files of an adapter could not be read: %s", task.exception())

    async def _open(self, base: BaseHandle, adapter: AdapterVersion) -> None:
        version = _version(base, adapter)
        own = self._own.get(version)
        if own is None:
            own = await _fetch(base, adapter)
        if own.files:
            try:
                await asyncio.to_thread(self._texts.open, own.key, base.text)
            except UnsupportedModelError as error:
                refusal = AdapterUnsupportedError.of(adapter.name, adapter.version, error)
                own = replace(own, refusal=str(refusal))
        self._own.put(version, own)


async def _fetch(base: BaseHandle, adapter: AdapterVersion) -> _Own:
    try:
        async with asyncio.timeout(_FETCH_S):
            answer: object = await base.handle.adapter_text.remote(adapter)
    except TimeoutError:
        raise _unavailable(adapter, f"did not arrive within {_FETCH_S:g} s") from None
    except RAY_ERRORS as error:
        cause = root_cause(error)
        if not isinstance(cause, RAY_ERRORS):
            raise cause from None
        raise _unavailable(adapter, "cannot be fetched at the moment") from error
    if isinstance(answer, AdapterUnsupportedError):
        return _Own({}, key_of(base.description.digest, {}), str(answer))
    assert isinstance(answer, dict)
    return _Own(answer, key_of(base.description.digest, answer))


def _unavailable(adapter: AdapterVersion, why: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(f"The text files of adapter {adapter.name!r} {why}.", _RETRY_S)


def _version(base: BaseHandle, adapter: AdapterVersion) -> Version:
    return base.description.digest, adapter.digest
