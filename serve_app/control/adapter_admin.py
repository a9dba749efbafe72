"""An operator's lasting orders about an adapter: pins, and adapters that are loaded from a folder.
The manager carries them out, because only it writes; the registry stores them.

An adapter that `load` registers from a folder is marked as such: `unload` hides only such an
adapter, until it is loaded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from registry.catalog import Catalog
from registry.entities import AdapterVersion, DanglingAlias
from registry.errors import (
    InvalidNameError,
    NameTakenError,
    NotFoundError,
    RegistryError,
    RegistryUnavailableError,
)
from registry.names import check_name
from serve_app.messages import PIN, AdapterChange
from serve_app.platform_view import RegistryReader

RUNTIME = "runtime"
LOADED, UNLOADED = "loaded", "unloaded"


class AdapterAdmin:
    def __init__(self, registry: Callable[[], RegistryReader], read: Callable[[], Catalog]) -> None:
        """`read`: returns the registry's catalog now, with the default aliases of this server;
        blocks."""
        self._registry = registry
        self._read = read
        self._registering = asyncio.Lock()  # a check uses a core and reads the base's header
        # By name: the version that the last load registered, and the (alias, version) before it.
        self._loads: dict[str, tuple[int, tuple[str, int] | None]] = {}
        # Names that a load has registered, or perhaps has, and not marked: the registry went away.
        self._unmarked: set[str] = set()

    async def change(self, change: AdapterChange) -> AdapterVersion | None:
        """Carries out an order. Returns the version that the name means then, or None if it means
        none. Raises NotFoundError or another RegistryError."""
        check_name(change.name)
        registry = self._registry()
        if change.kind == "load":
            async with self._registering:
                return await self._load(change, registry)
        if change.kind == "undo_load":
            async with self._registering:
                return await self._undo_load(change, registry)
        catalog = await asyncio.to_thread(self._read)
        adapter = _find(catalog, change.name)
        if change.kind == "unload":
            is_loaded = catalog.setting(change.name, RUNTIME) == LOADED
            if not is_loaded and change.name not in self._unmarked:
                return adapter  # registered without `load`: it comes back at its next use
            await asyncio.to_thread(registry.set_setting, change.name, RUNTIME, UNLOADED)
            self._unmarked.discard(change.name)
            return None
        value = "true" if change.kind == "pin" else None
        await asyncio.to_thread(registry.set_setting, change.name, PIN, value)
        return adapter

    async def _load(self, change: AdapterChange, registry: RegistryReader) -> AdapterVersion:
        name, folder = change.name, Path(change.folder)
        catalog = await asyncio.to_thread(self._read)
        if name in catalog.default_bases():
            raise NameTakenError(f"{name!r} is a base model")
        is_loaded = catalog.setting(name, RUNTIME) == LOADED
        is_known = _has_name(catalog, name)
        if is_known and name not in self._unmarked:
            if not change.may_replace:
                raise NameTakenError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True."
                )
            if not is_loaded:
                raise NameTakenError(
                    f"The lora adapter '{name}' was registered in the registry, not loaded from a "
                    "folder: register its next version there."
                )
        if not folder.is_absolute() or not _holds_adapter(folder):
            raise NotFoundError(f"Loading lora {name} failed: No adapter found for {folder}")
        alias = catalog.default_aliases.of_base(catalog.resolve_base(change.base).name)
        if not is_known:
            self._unmarked.add(name)
        try:
            await asyncio.to_thread(registry.register_adapter, folder, name, change.base, alias)
        except RegistryUnavailableError:
            raise  # perhaps the name is registered, or will be
        except RegistryError:
            # Also the error of a registry that went away in the midst: then this look has its own.
            catalog = await asyncio.to_thread(self._read)
            if not _has_name(catalog, name):
                self._unmarked.discard(name)
            raise
        await asyncio.to_thread(registry.set_setting, name, RUNTIME, LOADED)
        self._unmarked.discard(name)
        loaded = _find(await asyncio.to_thread(self._read), name)
        self._loads[name] = loaded.version, _default_of(catalog, name) if is_loaded else None
        return loaded

    async def _undo_load(
        self, change: AdapterChange, registry: RegistryReader
    ) -> AdapterVersion | None:
        """Undoes a load that the engines could not follow: the default alias returns to its
        previous version, and a name that was new is hidden. Has no effect if the alias was moved
        since, or if another manager made the load: this manager has no record of the version
        before."""
        name = change.name
        catalog = await asyncio.to_thread(self._read)
        adapter = _find(catalog, name)
        if adapter.version != change.version:
            return adapter
        loaded, before = self._loads.pop(name, (None, None))
        if before is None:
            if change.may_replace and loaded is None:
                return adapter
            await asyncio.to_thread(registry.set_setting, name, RUNTIME, UNLOADED)
            return None
        await asyncio.to_thread(registry.set_alias, name, *before)
        try:
            return _find(await asyncio.to_thread(self._read), name)
        except NotFoundError:  # the alias is again on a version that cannot be served
            return None


def _holds_adapter(folder: Path) -> bool:
    try:
        return (folder / "adapter_config.json").is_file()
    except OSError:  # a name that is too long for a file, or a folder that must not be read
        return False


def _has_name(catalog: Catalog, name: str) -> bool:
    return any(adapter.name == name for adapter in catalog.adapters)


def _find(catalog: Catalog, name: str) -> AdapterVersion:
    adapter = catalog.resolve(name).adapter
    if adapter is None:
        raise InvalidNameError(f"{name!r} is a base model, not an adapter")
    return adapter


def _default_of(catalog: Catalog, name: str) -> tuple[str, int] | None:
    """The default alias of a name and the version that it is on, even if that cannot be served;
    without such an alias, the version that the bare name means. None: there is no version."""
    dangling = {one.alias: one.version for one in catalog.dangling if one.name == name}
    meaning = catalog.meanings().get((name, ""))
    if meaning is None:
        return next(iter(dangling.items()), None)
    if isinstance(meaning, DanglingAlias):
        return meaning.alias, meaning.version
    alias = catalog.default_aliases.of(meaning)
    aliased = (one.version for one in catalog.adapters if one.name == name and alias in one.aliases)
    return alias, dangling.get(alias) or next(aliased, meaning.version)
