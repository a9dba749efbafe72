"""The changes between two catalogs: each has a kind, which is counted, and a line for the log.

Pure: two catalogs in, changes out, in the order of names and versions. A version whose content
changed under its number (the model was deleted and created again) was removed and added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion

KINDS = (
    "version_added",  # a base or adapter version that can be served
    "version_removed",
    "alias_moved",  # also if it is new or gone
    "tag_changed",  # of a version: the user's own tags, and the verdict of its check
    "setting_changed",  # an operator's setting, kept at the registered model
    "version_rejected",  # a new version that cannot be served
)
EFFECT_TAG = "loraplex.effect"  # equals `listing.EFFECT`, whose module imports MLflow
_SHOWN_CHARS = 80  # of a tag's value, which any MLflow client may write

K = TypeVar("K", bound=Any)  # can be sorted
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Change:
    kind: str  # one of KINDS
    words: str

    def __str__(self) -> str:
        return self.words


def changes(old: Catalog, new: Catalog) -> tuple[Change, ...]:
    return tuple(_changes(old, new))


def _changes(old: Catalog, new: Catalog) -> Iterator[Change]:
    before, after = old.by_content, new.by_content
    for name, version, digest in sorted(before.keys() - after.keys()):
        yield Change("version_removed", f"{name} version {version} ({digest[:12]}) is gone")
    for name, version, digest in sorted(after.keys() - before.keys()):
        yield Change("version_added", f"{name} version {version} ({digest[:12]}) is new")
    for (name, alias), was, now in _differences(_aliases(old), _aliases(new)):
        yield Change("alias_moved", f"{name}@{alias} {_move(was, now)}")
    for key in sorted(before.keys() & after.keys()):  # the tags of a new version are no change
        for tag, text, new_text in _differences(_tags(before[key]), _tags(after[key])):
            words = f"{key[0]} version {key[1]}, tag {tag} {_replacement(text, new_text)}"
            yield Change("tag_changed", words)
    for (name, setting), text, new_text in _differences(old.setting_values, new.setting_values):
        words = f"{name}, setting {setting} {_replacement(text, new_text)}"
        yield Change("setting_changed", words)
    rejected = set(new.rejected) - set(old.rejected)
    for one in sorted(rejected, key=lambda one: (one.name, one.version)):
        words = f"{one.name} version {one.version} cannot be served: {one.reason}"
        yield Change("version_rejected", words)


def _differences(old: Mapping[K, V], new: Mapping[K, V]) -> Iterator[tuple[K, V | None, V | None]]:
    """Yields each key whose value changed, with both values; None: the key is not there."""
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def _aliases(catalog: Catalog) -> dict[tuple[str, str], int]:
    """Returns all aliases, including aliases on versions that cannot be served."""
    served = catalog.by_content.values()
    found = {(one.name, alias): one.version for one in served for alias in one.aliases}
    return found | {(one.name, one.alias): one.version for one in catalog.dangling}


def _tags(version: BaseVersion | AdapterVersion) -> dict[str, str]:
    own = dict(version.tags)
    if isinstance(version, AdapterVersion) and version.effect:
        own[EFFECT_TAG] = version.effect
    return own


def _move(old: int | None, new: int | None) -> str:
    if new is None:
        return f"is gone, it was version {old}"
    return f"is new: version {new}" if old is None else f"moved from version {old} to {new}"


def _replacement(old: str | None, new: str | None) -> str:
    if new is None:
        return "is gone"
    return f"is {_shown(new)}" + ("" if old is None else f", was {_shown(old)}")


def _shown(value: str) -> str:
    return ascii(value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "...")
