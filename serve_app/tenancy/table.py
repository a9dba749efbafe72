"""The keys as every ingress has them, all in memory: a check costs one hash and no I/O.

The manager sends the whole table once, and changes after that. While the manager or its database
is away, the last table stays in use.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from serve_app.ray_calls import RAY_ERRORS
from serve_app.tasks import keep
from serve_app.tenancy.caller import Caller, KeyPolicy
from serve_app.tenancy.keys import digest, id_of

logger = logging.getLogger(__name__)

LONG_POLL_S = 20.0
_RETRY_S = 0.5
_NO_DIGEST = bytes(32)  # compared with where there is no such key, so that both take the same time

Reason = Literal["missing", "invalid", "expired"]


class RefusedKeyError(Exception):
    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key that is not revoked."""

    id: str
    policy: KeyPolicy
    digest: bytes = field(repr=False)
    expires_s: float | None = None  # seconds since 1970
    # The secret before the last rotation, which counts until then.
    previous_digest: bytes | None = field(default=None, repr=False)
    previous_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class KeyDelta:
    """The changes of the table since a revision."""

    revision: str
    entries: tuple[KeyEntry, ...]  # new or changed
    removed: tuple[str, ...] = ()  # ids
    is_whole: bool = False  # keys that are not in `entries` are gone
    pepper: bytes = field(default=b"", repr=False)


class KeyTable:
    def __init__(self) -> None:
        self.revision = ""
        self._pepper = b""
        self._entries: dict[str, tuple[KeyEntry, Caller]] = {}

    @property
    def is_known(self) -> bool:
        """False until the first delta has arrived."""
        return bool(self.revision)

    def __len__(self) -> int:
        return len(self._entries)

    def apply(self, delta: KeyDelta) -> None:
        if delta.is_whole:
            self._entries = {}
        for entry in delta.entries:
            self._entries[entry.id] = entry, Caller(entry.id, entry.policy)
        for key_id in delta.removed:
            self._entries.pop(key_id, None)
        self._pepper = delta.pepper
        self.revision = delta.revision

    def present(self, caller: Caller, now_s: float) -> Caller:
        """Returns the caller of this key as it is now. Raises RefusedKeyError if the key was
        revoked or has expired."""
        found = self._entries.get(caller.key_id)
        if found is None:
            raise RefusedKeyError("invalid")
        entry, present = found
        if entry.expires_s is not None and now_s >= entry.expires_s:
            raise RefusedKeyError("expired")
        return present

    def find(self, text: str, now_s: float) -> Caller:
        """Returns the caller whose key this is. `now_s`: seconds since 1970. Raises
        RefusedKeyError."""
        key_id = id_of(text)
        if key_id is None:
            raise RefusedKeyError("invalid")
        given = digest(self._pepper, text)
        found = self._entries.get(key_id)
        if found is None:
            hmac.compare_digest(given, _NO_DIGEST)
            raise RefusedKeyError("invalid")
        entry, caller = found
        if not hmac.compare_digest(given, entry.digest):
            previous, until_s = entry.previous_digest, entry.previous_until_s
            if previous is None or not hmac.compare_digest(given, previous):
                raise RefusedKeyError("invalid")
            if until_s is None or now_s >= until_s:
                raise RefusedKeyError("expired")
        if entry.expires_s is not None and now_s >= entry.expires_s:
            raise RefusedKeyError("expired")
        return caller


# (known revision, time-out in seconds) -> the changes since, None if there were none
Poll = Callable[[str, float], Awaitable[KeyDelta | None]]


def follow(table: KeyTable, poll: Poll) -> asyncio.Task[None]:
    """Begins to keep the table equal to the manager's, by long poll. A failed poll is repeated."""

    async def run() -> None:
        while True:
            try:
                delta = await poll(table.revision, LONG_POLL_S)
            except RAY_ERRORS as error:
                logger.warning("could not receive changes of the keys: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if delta is not None:
                table.apply(delta)

    return keep(run, "follow-keys")
