"""The changes between two catalogs: every kind once, and no event without a change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, Rejected, Setting
from registry.events import EFFECT_TAG, KINDS, Change, changes
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
            (Change("alias_moved", "pirate@champion moved from version 1 to 2"),),
        ),
        (
            catalog(adapter(1, "champion"), adapter(2, "canary")),
            (Change("alias_moved", "pirate@canary is new: version 2"),),
        ),
        (
            catalog(adapter(1), adapter(2)),
            (Change("alias_moved", "pirate@champion is gone, it was version 1"),),
        ),
        (
            catalog(adapter(1, "champion"), adapter(2), adapter(3)),
            (Change("version_added", "pirate version 3 (d3) is new"),),
        ),
        (
            catalog(adapter(1, "champion")),
            (Change("version_removed", "pirate version 2 (d2) is gone"),),
        ),
        (
            catalog(adapter(2)),
            (
                Change("version_removed", "pirate version 1 (d1) is gone"),
                Change("alias_moved", "pirate@champion is gone, it was version 1"),
            ),
        ),
        (
            catalog(adapter(1, "champion", tags=(("a", "x"),)), adapter(2, effect="changes")),
            (
                Change("tag_changed", "pirate version 1, tag a is 'x'"),
                Change("tag_changed", f"pirate version 2, tag {EFFECT_TAG} is 'changes'"),
            ),
        ),
        (
            replace(ONE, settings=(Setting("pirate", "pin", "true"),)),
            (Change("setting_changed", "pirate, setting pin is 'true'"),),
        ),
        (
            replace(ONE, rejected=(Rejected("odd", 1, "no weights"),)),
            (Change("version_rejected", "odd version 1 cannot be served: no weights"),),
        ),
        (
            replace(ONE, bases=()),
            (
                Change("version_removed", "tiny version 1 (base-1) is gone"),
                Change("alias_moved", "tiny@champion is gone, it was version 1"),
            ),
        ),
    ],
)
def test_each_change_is_an_event(new: Catalog, expected: tuple[Change, ...]) -> None:
    assert changes(ONE, new) == expected
    assert {change.kind for change in expected} <= set(KINDS)


def test_a_number_with_other_content_was_removed_and_added() -> None:
    """A deleted model that is registered again starts at version 1."""
    new = catalog(adapter(1, "champion", digest="other"), adapter(2))
    assert changes(ONE, new) == (
        Change("version_removed", "pirate version 1 (d1) is gone"),
        Change("version_added", "pirate version 1 (other) is new"),
    )


def test_what_changed_forth_changes_back() -> None:
    new = catalog(adapter(2, "champion", tags=(("a", "x"),)), adapter(3))
    there, back = changes(ONE, new), changes(new, ONE)
    swapped = {"version_added": "version_removed", "version_removed": "version_added"}
    kinds = sorted(swapped.get(one.kind, one.kind) for one in there)
    assert kinds == sorted(one.kind for one in back)


def test_a_long_tag_is_shortened_and_escaped_in_words() -> None:
    old, new = (
        catalog(adapter(1, "champion", tags=(("a", text),)), adapter(2))
        for text in ("x", "\n" + "y" * 10_000)
    )
    (change,) = changes(old, new)
    assert str(change).startswith("pirate version 1, tag a is '\\ny")
    assert str(change).endswith("', was 'x'")
    assert "\n" not in str(change)
    assert len(str(change)) < 300


def test_a_setting_that_is_gone_is_so_in_words() -> None:
    (change,) = changes(replace(ONE, settings=(Setting("pirate", "pin", "true"),)), ONE)
    assert str(change) == "pirate, setting pin is gone"


def test_the_tag_is_the_listings() -> None:
    assert EFFECT_TAG == EFFECT
