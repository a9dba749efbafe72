"""Holds names at their last good version while their alias is on a version that cannot be served.
Such a name never silently resolves to another version.

Pure except for the log. The memory belongs to the process: after a restart such a name is refused
until its alias is on a version that can be served.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from registry.catalog import Catalog, Group
from registry.entities import AdapterVersion, BaseVersion, DanglingAlias, HeldMeaning

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 8  # versions per name; a later check may refuse the newest of them

_Meaning = tuple[int, str]  # version and digest


class Meanings:
    """`follow` belongs to one thread; `hold` may be called by any thread."""

    def __init__(self) -> None:
        self.latest: Catalog | None = None  # the result of the last `follow`
        self._followed: Catalog | None = None  # its argument
        self._before: dict[Group, tuple[_Meaning, ...]] = {}  # the newest first
        self._aliased: dict[Group, int] = {}  # the last version by an alias
        self._logged: frozenset[str] = frozenset()  # problems of the last round

    def follow(self, catalog: Catalog) -> Catalog:
        """Remembers the good resolutions, and returns the catalog with held versions in place of
        bad resolutions; an unchanged catalog is the same object, which keeps its indices and its
        revision."""
        if self.latest is not None and self._followed == catalog:
            return self.latest
        self._followed = catalog
        meanings = catalog.meanings()
        for group, found in meanings.items():
            if not _why_bad(found):
                assert not isinstance(found, DanglingAlias)
                self._remember(group, (found.version, found.digest))
                if group[1] or isinstance(found, BaseVersion):  # once for each version
                    self._note_alias(found, group, catalog.default_aliases.of(found))
        for group in self._before.keys() - meanings.keys():
            del self._before[group]
            self._aliased.pop(group, None)
        self.latest = self.hold(catalog)
        self._log(self.latest, meanings)
        return self.latest

    def hold(self, catalog: Catalog) -> Catalog:
        """Returns the catalog with held versions; the same object if every name resolves to a
        version that can be served."""
        bad = [group for group, found in catalog.meanings().items() if _why_bad(found)]
        if not bad:
            return catalog
        held = []
        for name, base_name in bad:
            for version, digest in self._before.get((name, base_name), ()):
                found = catalog.by_content.get((name, version, digest))
                if found is None:  # deleted: an even older version would be a surprise
                    break
                if not _why_bad(found):
                    held.append(HeldMeaning(name, base_name, version))
                    break
        return replace(catalog, held=tuple(held)) if held else catalog

    def _remember(self, group: Group, meaning: _Meaning) -> None:
        known = self._before.get(group, ())
        if known[:1] != (meaning,):
            others = tuple(one for one in known if one != meaning)
            self._before[group] = (meaning, *others)[:_MAX_REMEMBERED]

    def _note_alias(self, found: AdapterVersion | BaseVersion, group: Group, alias: str) -> None:
        """Logs the loss of an alias: the name then resolves to its highest version, as a name that
        never had the alias does."""
        if alias in found.aliases:
            self._aliased[group] = found.version
        elif (before := self._aliased.pop(group, None)) is not None:
            logger.warning(
                "%s@%s is gone, it was version %d: the name resolves to its highest version, %d",
                found.name,
                alias,
                before,
                found.version,
            )

    def _log(
        self, catalog: Catalog, meanings: dict[Group, AdapterVersion | BaseVersion | DanglingAlias]
    ) -> None:
        """Logs each problem once for as long as it lasts."""
        held = {(one.name, one.base_name): one.version for one in catalog.held}
        words = set()
        for group, found in meanings.items():
            if why := _why_bad(found):
                version = held.get(group)
                then = (
                    "requests for the name without a suffix are refused"
                    if version is None
                    else f"version {version}, to which the name resolved before, is still served"
                )
                words.add(f"{why}; {then}")
        for text in sorted(words - self._logged):
            logger.warning("%s", text)
        self._logged = frozenset(words)


def _why_bad(found: AdapterVersion | BaseVersion | DanglingAlias) -> str:
    """Returns the reason why a version cannot be served; empty if it can."""
    if isinstance(found, DanglingAlias):
        return str(found)
    if isinstance(found, AdapterVersion) and found.refused:
        return f"{found.name} is version {found.version}, which cannot be served: {found.refused}"
    return ""
