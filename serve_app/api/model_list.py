"""The response of GET /v1/models: encoded once per view of the platform, and per set of globs that
keys have, then kept as bytes.

For 10,000 adapters it has 1.7 MB and costs 200 ms, during which the event loop keeps running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import islice

import msgspec

from registry.catalog import Resolution
from registry.errors import RegistryError
from serve_app.dispatch.gateway import Gateway
from serve_app.platform_view import PlatformView
from serve_app.tasks import has_failed, share
from serve_app.tenancy.caller import KeyPolicy

Entry = dict[str, str | int | None]

Globs = tuple[str, ...] | None

_MAX_LISTS = 32  # kept; 1.7 MB each for 10,000 adapters
_SLICE = 50  # entries between two turns of the event loop: about 1 ms


class ModelList:
    """The list of an ingress replica. Concurrent callers share one encoding."""

    def __init__(self) -> None:
        self._view: PlatformView | None = None
        self._lengths: dict[str, int | None] = {}
        self._encodings: dict[Globs, asyncio.Task[bytes]] = {}  # the last used at the end

    async def encoded(self, gateway: Gateway, view: PlatformView, globs: Globs = None) -> bytes:
        """Returns the list of the models that a key with these globs may use; None: of all."""
        # Entries depend on the view and on these; None for a base that has never been up.
        lengths = {base.base.digest: gateway.max_model_len(base.base.digest) for base in view.bases}
        is_old = self._view is not view or self._lengths != lengths
        if is_old:
            self._view, self._lengths, self._encodings = view, lengths, {}
        if globs is not None and "*" in globs:
            globs = None
        encoding = self._encodings.pop(globs, None)
        if encoding is None or has_failed(encoding):
            encoding = share(_encode_list(view, lengths, globs), "model-list")
        self._encodings[globs] = encoding
        if len(self._encodings) > _MAX_LISTS:
            del self._encodings[next(iter(self._encodings))]
        return await asyncio.shield(encoding)


def entry_of(model: str, resolution: Resolution, max_model_len: int | None) -> Entry:
    """Returns the description of a model; several adapters together are as new as the newest."""
    base, adapters = resolution.base, [one.version for one in resolution.adapters]
    return {
        "id": model,
        "object": "model",
        "created": max((one.created_s for one in adapters), default=base.created_s),
        "owned_by": "loraplex",
        "root": resolution.versions,
        "parent": base.name if adapters else None,
        "max_model_len": max_model_len,
    }


def names_of(resolution: Resolution) -> tuple[str, ...]:
    """Returns the names that the globs of a key are matched against."""
    base, adapter = resolution.base, resolution.adapter
    if adapter is None:
        return base.name, f"{base.name}@{base.version}"
    version = f"{adapter.name}@{adapter.version}"
    return adapter.name, version, f"{base.name}:{adapter.name}", f"{base.name}:{version}"


async def _encode_list(
    view: PlatformView, lengths: Mapping[str, int | None], globs: Globs
) -> bytes:
    """Encodes the list. `lengths` maps the digests of the bases served here to `max_model_len`."""
    policy = None if globs is None else KeyPolicy(models=globs)
    encode = msgspec.json.encode
    parts: list[bytes] = []
    # In a thread: a new catalog first builds its indices, 130 ms for 10,000 adapters.
    entries = iter(await asyncio.to_thread(view.catalog.entries))
    while batch := tuple(islice(entries, _SLICE)):
        for entry in batch:
            try:
                resolution = view.catalog.resolve(entry.name)
            except RegistryError:  # an adapter whose base version has been removed
                continue
            digest = resolution.base.digest
            is_refused = resolution.adapter is not None and bool(resolution.adapter.refused)
            is_allowed = policy is None or policy.allows(names_of(resolution))
            if digest in lengths and not is_refused and is_allowed:
                parts.append(encode(entry_of(entry.name, resolution, lengths[digest])))
        await asyncio.sleep(0)
    return b'{"object":"list","data":[' + b",".join(parts) + b"]}"
