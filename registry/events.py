"""The changes between two catalogs, as frozen events whose `str` is a log line.

Pure: two catalogs in, events out, in the order of names and versions. A version whose content
changed under its number (the model was deleted and created again) was removed and added.

VersionAdded, VersionRemoved   a base or adapter version that can be served came or went
AliasMoved                     `old` None: the alias is new; `new` None: it is gone
TagChanged                     of a version: the user's own tags, and the verdict of its check
SettingChanged                 an operator's setting, kept at the registered model
VersionRejected                a version came that cannot be served, with the reason
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion

EFFECT_TAG = "loraplex.effect"  # equals `listing.EFFECT`, whose module imports MLflow
_SHOWN_CHARS = 80  # of a tag's value, which any MLflow client may write


@dataclass(frozen=True, slots=True)
class VersionAdded:
    kind: ClassVar[str] = "version_added"
    name: str
    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.name} version {self.version} ({self.digest[:12]}) is new"


@dataclass(frozen=True, slots=True)
class VersionRemoved:
    kind: ClassVar[str] = "version_removed"
    name: str
    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.name} version {self.version} ({self.digest[:12]}) is gone"


@dataclass(frozen=True, slots=True)
class AliasMoved:
    kind: ClassVar[str] = "alias_moved"
    name: str
    alias: str
    old: int | None
    new: int | None

    def __str__(self) -> str:
        if self.new is None:
            return f"{self.name}@{self.alias} is gone, it was version {self.old}"
        if self.old is None:
            return f"{self.name}@{self.alias} is new: version {self.new}"
        return f"{self.name}@{self.alias} moved from version {self.old} to {self.new}"


@dataclass(frozen=True, slots=True)
class TagChanged:
    kind: ClassVar[str] = "tag_changed"
    name: str
    version: int
    key: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        return f"{self.name} version {self.version}, tag {_change(self.key, self.old, self.new)}"


@dataclass(frozen=True, slots=True)
class SettingChanged:
    kind: ClassVar[str] = "setting_changed"
    name: str
    key: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        return f"{self.name}, setting {_change(self.key, self.old, self.new)}"


@dataclass(frozen=True, slots=True)
class VersionRejected:
    kind: ClassVar[str] = "version_rejected"
    name: str
    version: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name} version {self.version} cannot be served: {self.reason}"


Change = VersionAdded | VersionRemoved | AliasMoved | TagChanged | SettingChanged | VersionRejected
KINDS = tuple(
    event.kind
    for event in (
        VersionAdded,
        VersionRemoved,
        AliasMoved,
        TagChanged,
        SettingChanged,
        VersionRejected,
    )
)

_Version = BaseVersion | AdapterVersion


def changes(old: Catalog, new: Catalog) -> tuple[Change, ...]:
    before, after = _versions(old), _versions(new)
    return (
        *(VersionRemoved(*key) for key in sorted(before.keys() - after.keys())),
        *(VersionAdded(*key) for key in sorted(after.keys() - before.keys())),
        *_moved_aliases(_aliases(old), _aliases(new)),
        *_changed_tags(before, after),
        *_changed_settings(old, new),
        *(
            VersionRejected(one.name, one.version, one.reason)
            for one in sorted(
                set(new.rejected) - set(old.rejected), key=lambda r: (r.name, r.version)
            )
        ),
    )


def _versions(catalog: Catalog) -> dict[tuple[str, int, str], _Version]:
    every: tuple[_Version, ...] = (*catalog.bases, *catalog.adapters)
    return {(one.name, one.version, one.digest): one for one in every}


def _moved_aliases(
    old: Mapping[tuple[str, str], int], new: Mapping[tuple[str, str], int]
) -> Iterator[AliasMoved]:
    for name, alias in sorted(old.keys() | new.keys()):
        was, now = old.get((name, alias)), new.get((name, alias))
        if was != now:
            yield AliasMoved(name, alias, was, now)


def _aliases(catalog: Catalog) -> dict[tuple[str, str], int]:
    """Returns all aliases, including aliases on versions that cannot be served."""
    served = _versions(catalog).values()
    found = {(one.name, alias): one.version for one in served for alias in one.aliases}
    return found | {(one.name, one.alias): one.version for one in catalog.dangling}


def _changed_tags(
    before: Mapping[tuple[str, int, str], _Version], after: Mapping[tuple[str, int, str], _Version]
) -> Iterator[TagChanged]:
    """Yields the changed tags of versions that stayed; the tags of a new version are no change."""
    for key in sorted(before.keys() & after.keys()):
        old, new = _tags(before[key]), _tags(after[key])
        for tag in sorted(old.keys() | new.keys()):
            if old.get(tag) != new.get(tag):
                yield TagChanged(key[0], key[1], tag, old.get(tag), new.get(tag))


def _tags(version: _Version) -> dict[str, str]:
    own = dict(version.tags)
    if isinstance(version, AdapterVersion) and version.effect:
        own[EFFECT_TAG] = version.effect
    return own


def _changed_settings(old: Catalog, new: Catalog) -> Iterator[SettingChanged]:
    before = {(one.name, one.key): one.value for one in old.settings}
    after = {(one.name, one.key): one.value for one in new.settings}
    for name, key in sorted(before.keys() | after.keys()):
        was, now = before.get((name, key)), after.get((name, key))
        if was != now:
            yield SettingChanged(name, key, was, now)


def _change(key: str, old: str | None, new: str | None) -> str:
    if new is None:
        return f"{key} is gone"
    return f"{key} is {_shown(new)}" + ("" if old is None else f", was {_shown(old)}")


def _shown(value: str) -> str:
    return ascii(value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "...")
