"""Keys for tests: a service on an SQLite file, and orders to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from serve_app.config import TenancyArgs
from serve_app.control.key_calls import KeyCalls, Keys
from serve_app.tenancy.orders import KeyOrder
from serve_app.tenancy.service import KeyService
from serve_app.tenancy.table import KeyTable

PEPPER = "a pepper of the tests, 32 characters or more"


def open_service(folder: Path, **options: Any) -> KeyService:
    return KeyService(f"sqlite:///{folder / 'loraplex.db'}", PEPPER, None, **options)


async def make_key(service: KeyService, **changes: Any) -> tuple[str, str]:
    """Returns the id and the text of a new key."""
    line, text = await service.order(KeyOrder("generate", "admin-token", changes=changes))
    return line.token_id, text


async def table_of(service: KeyService) -> KeyTable:
    """Returns an ingress's table with all keys of the service."""
    table = KeyTable()
    delta = await service.delta("", 5)
    assert delta is not None
    table.apply(delta)
    return table


class LocalManager:
    """The manager's calls about keys, as an ingress makes them, in this process."""

    def __init__(self, service: KeyService | None) -> None:
        self.service = service
        self._calls = KeyCalls()
        self._calls._keys = None if service is None else Keys(TenancyArgs(enabled=True), service)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._calls, name, _away))


async def _away(*arguments: object) -> object:
    """Stands for the manager's other methods."""
    raise RayActorError
