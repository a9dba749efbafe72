"""A plan in an engine replica, and the loads behind it; the paced engine replaces the actor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError

from engine.errors import UnknownAdapterError
from engine.types import Request, SamplingParams
from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion
from registry.errors import CacheFailedError, RegistryUnavailableError
from serve_app.errors import AdapterUnsupportedError
from serve_app.messages import AdapterPlan
from serve_app.replica import adapter_loads
from serve_app.replica.adapter_keeper import AdapterKeeper
from serve_app.replica.adapter_loads import AdapterLoads, LoadResult, slowest
from tests.fakes_engine import REFUSED, PacedEngine
from tests.fakes_registry import FolderRegistry
from tests.waiting import until


class EngineActor:
    """The paced engine behind an actor's handle."""

    def __init__(self, engine: PacedEngine) -> None:
        self._engine = engine
        self.is_dead = False

    def __getattr__(self, method: str) -> SimpleNamespace:
        async def remote(*arguments: object) -> object:
            if self.is_dead:
                raise ActorDiedError
            return await getattr(self._engine, method)(*arguments)

        return SimpleNamespace(remote=remote)


class Replica:
    """The parts of an engine replica that handle adapters."""

    def __init__(self, folder: Path) -> None:
        self.registry = FolderRegistry(folder)
        self.base = self.registry.add_base("base")
        self.registry.write(Catalog((self.base,)))
        self.engine = PacedEngine(rate=500.0)
        self.loads = AdapterLoads(self.registry, self.engine.load_adapter)
        self.actor = EngineActor(self.engine)
        self.keeper = AdapterKeeper(self.loads, cast(Any, self.actor))

    def adapter(self, name: str, *, has_files: bool = True) -> AdapterVersion:
        return self.registry.add_adapter(name, self.base, has_files=has_files)


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(tmp_path)


async def test_pins_are_loaded_and_pinned_and_let_go_again(replica: Replica) -> None:
    adapters = tuple(replica.adapter(name) for name in "abcd")
    digests = {adapter.digest for adapter in adapters}
    replica.keeper.arrange(AdapterPlan("m", adapters))
    await until(lambda: replica.engine.pinned == digests)
    assert set(replica.engine.loaded) == digests
    replica.keeper.arrange(AdapterPlan("m", adapters[:1]))
    await until(lambda: replica.engine.pinned == {adapters[0].digest})
    assert set(replica.engine.loaded) == digests  # they may stay, and be dropped


async def test_a_pin_that_fails_is_told_and_the_others_are_kept(replica: Replica) -> None:
    away, here = replica.adapter("away", has_files=False), replica.adapter("here")
    plan = AdapterPlan("m", (away, here))
    replica.keeper.arrange(plan)
    await until(lambda: replica.engine.pinned == {here.digest})
    await until(lambda: away.digest in replica.keeper.failures)
    assert "the files of away are away" in replica.keeper.failures[away.digest]
    (replica.registry.folder / away.digest).mkdir()
    replica.keeper.arrange(plan)  # as the manager does again and again
    await until(lambda: replica.engine.pinned == {away.digest, here.digest})
    await until(lambda: not replica.keeper.failures)


async def test_a_pinned_adapter_that_left_memory_comes_back(replica: Replica) -> None:
    adapter = replica.adapter("a")
    plan = AdapterPlan("m", (adapter,))
    replica.keeper.arrange(plan)
    await until(lambda: replica.engine.pinned == {adapter.digest})
    await replica.engine.unload_adapter(adapter.digest)
    replica.keeper.arrange(plan)
    await until(lambda: replica.engine.pinned == {adapter.digest})


async def test_a_version_is_unloaded_once_a_retirement(replica: Replica) -> None:
    adapter = replica.adapter("a")
    await replica.loads.ensure(adapter)
    first = AdapterPlan("m", (), ((adapter.digest, 1),))
    replica.keeper.arrange(first)
    await until(lambda: not replica.engine.loaded)
    replica.loads.forget(adapter.digest)
    await replica.loads.ensure(adapter)  # a request names the old version
    replica.keeper.arrange(first)
    await asyncio.sleep(0.05)
    assert replica.engine.has_adapter(adapter.digest)
    replica.keeper.arrange(AdapterPlan("m", (), ((adapter.digest, 2),)))
    await until(lambda: not replica.engine.loaded)


async def test_another_managers_numbers_are_its_own(replica: Replica) -> None:
    adapter = replica.adapter("a")
    for epoch in ("m", "n"):
        await replica.loads.ensure(adapter)
        replica.keeper.arrange(AdapterPlan(epoch, (), ((adapter.digest, 1),)))
        await until(lambda: not replica.engine.loaded)
        replica.loads.forget(adapter.digest)


async def test_a_retired_version_leaves_with_its_last_request(replica: Replica) -> None:
    adapter = replica.adapter("a")
    await replica.loads.ensure(adapter)
    await replica.engine.submit(Request("r", (1, 2), SamplingParams(max_tokens=9), adapter.digest))
    replica.keeper.arrange(AdapterPlan("m", (), ((adapter.digest, 1),)))
    await until(lambda: not replica.engine.has_adapter(adapter.digest))
    assert replica.engine.loaded
    replica.engine.abort("r")
    await until(lambda: not replica.engine.loaded)


async def test_what_is_pinned_is_not_unloaded_though_another_name_gave_it_up(
    replica: Replica,
) -> None:
    adapter = replica.adapter("a")
    replica.keeper.arrange(AdapterPlan("m", (adapter,), ((adapter.digest, 1),)))
    await until(lambda: replica.engine.pinned == {adapter.digest})
    await asyncio.sleep(0.05)
    assert replica.engine.has_adapter(adapter.digest)


async def test_an_engine_that_died_is_no_failure_of_its_plan(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = replica.adapter("a")
    replica.actor.is_dead = True
    replica.keeper.arrange(AdapterPlan("m", (), ((adapter.digest, 1),)))
    await asyncio.sleep(0.05)
    assert "ended by an exception" not in caplog.text


class SlowStore(FolderRegistry):
    """Downloads wait for `gate`; files on disk do not."""

    gate = threading.Event()
    fetching: list[str] = []  # noqa: RUF012  (shared on purpose: the registry is a frozen value)
    slow: set[str] = set()  # noqa: RUF012  (digests; the same)

    def local_digests(self) -> frozenset[str]:
        return frozenset(d for d in super().local_digests() if d not in self.slow)

    def fetch(self, version: BaseVersion | AdapterVersion) -> Path:
        if version.digest in self.slow:
            self.fetching.append(version.digest)
            assert self.gate.wait(120)
        return super().fetch(version)


async def test_what_is_on_disk_does_not_wait_behind_downloads(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    store.gate.clear()
    store.fetching.clear()
    base = store.add_base("base")
    engine = PacedEngine()
    loads = AdapterLoads(store, engine.load_adapter)
    slow = [store.add_adapter(f"slow{i}", base) for i in range(10)]
    store.slow.clear()
    store.slow.update(adapter.digest for adapter in slow)
    downloads = [asyncio.create_task(loads.ensure(adapter)) for adapter in slow for _ in range(3)]
    await until(lambda: len(store.fetching) >= 4)
    quick = await loads.ensure(store.add_adapter("quick", base))
    assert quick.found_in == "disk"
    assert len(store.fetching) == 4  # so many at a time
    store.gate.set()
    loaded = await asyncio.gather(*downloads)
    assert {one.found_in for one in loaded} == {"registry"}
    assert len(store.fetching) == 10  # once each, however many wait
    assert (await loads.ensure(slow[0])).found_in is None
    text = loads.times.text({}).decode()
    assert 'loraplex_adapter_load_seconds_count{tier="registry"} 10.0' in text
    assert 'loraplex_adapter_load_seconds_count{tier="disk"} 1.0' in text


async def test_a_load_is_no_part_of_the_request_that_began_it(replica: Replica) -> None:
    """Ray finds the calls to cancel with a request by a variable of the context."""
    of_ray = ContextVar("of_ray", default="")
    of_ray.set("the request's task")
    seen: list[str] = []

    def load(name: str, digest: str, path: str) -> Awaitable[object]:
        seen.append(of_ray.get())
        return replica.engine.load_adapter(name, digest, path)

    await AdapterLoads(replica.registry, load).ensure(replica.adapter("a"))
    assert seen == [""]


async def test_the_reason_of_a_disk_that_fails_is_in_the_log_once(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients get 503 without the reason, which is the operator's."""

    def failing(*_: object) -> Path:
        raise CacheFailedError("[Errno 5] Input/output error: 'blobs'")

    monkeypatch.setattr(FolderRegistry, "fetch", failing)
    for _ in range(3):
        with pytest.raises(CacheFailedError):
            await replica.loads.ensure(replica.adapter("a"))
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "adapter a could not be loaded: [Errno 5]" in record.getMessage()


async def test_only_the_load_that_was_seen_is_forgotten(replica: Replica) -> None:
    adapter = replica.adapter("a")
    first = await replica.loads.ensure(adapter)
    replica.loads.forget(adapter.digest, first)
    second = await replica.loads.ensure(adapter)
    replica.loads.forget(adapter.digest, first)  # by a second request that had seen the first
    assert (await replica.loads.ensure(adapter)).task is second.task


async def test_the_adapters_of_a_request_are_loaded_together_and_again(replica: Replica) -> None:
    first, second = replica.adapter("a"), replica.adapter("b")
    calls: list[list[str | None]] = []

    async def call(loaded: Sequence[LoadResult]) -> None:
        calls.append([one.found_in for one in loaded])
        if len(calls) == 1:  # evicted meanwhile
            raise UnknownAdapterError(first.digest)

    await replica.loads.use((first, second), call)
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert None not in calls[1]
    assert slowest([None, "registry", "disk"]) == "registry"
    assert slowest([None, "disk"]) == "disk"
    assert slowest([None]) is None


async def test_one_adapter_that_cannot_be_loaded_fails_the_request(replica: Replica) -> None:
    good, lost = replica.adapter("a"), replica.adapter("b", has_files=False)

    async def call(loaded: Sequence[LoadResult]) -> None:
        raise AssertionError

    with pytest.raises(RegistryUnavailableError, match="the files of b are away"):
        await replica.loads.use((good, lost), call)


async def test_the_engine_is_told_of_its_disk_at_once_after_a_load_and_once(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_loads, "_PUBLISH_EVERY_S", 1000.0)  # hence after the load only
    told: list[tuple[tuple[str, ...], float, float]] = []
    broken = [OSError("the disk is away")]

    async def note(digests: tuple[str, ...], disk_s: float, registry_s: float) -> None:
        if broken:
            raise broken.pop()
        told.append((digests, disk_s, registry_s))
        monkeypatch.setattr(adapter_loads, "_PUBLISH_EVERY_S", 0.1)

    first = replica.adapter("first")
    task = asyncio.create_task(replica.loads.publish(note))
    try:
        await until(lambda: not broken)
        await replica.loads.ensure(first)
        await until(lambda: len(told) == 1)
        assert first.digest in told[0][0]
        assert told[0][1] > 0.0 == told[0][2]
        second = replica.adapter("second")  # by another process
        await until(lambda: len(told) == 2)
        assert second.digest in told[1][0]
    finally:
        task.cancel()


async def test_disk_reports_end_with_the_engine(replica: Replica) -> None:
    async def note(digests: tuple[str, ...], disk_s: float, registry_s: float) -> None:
        raise ActorDiedError

    await asyncio.wait_for(replica.loads.publish(note), 10)


async def test_what_the_engine_refuses_is_told_by_digest_and_read_once(replica: Replica) -> None:
    bad = replica.adapter("bad")
    (replica.registry.folder / bad.digest / REFUSED).touch()
    for _ in range(3):
        with pytest.raises(AdapterUnsupportedError, match=r"'bad' version 1 .* layer 3 holds NaN"):
            await replica.loads.ensure(bad)
    assert replica.loads.refused == {bad.digest: "layer 3 holds NaN"}
    assert (replica.registry.folder / bad.digest / REFUSED).read_text() == "read\n"
