"""Catalogs completed by the meaning of bare names on this server: the default aliases of its
configuration, and the previous meaning of a name whose alias is on a version that cannot be served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from registry.catalog import Catalog, DefaultAliases
from registry.meanings import Meanings
from serve_app.config import ModelArgs, default_aliases
from serve_app.control.base_plan import configured


class NamedCatalogs:
    """`follow` belongs to a single thread; `named` may be called from any."""

    def __init__(self, alias: str) -> None:
        """`alias`: the default for bases without an alias of their own."""
        self.latest: Catalog | None = None  # the result of the last `follow`
        self._alias = alias
        self._meanings = Meanings()
        self._watched: Catalog | None = None  # the watcher's catalog behind `latest`

    def follow(self, catalog: Catalog, models: Sequence[ModelArgs]) -> Catalog:
        """Returns the watcher's catalog with its names; the same object while nothing changed, so
        that its indices and its revision are kept."""
        aliases = self._aliases(catalog, models)
        known = self.latest
        if known is None or known.default_aliases != aliases or self._watched is not catalog:
            self._watched = catalog
            known = self._meanings.follow(replace(catalog, default_aliases=aliases))
            self.latest = known
        return known

    def named(self, catalog: Catalog, models: Sequence[ModelArgs]) -> Catalog:
        """Returns a catalog that is not the watcher's with its names; remembers nothing."""
        aliases = self._aliases(catalog, models)
        return self._meanings.hold(replace(catalog, default_aliases=aliases))

    def _aliases(self, catalog: Catalog, models: Sequence[ModelArgs]) -> DefaultAliases:
        return default_aliases(self._alias, configured(models, catalog))
