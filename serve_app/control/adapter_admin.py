"""What an operator may ask of an adapter and what lasts: pins, and adapters that scripts load from
a folder. The manager does it, because only it writes; the registry keeps it.

An adapter that came from a folder by `load` is registered like any other, and marked: only such a
one leaves with `unload`, and is out of sight then until it is loaded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import InvalidNameError, NotFoundError, RegistrationError
from registry.names import check_name
from serve_app.messages import PIN, AdapterChange
from serve_app.platform_view import RegistryReader

RUNTIME = "runtime"
LOADED, UNLOADED = "loaded", "unloaded"

Look = Callable[[], Catalog]


class AdapterAdmin:
    def __init__(self) -> None:
        self._registering = asyncio.Lock()  # a check takes a core and the base's header
        # By name: the version that the last load made, and what the name meant before.
        self._loads: dict[str, tuple[int, AdapterVersion | None]] = {}

    async def change(
        self, change: AdapterChange, registry: RegistryReader, look: Look
    ) -> AdapterVersion | None:
        """What the name means now; None: nothing. `look`: blocks; what the registry says now, with
        the default aliases that count here. Raises NotFoundError or another RegistryError."""
        check_name(change.name)
        if change.kind == "load":
            async with self._registering:
                return await self._load(change, registry, look)
        if change.kind == "undo_load":
            async with self._registering:
                return await self._undo_load(change, registry, look)
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
        before = None
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
            with suppress(NotFoundError):
                before = catalog.resolve(name).adapter
        if not folder.is_absolute() or not (folder / "adapter_config.json").is_file():
            raise NotFoundError(f"Loading lora {name} failed: No adapter found for {folder}")
        alias = catalog.default_aliases.of_base(catalog.resolve_base(change.base).name)
        await asyncio.to_thread(registry.register_adapter, folder, name, change.base, alias)
        await asyncio.to_thread(registry.set_setting, name, RUNTIME, LOADED)
        loaded = _find(await asyncio.to_thread(look), name)
        self._loads[name] = loaded.version, before
        return loaded

    async def _undo_load(
        self, change: AdapterChange, registry: RegistryReader, look: Look
    ) -> AdapterVersion | None:
        """After a load that the engines could not follow: the name means again what it meant, and
        one that was new goes out of sight. Nothing is done where somebody moved the name on, nor
        by a manager that did not make the load and cannot know what the name meant."""
        name = change.name
        catalog = await asyncio.to_thread(look)
        meant = _find(catalog, name)
        if meant.version != change.version:
            return meant
        loaded, before = self._loads.pop(name, (None, None))
        if before is None:
            if change.may_replace and loaded is None:
                return meant
            await asyncio.to_thread(registry.set_setting, name, RUNTIME, UNLOADED)
            return None
        alias = catalog.default_aliases.of(before)
        await asyncio.to_thread(registry.set_alias, name, alias, before.version)
        return _find(await asyncio.to_thread(look), name)


def _find(catalog: Catalog, name: str) -> AdapterVersion:
    adapter = catalog.resolve(name).adapter
    if adapter is None:
        raise InvalidNameError(f"{name!r} is a base model, not an adapter")
    return adapter
