"""The MLflow registry with this machine's content-addressed cache, as serving reads it.

Apart from `topology`, so that an ingress, which asks neither, need not import MLflow (170 MB).
"""

from __future__ import annotations

from pathlib import Path

from registry.cache import Cache
from registry.catalog import Catalog
from registry.client import Registry
from registry.entities import AdapterVersion, BaseVersion


class CachedRegistry:
    """Implements `topology.RegistryReader`."""

    def __init__(self, tracking_uri: str, cache_folder: Path) -> None:
        self._registry = Registry(tracking_uri)
        self._cache = Cache(cache_folder)

    def snapshot(self) -> Catalog:
        return self._registry.snapshot()

    def fetch(self, version: BaseVersion | AdapterVersion) -> Path:
        return self._registry.fetch(version, self._cache)
