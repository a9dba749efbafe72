"""Adapters' homes: little moves when replicas change, and their number follows the work."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.routing.lru import LruDict
from serve_app.routing.placement import Placement

ADAPTERS = [f"adapter-{i}" for i in range(200)]
replica_sets = st.sets(st.integers(0, 99).map("r{}".format), min_size=2, max_size=40)


def _order(replica_ids: set[str]) -> Placement:
    order = Placement(0.5)
    order.change(replica_ids)
    return order


@settings(max_examples=40, deadline=None)
@given(replica_sets, st.integers(1, 5))
def test_a_replica_that_goes_moves_only_its_own_adapters(ids: set[str], count: int) -> None:
    gone = min(ids)
    before, after = _order(ids), _order(ids - {gone})
    for adapter in ADAPTERS:
        kept = [one for one in before.first(adapter, count + 1) if one != gone]
        homes = after.first(adapter, count)
        assert list(homes[: len(kept)]) == kept[: len(homes)]


@settings(max_examples=40, deadline=None)
@given(replica_sets)
def test_a_replica_that_comes_takes_adapters_and_moves_none_between_others(ids: set[str]) -> None:
    before, after = _order(ids), _order(ids | {"new"})
    moved = 0
    for adapter in ADAPTERS:
        was, now = before.first(adapter, 1), after.first(adapter, 1)
        assert now in (was, ("new",))
        moved += now != was
    assert moved <= 5 * len(ADAPTERS) / (len(ids) + 1) + 10


def test_homes_are_spread_evenly() -> None:
    order = _order({f"r{i}" for i in range(16)})
    counts = Counter(order.first(f"adapter-{i}", 1)[0] for i in range(16_000))
    assert len(counts) == 16
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_a_long_order_begins_like_a_short_one() -> None:
    order = _order({f"r{i}" for i in range(100)})
    short = order.first("a", 3)
    everything = order.first("a", 1000)
    assert everything[:3] == short
    assert len(set(everything)) == 100
    assert order.first("a", 3) == short


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2)), max_size=30),
    st.floats(1, 4),
)
def test_more_work_never_has_fewer_homes(history: list[tuple[float, float]], factor: float) -> None:
    less, more = Placement(0.5), Placement(0.5)
    now_s = 0.0
    for placement in (less, more):
        placement.change(f"r{i}" for i in range(12))
    for passed_s, seconds in history:
        now_s += passed_s
        less.observe("a", seconds, now_s)
        more.observe("a", seconds * factor, now_s)
        few, many = less.homes("a", now_s), more.homes("a", now_s)
        assert many[: len(few)] == few
        assert 1 <= len(few) <= len(many) <= 12


def _drive(placement: Placement, per_s: float, seconds: float, start_s: float) -> float:
    """Sends requests of 10 ms of a replica's time."""
    now_s, end_s = start_s, start_s + seconds
    while now_s < end_s:
        placement.observe("a", 0.01, now_s)
        now_s += 1 / per_s
    return now_s


def test_a_fivefold_rise_has_its_homes_within_ten_seconds_and_loses_them_slowly() -> None:
    placement = Placement(0.5)
    placement.change(f"r{i}" for i in range(16))
    now_s = _drive(placement, 40, 60, 0.0)  # 0.4 of a replica
    assert placement.num_homes("a", now_s) == 1
    now_s = _drive(placement, 200, 10, now_s)  # 2.0
    at_the_rise = placement.num_homes("a", now_s)
    assert at_the_rise >= 4
    assert set(placement.wide(now_s)) == {"a"}
    now_s = _drive(placement, 40, 15, now_s)
    assert placement.num_homes("a", now_s) >= at_the_rise - 1
    now_s = _drive(placement, 40, 300, now_s)
    assert placement.num_homes("a", now_s) == 1
    assert placement.wide(now_s) == {}


def test_an_ingress_reckons_with_the_others_traffic() -> None:
    alone, one_of_four = Placement(0.5), Placement(0.5)
    one_of_four.num_ingresses = 4
    for placement in (alone, one_of_four):
        placement.change(f"r{i}" for i in range(16))
        _drive(placement, 50, 30, 0.0)
    assert alone.num_homes("a", 30.0) == 1
    assert one_of_four.num_homes("a", 30.0) == 4


def test_nothing_is_remembered_without_bound() -> None:
    recent: LruDict[int, int] = LruDict(3)
    for key in range(10):
        recent.put(key, key)
        recent.put(0, -1)  # used again and again: stays
    assert len(recent._entries) == 3
    assert recent.get(0) == -1
    assert recent.get(9) == 9
    assert recent.get(5) is None
