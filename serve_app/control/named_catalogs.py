"""Catalogs with what a name without a suffix means on this server: the aliases that its
configuration sets, and what a name meant before its alias was on a version that cannot be served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from registry.catalog import Catalog, DefaultAliases
from registry.meanings import Meanings
from serve_app.config import ModelArgs, default_aliases
from serve_app.control.base_plan import wished


class NamedCatalogs:
    """`follow` belongs to one thread; `named` may be called by any."""

    def __init__(self, alias: str) -> None:
        """`alias`: of every base that has none of its own."""
        self.latest: Catalog | None = None  # as last followed
        self._alias = alias
        self._meanings = Meanings()
        self._watched: Catalog | None = None  # the watcher's, of which `latest` was made

    def follow(self, catalog: Catalog, models: Sequence[ModelArgs]) -> Catalog:
        """The same object as long as nothing changed, for its indices' and its revision's sake."""
        aliases = self._aliases(catalog, models)
        known = self.latest
        if known is None or known.default_aliases != aliases or self._watched is not catalog:
            self._watched = catalog
            known = self._meanings.follow(replace(catalog, default_aliases=aliases))
            self.latest = known
        return known

    def named(self, catalog: Catalog, models: Sequence[ModelArgs]) -> Catalog:
        """Another catalog than the watcher's."""
        aliases = self._aliases(catalog, models)
        return self._meanings.hold(replace(catalog, default_aliases=aliases))

    def _aliases(self, catalog: Catalog, models: Sequence[ModelArgs]) -> DefaultAliases:
        return default_aliases(self._alias, wished(models, catalog))
