"""The manager's remote methods about keys and the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.admin_api import KeyLine
from serve_app.config import TenancyArgs, database_url, key_pepper
from serve_app.errors import ApiError
from serve_app.ray_calls import refusing
from serve_app.tenancy.orders import Act, KeyOrder
from serve_app.tenancy.table import KeyDelta

if TYPE_CHECKING:
    from serve_app.tenancy.service import KeyService


class KeyCalls:
    """A base of `Manager`."""

    _keys: KeyService | None  # None: tenancy.enabled is false

    async def key_delta(self, known: str, timeout_s: float) -> KeyDelta | None:
        """See `KeyService.delta`."""
        return await self._opened_keys().delta(known, timeout_s)

    @refusing
    async def order_key(self, order: KeyOrder) -> tuple[KeyLine, str]:
        """See `KeyService.order`."""
        return await self._opened_keys().order(order)

    @refusing
    async def revoke_keys(self, actor: str, references: Sequence[str]) -> list[str]:
        """See `KeyService.revoke`."""
        return await self._opened_keys().revoke(actor, references)

    @refusing
    async def key_lines(self) -> list[KeyLine]:
        return await self._opened_keys().lines()

    @refusing
    async def key_line(self, reference: str) -> KeyLine:
        return await self._opened_keys().line(reference)

    async def note_act(self, act: Act) -> None:
        await self._opened_keys().note(act)

    @refusing
    async def acts(self, limit: int, before_id: int | None) -> list[dict[str, Any]]:
        return await self._opened_keys().acts(limit, before_id)

    def _opened_keys(self) -> KeyService:
        if self._keys is None:
            raise ApiError(
                404, "Keys are off: set tenancy.enabled in the config file.", code="keys_off"
            )
        return self._keys


def open_keys(args: TenancyArgs, home: Path | None) -> KeyService | None:
    """Opens the keys of a manager and begins to follow their database; None if keys are off. Raises
    ValueError and PepperError."""
    if not args.enabled:
        return None
    from serve_app.tenancy.service import KeyService  # imports the database's libraries

    keys = KeyService(database_url(args), key_pepper(), home)
    keys.start()
    return keys
