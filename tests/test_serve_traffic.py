"""The choice of a request's version: tables, and the split as statistics with fixed seeds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.catalog import Catalog
from serve_app.canary.split import Split, parse_weight, place, read_traffic, sticky_key
from tests.canary_factory import BASE, CANARY, OTHER_BASE, STABLE, adapter, catalog

RUNNING = {BASE.digest}
KEYS = [f"user-{number}" for number in range(10_000)]


def split_of(known: Catalog, running: set[str] = RUNNING) -> Split:
    return read_traffic(known, running, {}).splits["pirate"]


def never() -> float:
    raise AssertionError("a key needs no draw")


def in_canary(split: Split, keys: list[str]) -> set[str]:
    return {key for key in keys if split.choose(key, never)[0] == "canary"}


# The split


@pytest.mark.parametrize("weight", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_share_of_keys_is_the_weight(weight: float) -> None:
    split = split_of(catalog(canary_weight=str(weight)))
    share = len(in_canary(split, KEYS)) / len(KEYS)
    assert abs(share - weight) < 4 * (weight * (1 - weight) / len(KEYS)) ** 0.5


@pytest.mark.parametrize("weight", [0.01, 0.1, 0.5])
def test_without_a_key_each_request_draws(weight: float) -> None:
    split = split_of(catalog(canary_weight=str(weight)))
    draw = random.Random(5).random
    arms = [split.choose(None, draw)[0] for _ in KEYS]
    share = arms.count("canary") / len(arms)
    assert abs(share - weight) < 4 * (weight * (1 - weight) / len(arms)) ** 0.5


@given(
    st.text(min_size=1), st.floats(min_value=0, max_value=1), st.floats(min_value=0, max_value=1)
)
def test_a_higher_weight_keeps_those_who_are_in_the_canary(
    key: str, one: float, two: float
) -> None:
    low, high = sorted((one, two))
    known = catalog(canary_weight="1")
    split = split_of(known)

    def arm(weight: float) -> str:
        return replace(split, canary=replace(split.canary, weight=weight)).choose(key, never)[0]

    assert (arm(low), arm(high)) != ("canary", "stable")
    assert (arm(0.0), arm(1.0)) == ("stable", "canary")


def test_the_place_of_a_key_is_the_adapters_own_and_no_versions() -> None:
    assert place("pirate", "ann") == place("pirate", "ann")
    second = adapter(3, "canary")
    moved = split_of(catalog(STABLE, second, canary_weight="0.3"))
    assert in_canary(moved, KEYS) == in_canary(split_of(catalog(canary_weight="0.3")), KEYS)
    both = sum(place("pirate", key) < 0.3 and place("sql", key) < 0.3 for key in KEYS)
    assert abs(both / len(KEYS) - 0.09) < 0.012  # independent: no key is in every canary


def test_all_and_nothing() -> None:
    assert in_canary(split_of(catalog(canary_weight="1")), KEYS) == set(KEYS)
    assert not split_of(catalog(canary_weight="0")).is_active
    assert split_of(catalog(canary_weight="1")).choose("ann", never) == ("canary", CANARY)


@pytest.mark.parametrize(
    ("candidates", "key"),
    [
        (("ann", "id", "s"), "ann"),
        ((None, "id", "s"), "id"),
        (("", None, "s"), "s"),
        ((None, ""), None),
    ],
)
def test_the_first_name_that_says_anything_is_the_key(
    candidates: tuple[str | None, ...], key: str | None
) -> None:
    assert sticky_key(*candidates) == key


@pytest.mark.parametrize(
    ("model", "is_split"),
    [
        ("pirate", True),
        ("base:pirate", True),
        ("pirate@champion", False),
        ("pirate@1", False),
        ("pirate@canary", False),
        ("base@1:pirate", False),
        ("base:pirate@1", False),
        ("other:pirate", False),
        ("base", False),
        ("unknown", False),
        (":pirate:", False),
        ("", False),
    ],
)
def test_only_a_name_without_suffix_is_split(model: str, is_split: bool) -> None:
    traffic = read_traffic(catalog(canary_weight="0.5"), RUNNING, {})
    assert (traffic.split_of(model) is not None) == is_split


# Problems, and their reports


@pytest.mark.parametrize(
    ("text", "weight"),
    [("0.3", 0.3), ("1", 1.0), (" 0 ", 0.0), (None, 0.0), ("", 0.0), ("1e-3", 0.001)]
    + [(text, None) for text in ("1.1", "-0.1", "nan", "inf", "30%", "0,3", "x" * 5000)],
)
def test_weights_are_read_as_they_are_meant(text: str | None, weight: float | None) -> None:
    assert parse_weight(text) == weight


def test_a_weight_that_is_none_counts_as_0_and_is_told_in_short() -> None:
    split = split_of(catalog(canary_weight="30%" + "x" * 5000))
    assert not split.is_active
    (problem,) = split.problems
    assert "canary_weight '30%" in problem
    assert len(problem) < 200


def test_a_canary_on_another_base_is_used_while_that_base_runs() -> None:
    far = adapter(2, "canary", base=OTHER_BASE)
    known = catalog(STABLE, far, canary_weight="1")
    waiting = split_of(known)
    assert not waiting.is_active
    assert "'other' that is not served" in waiting.problems[0]
    traffic = read_traffic(known, {BASE.digest, OTHER_BASE.digest}, {})
    split = traffic.split_of("pirate")
    assert split is not None
    assert split.choose("ann", never) == ("canary", far)
    assert traffic.split_of("base:pirate") is None  # the client names the base


def test_a_canary_whose_base_is_down_or_asleep_keeps_its_share() -> None:
    far = adapter(2, "canary", base=OTHER_BASE)
    served = {BASE.digest, OTHER_BASE.digest}
    known = catalog(STABLE, far, canary_weight="0.5")
    split = read_traffic(known, RUNNING, {}, served).splits["pirate"]
    assert (split.is_active, split.canary.share) == (True, 0.5)
    assert split.problems == ("version 2 waits for its base 'other' to answer",)


def test_a_canary_on_the_names_own_base_needs_no_running_base() -> None:
    assert split_of(catalog(canary_weight="1"), set()).is_active  # as it would without a canary


def test_what_was_rolled_back_gets_no_request_whatever_the_registry_says() -> None:
    vetoes = {("pirate", CANARY.digest): "too slow"}
    split = read_traffic(catalog(canary_weight="1"), RUNNING, vetoes).splits["pirate"]
    assert not split.is_active
    assert split.problems == ("version 2 was rolled back: too slow",)
    newer = adapter(3, "canary")
    moved = read_traffic(catalog(STABLE, newer, canary_weight="1"), RUNNING, vetoes)
    assert moved.splits["pirate"].is_active


def test_what_cannot_be_served_gets_no_request() -> None:
    known = catalog(canary_weight="1", shadow_weight="1")
    adapters = tuple(
        replace(one, refused="it uses DoRA") if {"canary", "shadow"} & set(one.aliases) else one
        for one in known.adapters
    )
    assert any(one.refused for one in adapters)
    split = split_of(replace(known, adapters=adapters))
    assert split.choose("ann", never)[0] == "stable"
    assert any("it uses DoRA" in problem for problem in split.problems)


def test_a_version_is_no_canary_of_itself() -> None:
    both = adapter(1, "champion", "canary")
    split = split_of(catalog(both, canary_weight="1"))
    assert not split.is_active
    assert "resolves to already" in split.problems[0]


def test_without_a_champion_the_canary_may_be_the_highest_version() -> None:
    """Then the name resolves to it already: a canary's alias sends no request to an older
    version."""
    split = split_of(catalog(adapter(1), CANARY, canary_weight="1"))
    assert split.stable == CANARY
    assert not split.is_active


def test_an_alias_without_a_weight_and_a_weight_without_an_alias_split_nothing() -> None:
    assert not split_of(catalog()).is_active
    assert not split_of(catalog(STABLE, adapter(2), canary_weight="1")).is_active


# Shadows


def test_a_shadow_gets_its_share_of_copies_and_none_of_its_own_requests() -> None:
    both = adapter(2, "canary", "shadow")
    split = split_of(catalog(STABLE, both, canary_weight="0.5", shadow_weight="0.2"))
    draw = random.Random(5).random
    copies = [split.copied_to(STABLE, draw) for _ in KEYS]
    assert abs(copies.count(both) / len(KEYS) - 0.2) < 0.016
    assert all(split.copied_to(both, draw) is None for _ in KEYS[:100])


def test_a_shadow_alone_makes_the_name_a_split_one() -> None:
    split = split_of(catalog(STABLE, adapter(2, "shadow"), shadow_weight="1"))
    assert split.is_active
    assert split.choose("ann", never) == ("stable", STABLE)


def test_a_shadow_on_another_base_cannot_read_the_tokens() -> None:
    far = adapter(2, "shadow", base=OTHER_BASE)
    split = split_of(catalog(STABLE, far, shadow_weight="1"), {BASE.digest, OTHER_BASE.digest})
    assert split.copied_to(STABLE, lambda: 0.0) is None
    assert "cannot shadow" in split.problems[0]
