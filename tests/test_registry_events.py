"""The changes between two catalogs: every kind once, and no event without a change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, Rejected, Setting
from registry.events import (
    EFFECT_TAG,
    KINDS,
    AliasMoved,
    Change,
    SettingChanged,
    TagChanged,
    VersionAdded,
    VersionRejected,
    VersionRemoved,
    changes,
)
from registry.listing import EFFECT

BASE = BaseVersion("tiny", 1, "base-1", "uri", ("champion",))


def adapter(version: int = 1, *aliases: str, **fields: object) -> AdapterVersion:
    one = AdapterVersion("pirate", version, f"d{version}", "tiny", "base-1", 8, (), "uri", aliases)
    return replace(one, **fields)  # type: ignore[arg-type]


def catalog(*adapters: AdapterVersion, **fields: object) -> Catalog:
    return replace(Catalog((BASE,), adapters), **fields)  # type: ignore[arg-type]


ONE = catalog(adapter(1, "champion"), adapter(2))


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (ONE, ()),
        (
            catalog(adapter(1), adapter(2, "champion")),
            (AliasMoved("pirate", "champion", 1, 2),),
        ),
        (
            catalog(adapter(1, "champion"), adapter(2, "canary")),
            (AliasMoved("pirate", "canary", None, 2),),
        ),
        (catalog(adapter(1), adapter(2)), (AliasMoved("pirate", "champion", 1, None),)),
        (
            catalog(adapter(1, "champion"), adapter(2), adapter(3)),
            (VersionAdded("pirate", 3, "d3"),),
        ),
        (catalog(adapter(1, "champion")), (VersionRemoved("pirate", 2, "d2"),)),
        (
            catalog(adapter(2)),
            (VersionRemoved("pirate", 1, "d1"), AliasMoved("pirate", "champion", 1, None)),
        ),
        (
            catalog(adapter(1, "champion", tags=(("a", "x"),)), adapter(2, effect="changes")),
            (
                TagChanged("pirate", 1, "a", None, "x"),
                TagChanged("pirate", 2, EFFECT_TAG, None, "changes"),
            ),
        ),
        (
            replace(ONE, settings=(Setting("pirate", "pin", "true"),)),
            (SettingChanged("pirate", "pin", None, "true"),),
        ),
        (
            replace(ONE, rejected=(Rejected("odd", 1, "no weights"),)),
            (VersionRejected("odd", 1, "no weights"),),
        ),
        (
            replace(ONE, bases=()),
            (VersionRemoved("tiny", 1, "base-1"), AliasMoved("tiny", "champion", 1, None)),
        ),
    ],
)
def test_each_change_is_an_event(new: Catalog, expected: tuple[Change, ...]) -> None:
    assert changes(ONE, new) == expected


def test_a_number_with_other_content_was_removed_and_added() -> None:
    """A deleted model that is registered again starts at version 1."""
    new = catalog(adapter(1, "champion", digest="other"), adapter(2))
    assert changes(ONE, new) == (
        VersionRemoved("pirate", 1, "d1"),
        VersionAdded("pirate", 1, "other"),
    )


def test_what_changed_forth_changes_back() -> None:
    new = catalog(adapter(2, "champion", tags=(("a", "x"),)), adapter(3))
    there, back = changes(ONE, new), changes(new, ONE)
    swapped = {VersionAdded: VersionRemoved, VersionRemoved: VersionAdded}
    kinds = sorted(swapped.get(type(one), type(one)).kind for one in there)  # type: ignore[call-overload]
    assert kinds == sorted(one.kind for one in back)


def test_events_say_themselves_in_words() -> None:
    words = [
        str(AliasMoved("pirate", "champion", 1, 2)),
        str(TagChanged("pirate", 1, "a", "x", "\n" + "y" * 10_000)),
        str(SettingChanged("pirate", "pin", "true", None)),
    ]
    assert words[0] == "pirate@champion moved from version 1 to 2"
    assert all("\n" not in one and len(one) < 300 for one in words)
    assert words[2] == "pirate, setting pin is gone"


def test_the_kinds_are_all_and_the_tag_is_the_listings() -> None:
    assert set(KINDS) == {one.kind for one in Change.__args__}  # type: ignore[attr-defined]
    assert EFFECT_TAG == EFFECT
