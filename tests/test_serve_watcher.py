"""The watcher alone: joined wakes, a registry that goes down and recovers, changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion
from registry.errors import RegistryUnavailableError
from registry.events import Change
from serve_app.control import watcher as module
from serve_app.control.watcher import OnChanges, Watcher
from tests.waiting import until

NEVER_S = 1000.0  # without a wake there is no second read
BASE = BaseVersion("tiny", 1, "base-1", "uri")


def catalog(champion: int) -> Catalog:
    versions = [
        AdapterVersion("pirate", number, f"d{number}", "tiny", "base-1", 8, (), "uri")
        for number in (1, 2)
    ]
    versions[champion - 1] = replace(versions[champion - 1], aliases=("champion",))
    return Catalog((BASE,), tuple(versions))


@dataclass
class Store:
    """A registry that counts its reads; a read lasts as long as it is held."""

    content: Catalog | Exception = field(default_factory=lambda: catalog(1))
    num_looks: int = 0
    num_at_once: int = 0
    held: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.held.set()

    def look(self) -> Catalog:
        self.num_looks += 1
        self.num_at_once += 1
        assert self.num_at_once == 1
        assert self.held.wait(120)
        self.num_at_once -= 1
        if isinstance(self.content, Exception):
            raise self.content
        return self.content


@asynccontextmanager
async def watching(
    store: Store, interval_s: float = NEVER_S, on_changes: OnChanges = lambda changed: None
) -> AsyncIterator[Watcher]:
    watcher = Watcher(store.look, interval_s, on_changes)
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        store.held.set()
        task.cancel()


def metrics(text: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_a_wake_makes_the_next_look_immediate() -> None:
    store = Store()
    async with watching(store) as watcher:
        await until(lambda: watcher.catalog is not None)
        store.content = catalog(2)
        watcher.wake()
        await until(lambda: watcher.catalog == catalog(2))
        assert store.num_looks == 2


async def test_a_catalog_says_when_the_look_for_it_began() -> None:
    store = Store()
    async with watching(store) as watcher:
        await until(lambda: watcher.read_began_s > 0)
        store.held.clear()
        watcher.wake()
        await until(lambda: store.num_looks == 2)
        meanwhile_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.01)
        first_s = watcher.read_began_s
        store.held.set()
        await until(lambda: watcher.read_began_s > first_s)
        assert watcher.read_began_s <= meanwhile_s
        known_s = watcher.read_began_s
        store.content = RegistryUnavailableError("away")
        watcher.wake()
        await until(lambda: watcher.error is not None)
        assert watcher.read_began_s == known_s


async def test_wakes_during_a_look_lead_to_exactly_one_more() -> None:
    store = Store()
    store.held.clear()
    async with watching(store) as watcher:
        await until(lambda: store.num_looks == 1)
        for _ in range(1000):
            watcher.wake()
        store.content = catalog(2)  # after the wakes: the first read may have read already
        store.held.set()
        await until(lambda: store.num_looks == 2)
        await asyncio.sleep(3 * module.MIN_PAUSE_S)
        assert store.num_looks == 2


async def test_a_flood_of_wakes_is_no_flood_of_looks() -> None:
    store = Store()
    async with watching(store) as watcher:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while store.num_looks < 5:
            watcher.wake()
            await asyncio.sleep(0)
        assert loop.time() - began_s > 3.9 * module.MIN_PAUSE_S


async def test_a_read_that_never_ends_is_a_registry_that_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sockets may receive a byte now and then; nobody would notice that changes are missed."""
    monkeypatch.setattr(module, "_SILENT_S", 0.05)
    store = Store()
    async with watching(store) as watcher:
        await until(lambda: watcher.catalog is not None)
        store.held.clear()
        watcher.wake()
        await until(lambda: watcher.error is not None)
        assert watcher.error is not None
        assert "no answer" in watcher.error
        assert metrics(watcher.metrics(0.0))["loraplex_registry_up"] == 0
        assert watcher.catalog == catalog(1)
        store.content = catalog(2)
        store.held.set()
        await until(lambda: watcher.catalog == catalog(2))
        assert watcher.error is None


async def test_while_the_registry_is_down_the_last_catalog_stays() -> None:
    store = Store()
    async with watching(store, 0.01) as watcher:
        await until(lambda: watcher.catalog is not None)
        store.content = RegistryUnavailableError("connection refused by <object at 0x1>")
        await until(lambda: watcher.error is not None)
        first = watcher.error
        store.content = RegistryUnavailableError("connection refused by <object at 0x2>")
        looks = store.num_looks
        await until(lambda: store.num_looks > looks + 1)
        assert watcher.error == first  # each text would be a new view for every ingress
        assert watcher.catalog == catalog(1)
        store.content = catalog(2)
        await until(lambda: watcher.error is None)
        assert watcher.catalog == catalog(2)


async def test_the_wait_grows_while_it_is_down_and_a_wake_ends_it() -> None:
    store = Store(RegistryUnavailableError("down"))
    async with watching(store, 2.0) as watcher:
        for failures, limits in ((1, (1.0, 2.0)), (2, (2.0, 4.0)), (9, (10.0, 20.0))):
            watcher._num_failures = failures
            delays = [watcher._delay_s() for _ in range(50)]
            assert limits[0] <= min(delays) < max(delays) <= limits[1]
        watcher._interval_s = 60.0  # above the cap: never more often than when all is well
        assert watcher._delay_s() >= 30.0
        await until(lambda: watcher.error is not None)
        store.content = catalog(1)
        watcher.wake()
        await until(lambda: watcher.catalog is not None)


async def test_an_unexpected_failure_does_not_end_the_watch() -> None:
    store = Store(ZeroDivisionError("a bug"))
    async with watching(store, 0.01) as watcher:
        await until(lambda: watcher.error is not None)
        assert "ZeroDivisionError" in str(watcher.error)
        store.content = catalog(1)
        await until(lambda: watcher.catalog is not None)


async def test_the_log_promises_a_catalog_only_if_there_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store(RegistryUnavailableError("away"))
    async with watching(store, 0.01) as watcher:
        await until(lambda: watcher.error is not None)
        assert "cannot be read, no catalog of it is known yet: away" in caplog.text
        store.content = catalog(1)
        await until(lambda: watcher.error is None and watcher.catalog is not None)
        store.content = RegistryUnavailableError("away again")
        await until(lambda: watcher.error is not None)
    assert "its last good catalog stays in use: away again" in caplog.text


async def test_subscribers_hear_what_changed_and_nothing_of_the_first_catalog() -> None:
    store, heard = Store(), list[Change]()
    async with watching(store, 0.01, heard.extend) as watcher:
        await until(lambda: store.num_looks > 2)
        assert heard == []
        store.content = catalog(2)
        await until(lambda: watcher.catalog == catalog(2))
    assert heard == [Change("alias_moved", "pirate@champion moved from version 1 to 2")]


async def test_equal_catalogs_stay_one_object() -> None:
    store = Store()
    async with watching(store, 0.01) as watcher:
        await until(lambda: watcher.catalog is not None)
        first, looks = watcher.catalog, store.num_looks
        store.content = catalog(1)
        await until(lambda: store.num_looks > looks + 1)
        assert watcher.catalog is first


async def test_metrics_tell_whether_it_is_up_since_when_and_what_changed() -> None:
    store = Store(RegistryUnavailableError("down"))
    async with watching(store, 0.01) as watcher:
        await until(lambda: watcher.error is not None)
        assert metrics(watcher.metrics(0.0))["loraplex_registry_up"] == 0
        assert (
            metrics(watcher.metrics(0.0))["loraplex_registry_last_success_timestamp_seconds"] == 0
        )
        store.content = catalog(1)
        await until(lambda: watcher.catalog is not None)
        store.content = catalog(2)
        await until(lambda: watcher.catalog == catalog(2))
        found = metrics(watcher.metrics(0.0))
    assert found["loraplex_registry_up"] == 1
    assert found["loraplex_registry_last_success_timestamp_seconds"] == pytest.approx(
        watcher.last_success_s
    )
    assert found["loraplex_registry_snapshot_seconds"] >= 0
    assert found["loraplex_registry_changes_totalalias_moved"] == 1
    assert found["loraplex_registry_changes_totalversion_added"] == 0


async def test_after_a_look_that_hung_for_minutes_the_next_one_comes_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    watcher = Watcher(Store().look, 0.01)
    await watcher._pause(600.0)
    assert pauses == [module._MAX_BACKOFF_S]
