"""Pins, evictions and unloads on the real engine with a pool that is too small for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import AdapterInUseError, UnknownAdapterError
from engine.factory import open_engine
from engine.service import AsyncEngine
from engine.types import Request, Resident, SamplingParams
from lora.errors import HostMemoryError, PinnedMemoryError
from tests.engine_helpers import make_adapter, make_base
from tests.fakes import FakePool, FakeRunner, make_engine, make_request

NUM_ADAPTERS = 6
POOL_BLOCKS = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The base, then adapters."""
    root = tmp_path_factory.mktemp("residency")
    base = make_base(root / "base", num_hidden_layers=1)
    adapters = [
        make_adapter(root / f"a{i}", base, 4, ("q_proj", "v_proj"), seed=i)
        for i in range(NUM_ADAPTERS)
    ]
    return [base, *adapters]


def config(base: Path) -> EngineConfig:
    return EngineConfig(
        str(base),
        "base",
        device="cpu",
        dtype="float32",
        block_size=4,
        num_blocks=64,
        adapter_pool_bytes=1 << 20,
        num_threads=1,
    )


@pytest.fixture
async def engine(folders: list[Path]) -> AsyncIterator[AsyncEngine]:
    """Room for two adapters on the device and for four on the host; none is loaded."""
    roomy = open_engine(config(folders[0]))
    roomy.start()
    await roomy.load_adapter("a0", "a0", str(folders[1]))
    (one,) = await roomy.adapters()
    pool = roomy._engine._runner.adapters  # type: ignore[attr-defined]
    block_bytes = pool.reserved_bytes // pool.num_blocks  # an adapter takes one
    await asyncio.to_thread(roomy.stop)
    small = replace(
        config(folders[0]),
        adapter_pool_bytes=POOL_BLOCKS * block_bytes,
        adapter_host_bytes=4 * one.num_bytes,
    )
    engine = open_engine(small)
    engine.start()
    yield engine
    await asyncio.to_thread(engine.stop)


async def load(engine: AsyncEngine, folders: list[Path], *numbers: int) -> None:
    for i in numbers:
        await engine.load_adapter(f"a{i}", f"a{i}", str(folders[1 + i]))


def request(name: str, adapter: str, max_tokens: int = 3) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, (5, 6, 7), params, adapter)


async def tokens(engine: AsyncEngine, asked: Request) -> list[int]:
    return [token async for output in engine.generate(asked) for token in output.token_ids]


async def state(engine: AsyncEngine) -> dict[str, Resident]:
    return {one.digest: one for one in await engine.adapters()}


async def test_a_pinned_adapter_stays_on_the_device_under_pressure(
    engine: AsyncEngine, folders: list[Path]
) -> None:
    await load(engine, folders, 0)
    before = await tokens(engine, request("first", "a0"))
    await engine.pin_adapter("a0")
    for round_ in range(2):
        for i in range(1, NUM_ADAPTERS):
            await load(engine, folders, i)
            await tokens(engine, request(f"r{round_}-{i}", f"a{i}"))
            pinned = (await state(engine))["a0"]
            assert (pinned.is_pinned, pinned.is_on_device) == (True, True)
    assert engine.load().num_pinned_adapters == 1
    assert await tokens(engine, request("again", "a0")) == before
    assert engine.load().num_adapter_copies == 1 + 2 * (NUM_ADAPTERS - 1)
    await engine.unpin_adapter("a0")
    for i in range(1, NUM_ADAPTERS):
        await load(engine, folders, i)
        await tokens(engine, request(f"last-{i}", f"a{i}"))
    assert not engine.has_adapter("a0")


async def test_a_pin_brings_an_adapter_to_the_device(
    engine: AsyncEngine, folders: list[Path]
) -> None:
    await load(engine, folders, 0)
    assert not (await state(engine))["a0"].is_on_device
    await engine.pin_adapter("a0")
    assert (await state(engine))["a0"].is_on_device


async def test_pins_leave_room_for_the_others(engine: AsyncEngine, folders: list[Path]) -> None:
    await load(engine, folders, 0, 1, 2)
    await engine.pin_adapter("a0")
    with pytest.raises(PinnedMemoryError, match="2 of 2 blocks"):
        await engine.pin_adapter("a1")
    assert len(await tokens(engine, request("r", "a2"))) == 3
    with pytest.raises(UnknownAdapterError):
        await engine.pin_adapter("a5")


async def test_eviction_is_refused_while_an_adapter_is_used_or_pinned(
    engine: AsyncEngine, folders: list[Path]
) -> None:
    await load(engine, folders, 0)
    stream = engine.generate(request("long", "a0", max_tokens=100))
    await anext(stream)
    assert (await state(engine))["a0"].num_references == 1
    with pytest.raises(AdapterInUseError, match="in use by 1 requests"):
        await engine.evict_adapter("a0")
    await engine.pin_adapter("a0")
    await stream.aclose()
    with pytest.raises(AdapterInUseError, match="pinned"):
        await engine.evict_adapter("a0")
    await engine.unpin_adapter("a0")
    await engine.evict_adapter("a0")
    assert not await engine.adapters()
    assert engine.load().adapter_device_bytes == engine.load().adapter_host_bytes == 0
    with pytest.raises(UnknownAdapterError):
        await engine.evict_adapter("a0")
    await load(engine, folders, 0)
    assert len(await tokens(engine, request("r", "a0"))) == 3


async def test_an_unload_ends_a_pin_and_shows_while_it_waits(
    engine: AsyncEngine, folders: list[Path]
) -> None:
    await load(engine, folders, 0)
    await engine.pin_adapter("a0")
    stream = engine.generate(request("long", "a0", max_tokens=100))
    await anext(stream)
    unload = asyncio.create_task(engine.unload_adapter("a0"))
    while engine.has_adapter("a0"):
        await asyncio.sleep(0)
    assert (await state(engine))["a0"].is_leaving
    await stream.aclose()
    await unload
    assert not await engine.adapters()
    await load(engine, folders, 0)
    assert not (await state(engine))["a0"].is_pinned


async def test_memory_stays_within_its_limits_and_is_counted(
    engine: AsyncEngine, folders: list[Path]
) -> None:
    for i in range(NUM_ADAPTERS):
        await load(engine, folders, i)
        await tokens(engine, request(f"r{i}", f"a{i}"))
    residents = await engine.adapters()
    now = engine.load()
    assert len(residents) == 4
    assert sum(one.is_on_device for one in residents) == POOL_BLOCKS
    assert now.adapter_host_bytes == sum(one.num_bytes for one in residents)
    assert now.adapter_device_bytes == POOL_BLOCKS * (now.adapter_device_bytes // POOL_BLOCKS) > 0
    used = [one.used_s for one in residents]
    assert used == sorted(used)


async def test_nobody_who_waits_loses_the_adapter_to_a_newcomer(
    engine: AsyncEngine, folders: list[Path]
) -> None:
    await load(engine, folders, 0, 1, 2, 3)
    streams = [engine.generate(request(f"r{i}", f"a{i}", max_tokens=100)) for i in range(4)]
    first = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)  # two run, two wait
    with pytest.raises(HostMemoryError):
        await load(engine, folders, 4)
    outputs = await asyncio.gather(*first)
    assert {output.finish_reason for output in outputs} == {None}
    for stream in streams:
        await stream.aclose()
    await load(engine, folders, 4)
    assert engine.has_adapter("a4")


def test_a_request_that_waits_counts_as_a_use() -> None:
    pool = FakePool(known={"x"}, blocked={"x"})
    engine, _ = make_engine(FakeRunner(adapters=pool))
    engine.add_request(make_request("r", adapter="x"))
    engine.step()
    assert engine.adapters()[0].num_references == 1
    with pytest.raises(AdapterInUseError):
        engine.evict_adapter("x")
