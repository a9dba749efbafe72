"""What an operator may ask of an adapter and what lasts: pins, and adapters that scripts load from
a folder. The manager does it, because only it writes; the registry keeps it.

An adapter that came from a folder by `load` is registered like any other, and marked: only such a
one leaves with `unload`, and is out of sight then until it is loaded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import InvalidNameError, NotFoundError, RegistrationError
from registry.names import check_name
from serve_app.topology import RegistryReader

PIN = "pin"
RUNTIME = "runtime"
LOADED, UNLOADED = "loaded", "unloaded"

Look = Callable[[], Catalog]


@dataclass(frozen=True, slots=True)
class AdapterChange:
    kind: Literal["pin", "unpin", "load", "unload"]
    name: str
    folder: str = ""  # load: on the manager's machine
    base: str = ""  # load: a registered name, @version allowed
    may_replace: bool = False  # load: another version of a name that is loaded


class AdapterAdmin:
    def __init__(self) -> None:
        self._registering = asyncio.Lock()  # a check takes a core and the base's header

    async def change(
        self, change: AdapterChange, registry: RegistryReader, look: Look
    ) -> AdapterVersion | None:
        """What the name means now; None: nothing. `look`: blocks; what the registry says now, with
        the default aliases that count here. Raises NotFoundError or another RegistryError."""
        check_name(change.name)
        if change.kind == "load":
            async with self._registering:
                return await self._load(change, registry, look)
        catalog = await asyncio.to_thread(look)
        adapter = _find(catalog, change.name)
        if change.kind == "unload":
            if catalog.setting(change.name, RUNTIME) != LOADED:
                return adapter  # the registry's own: it comes back at its next use
            await asyncio.to_thread(registry.set_setting, change.name, RUNTIME, UNLOADED)
            return None
        value = "true" if change.kind == "pin" else None
        await asyncio.to_thread(registry.set_setting, change.name, PIN, value)
        return adapter

    async def _load(
        self, change: AdapterChange, registry: RegistryReader, look: Look
    ) -> AdapterVersion:
        name, folder = change.name, Path(change.folder)
        catalog = await asyncio.to_thread(look)
        if name in catalog.default_bases():
            raise RegistrationError(f"{name!r} is a base model")
        if any(adapter.name == name for adapter in catalog.adapters):
            if not change.may_replace:
                raise RegistrationError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True."
                )
            if catalog.setting(name, RUNTIME) != LOADED:
                raise RegistrationError(
                    f"The lora adapter '{name}' is the registry's: register its next version there."
                )
        if not folder.is_absolute() or not (folder / "adapter_config.json").is_file():
            raise NotFoundError(f"Loading lora {name} failed: No adapter found for {folder}")
        await asyncio.to_thread(registry.register_adapter, folder, name, change.base)
        await asyncio.to_thread(registry.set_setting, name, RUNTIME, LOADED)
        return _find(await asyncio.to_thread(look), name)


def _find(catalog: Catalog, name: str) -> AdapterVersion:
    adapter = catalog.resolve(name).adapter
    if adapter is None:
        raise InvalidNameError(f"{name!r} is a base model, not an adapter")
    return adapter
