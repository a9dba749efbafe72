"""The manager's side of the keys: the book of all keys, its database, and the changes for the
ingresses.

Only this writes the database, always in a thread. While the database is away the book stays as it
was: the keys in it keep working, and orders are refused with 503.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from msgspec.structs import asdict

from serve_app.admin_api import KeyLine
from serve_app.errors import ApiError, ConflictError, ServiceUnavailableError
from serve_app.tasks import keep
from serve_app.tenancy.caller import KeyPolicy
from serve_app.tenancy.keys import (
    KEY_PREFIX,
    PepperError,
    digest,
    is_id,
    kept_pepper,
    new_id,
    new_key,
)
from serve_app.tenancy.orders import Act, KeyOrder
from serve_app.tenancy.store import Store, StoredKey, StoreUnavailableError
from serve_app.tenancy.table import KeyDelta, KeyEntry

logger = logging.getLogger(__name__)

POLL_S = 1.0  # between two looks at the revision: another manager may have changed a key
_MAX_CHANGES = 10_000  # remembered; an ingress that missed more receives the whole table
_POLICY_FIELDS = frozenset(one.name for one in fields(KeyPolicy))

Json = dict[str, Any]


class KeyService:
    """All methods belong to the event loop of the manager."""

    def __init__(
        self,
        url: str,
        pepper: str | None,
        home: Path | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`pepper`: of the environment. Raises ValueError and PepperError."""
        self._pepper = kept_pepper(pepper, home)
        self.store = Store(url)
        self._clock = clock
        self._epoch = token_hex(4)
        self._keys: dict[str, StoredKey] = {}
        self._revision: int | None = None  # of the database; None until it was read
        self._is_upgraded = False
        self._num_changes = 0  # of the book
        self._changes: deque[tuple[int, str]] = deque(maxlen=_MAX_CHANGES)  # number, id
        self._policies: dict[KeyPolicy, KeyPolicy] = {}  # equal ones are one object
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._error = ""  # as last logged

    def start(self) -> None:
        keep(self._follow, "key-store")

    async def delta(self, known: str, timeout_s: float) -> KeyDelta | None:
        """Returns the changes since the revision of an ingress, as soon as there are any;
        None at the time-out, and while the database has never been read."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(
                    lambda: self._revision is not None and self._name() != known
                )
        except TimeoutError:
            return None
        return self._delta(known)

    async def order(self, order: KeyOrder) -> tuple[KeyLine, str]:
        """Carries out an order. Returns the key, and its text if it has a new secret. Raises
        ApiError, ConflictError and StoreUnavailableError; then the keys are unchanged."""
        async with self._lock:
            await self._refresh_for_order()
            text = ""
            if order.kind == "generate":
                key_id = new_id()
                before, text = None, new_key(key_id)
                key = StoredKey(key_id, KeyPolicy(), self._clock(), digest(self._pepper, text))
            else:
                before = key = self._find(order.key)
            key = _changed(key, order.changes)
            self._check_alias(key)
            if order.kind == "rotate":
                text = new_key(key.id)
                until_s = self._clock() + order.grace_s
                own = digest(self._pepper, text)
                former = key.digest if order.grace_s else None
                key = replace(
                    key,
                    digest=own,
                    previous_digest=former,
                    previous_until_s=until_s if former else None,
                )
            shown = None if before is None else _shown(before)
            act = Act(order.actor, f"key.{order.kind}", key.id, shown, _shown(key))
            is_new = before is None
            revision = await asyncio.to_thread(self.store.write_keys, [(key, act)], is_new=is_new)
            await self._written(revision, {key.id: key})
            return line_of(key), text

    async def revoke(self, actor: str, references: Sequence[str]) -> list[str]:
        """Revokes these keys, ids or aliases, all at once. Returns their ids. Raises ApiError if
        one of them is unknown, and ServiceUnavailableError; then none is revoked."""
        async with self._lock:
            await self._refresh_for_order()
            found = {key.id: key for key in map(self._find, references)}
            now_s = self._clock()
            ended = {one.id: replace(one, revoked_s=now_s, alias=None) for one in found.values()}
            changes = [
                (key, Act(actor, "key.revoke", key.id, _shown(found[key.id])))
                for key in ended.values()
            ]
            if changes:
                revision = await asyncio.to_thread(self.store.write_keys, changes)
                await self._written(revision, ended)
            return list(ended)

    async def lines(self) -> list[KeyLine]:
        """Returns all keys that are not revoked, the oldest first."""
        self._check_read()
        return [line_of(key) for key in self._keys.values() if key.revoked_s is None]

    def policies(self) -> Iterator[tuple[str, KeyPolicy]]:
        """Yields the id and the policy of each key that is not revoked."""
        for key in self._keys.values():
            if key.revoked_s is None:
                yield key.id, key.policy

    async def line(self, reference: str) -> KeyLine:
        self._check_read()
        return line_of(self._find(reference))

    async def note(self, act: Act) -> None:
        async with self._lock:
            await self._refresh_for_order()
            await asyncio.to_thread(self.store.note, act)

    async def acts(self, limit: int, before_id: int | None) -> list[Json]:
        self._check_read()
        found = await asyncio.to_thread(self.store.acts, limit, before_id)
        return [{**one, "at": shown_time(one.pop("at_s"))} for one in found]

    async def _follow(self) -> None:
        while True:
            try:
                async with self._lock:
                    await self._refresh()
                self._log("")
            except StoreUnavailableError as error:
                self._log(f"the database of the keys is away, the known keys stay: {error.reason}")
            except PepperError as error:
                self._log(str(error))
            await asyncio.sleep(POLL_S)

    async def _refresh_for_order(self) -> None:
        """Raises ServiceUnavailableError if the database is away, or of another pepper."""
        try:
            await self._refresh()
        except PepperError as error:
            raise ServiceUnavailableError(str(error), 60) from error

    async def _refresh(self) -> None:
        """Reads the keys if the database has changes."""
        if not self._is_upgraded:
            await asyncio.to_thread(self._open)
            self._is_upgraded = True
        if await asyncio.to_thread(self.store.key_revision) != self._revision:
            await self._read()

    def _open(self) -> None:
        self.store.upgrade()
        self.store.check_pepper(digest(sha256(self._pepper).digest(), "pepper"))

    async def _read(self) -> None:
        revision, keys = await asyncio.to_thread(self.store.read_keys)
        found = {key.id: key for key in keys}
        changed = {key.id: key for key in keys if self._keys.get(key.id) != key}
        gone = {
            key_id: replace(self._keys[key_id], revoked_s=0.0)
            for key_id in self._keys.keys() - found
            if self._keys[key_id].revoked_s is None
        }
        self._revision = revision
        await self._apply(changed | gone)
        self._policies = {key.policy: key.policy for key in self._keys.values()}

    async def _written(self, revision: int, changed: Mapping[str, StoredKey]) -> None:
        """Takes over a change that the database has, at this revision."""
        if self._revision is not None and revision == self._revision + 1:
            self._revision = revision
            await self._apply(changed)
        else:  # another manager changed a key, too
            await self._read()

    async def _apply(self, changed: Mapping[str, StoredKey]) -> None:
        """Puts changed keys into the book and wakes the ingresses' polls."""
        for key in changed.values():
            policy = self._policies.setdefault(key.policy, key.policy)
            self._keys[key.id] = replace(key, policy=policy)
            self._num_changes += 1
            self._changes.append((self._num_changes, key.id))
        async with self._changed:
            self._changed.notify_all()

    def _name(self) -> str:
        return f"{self._epoch}-{self._num_changes}"

    def _delta(self, known: str) -> KeyDelta:
        epoch, _, number = known.partition("-")
        oldest = self._changes[0][0] if self._changes else self._num_changes + 1
        if epoch != self._epoch or int(number) < oldest - 1:
            entries = tuple(_entry(key) for key in self._keys.values() if key.revoked_s is None)
            return KeyDelta(self._name(), entries, (), True, self._pepper)
        # The newest changes are at the right: only changes since the revision are looked at.
        ids: set[str] = set()
        for change, key_id in reversed(self._changes):
            if change <= int(number):
                break
            ids.add(key_id)
        keys = [self._keys[key_id] for key_id in ids]
        entries = tuple(_entry(key) for key in keys if key.revoked_s is None)
        removed = tuple(key.id for key in keys if key.revoked_s is not None)
        return KeyDelta(self._name(), entries, removed, False, self._pepper)

    def _find(self, reference: str) -> StoredKey:
        key = self._keys.get(reference)
        if key is None and reference:
            key = next((one for one in self._keys.values() if one.alias == reference), None)
        if key is None or key.revoked_s is not None:
            # A whole key that was mistyped is not repeated.
            is_key = reference.startswith(KEY_PREFIX)
            words = "this id or alias" if is_key else f"the id or alias {reference[:64]!r}"
            raise ApiError(404, f"No key has {words}.", code="key_not_found")
        return key

    def _check_alias(self, key: StoredKey) -> None:
        if key.alias is None:
            return
        if is_id(key.alias):
            raise ApiError(
                400,
                f"key_alias: {key.alias!r} looks like the id of a key; use another name.",
                param="key_alias",
                code="invalid_value",
            )
        if any(one.alias == key.alias and one.id != key.id for one in self._keys.values()):
            raise ConflictError(f"key_alias: another key has the alias {key.alias!r} already")

    def _check_read(self) -> None:
        if self._revision is None:
            raise ServiceUnavailableError("The database of the keys has not been read yet.", 2)

    def _log(self, words: str) -> None:
        """Logs a state of the database once."""
        if words != self._error:
            if words:
                logger.error("%s", words)
            else:
                logger.warning("the database of the keys answers again")
        self._error = words


def _changed(key: StoredKey, changes: Mapping[str, Any]) -> StoredKey:
    policy = {name: value for name, value in changes.items() if name in _POLICY_FIELDS}
    own = {name: value for name, value in changes.items() if name not in _POLICY_FIELDS}
    return replace(key, policy=replace(key.policy, **policy), **own)


def _entry(key: StoredKey) -> KeyEntry:
    previous = key.previous_digest, key.previous_until_s
    return KeyEntry(key.id, key.policy, key.digest, key.expires_s, *previous)


def line_of(key: StoredKey) -> KeyLine:
    """Returns a key as operators see it: with everything but its hashes."""
    policy = key.policy
    return KeyLine(
        token_id=key.id,
        key_name=f"lpx_{key.id}_...",
        key_alias=key.alias,
        team_id=policy.tenant,
        models=policy.models,
        scopes=tuple(sorted(policy.scopes)),
        rpm_limit=policy.requests_per_minute,
        tpm_limit=policy.tokens_per_minute,
        max_parallel_requests=policy.max_parallel_requests,
        tokens_per_day=policy.tokens_per_day,
        tokens_per_month=policy.tokens_per_month,
        max_tokens=policy.max_tokens,
        lowest_priority=policy.lowest_priority,
        metadata=key.metadata,
        created_at=shown_time(key.created_s),
        expires=None if key.expires_s is None else shown_time(key.expires_s),
        previous_secret_until=(
            None if key.previous_until_s is None else shown_time(key.previous_until_s)
        ),
    )


def _shown(key: StoredKey) -> Json:
    return asdict(line_of(key))


def shown_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
