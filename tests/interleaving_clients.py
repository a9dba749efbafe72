"""Callers of an AsyncEngine that come and go by their seeds: threads and event loop decide the
order. Each checks its own outputs; time-outs exist to find deadlocks and measure nothing.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from engine.errors import UnknownAdapterError
from engine.factory import open_engine
from engine.service import AsyncEngine
from engine.types import Request, StepOutput
from lora.errors import AdapterError, HostMemoryError
from tests.interleaving_world import (
    MAX_TOKENS,
    NAMES,
    NUM_BLOCKS,
    Ledger,
    Tally,
    World,
    digest_of,
    make_request,
)

DEADLOCK_S = 60  # a round takes a fraction of a second
_TURNS = 8  # requests per client
_CLIENTS = 10


@dataclass(slots=True)
class Round:
    """The state that the clients of one engine share."""

    world: World
    tally: Tally
    engine: AsyncEngine
    ledger: Ledger
    champion: dict[str, str]


async def run_round(world: World, tally: Tally, seed: int) -> None:
    """Runs all clients at once, then unloads everything, and checks that nothing is left."""
    engine = open_engine(world.config)
    on_device: set[str] = set()

    def note(step: StepOutput) -> None:
        tally.add("left the device", len(on_device - set(step.load.adapters_on_device)))
        on_device.clear()
        on_device.update(step.load.adapters_on_device)

    engine.subscribe(note)
    engine.start()
    ledger = Ledger(world, tally)
    this = Round(world, tally, engine, ledger, {name: digest_of(name, 0) for name in NAMES})
    try:
        async with asyncio.timeout(DEADLOCK_S):
            async with asyncio.TaskGroup() as clients:
                for number in range(_CLIENTS):
                    clients.create_task(_client(this, number, random.Random(f"{seed}-{number}")))
            await asyncio.gather(*(engine.unload_adapter(digest) for digest in world.digests))
            # Aborted requests end in a step after it, and the load is older than that.
            await _until_idle(engine)
        load = engine.load()
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert load.num_free_blocks == NUM_BLOCKS
        assert load.adapters_on_device == load.adapters_on_host == ()
        tally.add("interleavings")
        tally.add("steps", load.num_steps)
        tally.add("preempted", load.num_preemptions)
    finally:
        await asyncio.to_thread(engine.stop)


async def _client(this: Round, number: int, rng: random.Random) -> None:
    for turn in range(_TURNS):
        name, version = rng.choice(NAMES), rng.randrange(3)
        match rng.choice(("ask", "ask", "ask", "ask", "load", "unload", "flip")):
            case "ask":
                await _ask(this, f"r{number}-{turn}", rng)
            case "load":
                await _load(this, digest_of(name, version))
            case "unload":
                # A client has one request at a time: it never waits for itself.
                await this.engine.unload_adapter(digest_of(name, version))
                this.tally.add("unloads")
            case _:
                this.champion[name] = digest_of(name, version)
                this.tally.add("flips")


async def _ask(this: Round, request_id: str, rng: random.Random) -> None:
    name = rng.choice((*NAMES, *NAMES, None))
    digest = None if name is None else this.champion[name]
    if digest is not None and not this.engine.has_adapter(digest):
        await _load(this, digest)
    n, max_tokens = rng.choice((1, 1, 2)), rng.randint(1, MAX_TOKENS)
    request = make_request(this.world, request_id, digest, rng.randrange(4), n, max_tokens)
    end = rng.choice(("read", "read", "leave", "cancel", "abort"))
    after = rng.randrange(1, 1 + n * max_tokens)
    reading = asyncio.create_task(_read(this, request, end, after))
    if end == "cancel":
        for _ in range(rng.randrange(30)):  # anywhere between submission and the last token
            await asyncio.sleep(0)
        if reading.cancel():
            this.tally.add("cancels")
    try:
        await reading
    except asyncio.CancelledError:
        assert end == "cancel"
    except UnknownAdapterError:
        this.tally.add("refused")  # unloaded or dropped in the meantime


async def _read(this: Round, request: Request, end: str, after: int) -> None:
    """Reads a request to its end, or until `after` outputs."""
    ledger, stream = this.ledger, this.engine.generate(request)
    ledger.open(request)
    # The host may be full at any time: a waiting request then loses its adapter, which only the
    # engine sees.
    ledger.entries[request.request_id].may_be_lost = request.adapter is not None
    num_outputs = 0
    try:
        async for output in stream:
            ledger.take(output)
            num_outputs += 1
            if num_outputs != after:
                continue
            if end == "leave":
                return
            if end == "abort":
                ledger.abort(request.request_id)
                this.engine.abort(request.request_id)
        assert not ledger.is_open(request.request_id)
    finally:
        await stream.aclose()


async def _load(this: Round, digest: str) -> None:
    try:
        await this.engine.load_adapter(digest, digest, str(this.world.paths[digest]))
        this.tally.add("loads")
    except HostMemoryError:
        this.tally.add("no host memory")
    try:
        await this.engine.load_adapter("broken", "broken", str(this.world.broken))
    except AdapterError:
        this.tally.add("broken")
    assert not this.engine.has_adapter("broken")


async def _until_idle(engine: AsyncEngine) -> None:
    while engine.load().num_running or engine.load().num_waiting:
        await asyncio.sleep(0)
