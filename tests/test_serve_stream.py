"""The side stream over real sockets: an engine host with the paced engine, an ingress's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from engine.errors import EngineDeadError, InvalidRequestError
from engine.types import EngineLoad, Request, SamplingParams, TokenOutput
from serve_app.engine_actor import EngineHost
from serve_app.metrics import EngineMetrics
from serve_app.stream import (
    MAX_CONTROL_BYTES,
    Abort,
    Frame,
    FrameSplitter,
    Hello,
    Step,
    StreamError,
    decode_frame,
    encode_frame,
)
from serve_app.stream_client import MAX_WAITING_OUTPUTS, IngressLink
from serve_app.stream_server import StreamServer, TokenStream
from tests.fakes_engine import PacedEngine


@dataclass
class Rig:
    engine: PacedEngine
    host: EngineHost
    server: StreamServer

    def submit(self, *requests: Request) -> asyncio.Task[None]:
        call = self.host.submit(requests, self.server.address, None)
        return asyncio.get_running_loop().create_task(call)


@asynccontextmanager
async def running_rig(rate: float = 500.0) -> AsyncIterator[Rig]:
    engine = PacedEngine(rate=rate)
    host = EngineHost(engine, "e0", EngineMetrics("base", "e0", 16, 0))
    server = StreamServer()
    await server.listen("127.0.0.1")
    host.start()
    try:
        yield Rig(engine, host, server)
    finally:
        host.stop()
        server.close()
        await asyncio.sleep(0)


def new_request(request_id: str = "r", max_tokens: int = 5, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return Request(request_id, (11, 12, 13), params)


async def read_all(stream: TokenStream, num_choices: int = 1) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while sum(output.finish_reason is not None for output in outputs) < num_choices:
        outputs += await asyncio.wait_for(stream.read(), 10)
    return outputs


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_tokens_arrive_in_order_and_the_call_returns_after_the_last() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        call = rig.submit(new_request())
        outputs = await read_all(stream)
        await asyncio.wait_for(call, 10)
        assert [output.offset for output in outputs] == [0, 1, 2, 3, 4]
        assert [output.token_ids for output in outputs] == [(11,), (12,), (13,), (11,), (12,)]
        assert outputs[-1].finish_reason == "length"


async def test_several_requests_of_one_call_end_it_together() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["a", "b"])
        call = rig.submit(new_request("a", max_tokens=1), new_request("b", max_tokens=6, n=2))
        outputs = await read_all(stream, num_choices=3)
        await asyncio.wait_for(call, 10)
        by_choice = {
            key: sum((output.request_id, output.choice) == key for output in outputs)
            for key in (("a", 0), ("b", 0), ("b", 1))
        }
        assert by_choice == {("a", 0): 1, ("b", 0): 6, ("b", 1): 6}


async def test_sixty_four_requests_share_one_connection_and_do_not_mix() -> None:
    async with running_rig() as rig:
        names = [f"r{i}" for i in range(64)]
        streams = {name: rig.server.open([name]) for name in names}
        calls = [rig.submit(new_request(name, max_tokens=20)) for name in names]
        for name, stream in streams.items():
            outputs = await read_all(stream)
            assert {output.request_id for output in outputs} == {name}
            assert [output.offset for output in outputs] == list(range(20))
        await asyncio.wait_for(asyncio.gather(*calls), 10)
        assert list(rig.server.loads) == ["e0"]


async def test_a_refused_request_fails_the_call_and_aborts_its_companions() -> None:
    async with running_rig() as rig:
        rig.server.open(["good", "bad"])
        bad = replace(new_request("bad"), prompt_token_ids=())
        with pytest.raises(InvalidRequestError, match="prompt"):
            await rig.submit(new_request("good", max_tokens=10_000), bad)
        assert ("good", None) in rig.engine.aborted
        assert rig.engine.load().num_running == 0


async def test_an_abort_frame_ends_one_choice_and_leaves_the_other() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        call = rig.submit(new_request(max_tokens=100, n=2))
        await stream.read()
        stream.abort("r", 1)
        outputs = await read_all(stream)
        await asyncio.wait_for(call, 10)
        assert rig.engine.aborted == [("r", 1)]
        assert sum(output.choice == 1 for output in outputs) < 100


async def test_cancelling_the_call_aborts_in_the_engine() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        call = rig.submit(new_request(max_tokens=100_000))
        await stream.read()
        call.cancel()
        await until(lambda: rig.engine.load().num_running == 0)
        assert rig.engine.aborted == [("r", None)]


async def test_an_ingress_that_goes_away_has_its_requests_aborted_and_may_come_back() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        call = rig.submit(new_request(max_tokens=100_000))
        await stream.read()
        for connection in tuple(rig.server._connections):
            connection.close()
        with pytest.raises(StreamError, match="connection to the ingress was lost"):
            await asyncio.wait_for(call, 10)
        with pytest.raises(EngineDeadError, match="connection to the engine was lost"):
            await read_all(stream)
        assert rig.engine.load().num_running == 0
        again = rig.server.open(["again"])
        second = rig.submit(new_request("again"))
        assert len(await read_all(again)) == 5
        await asyncio.wait_for(second, 10)


async def test_an_engine_whose_loop_ends_fails_every_call() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        call = rig.submit(new_request(max_tokens=100_000))
        await stream.read()
        rig.engine.die()
        with pytest.raises(EngineDeadError, match="step loop ended"):
            await asyncio.wait_for(call, 10)
        await asyncio.wait_for(rig.host.dead.wait(), 10)


async def test_a_wrong_token_gets_nothing() -> None:
    async with running_rig() as rig:
        rig.server.open(["r"])
        address = replace(rig.server.address, token="guess")
        with pytest.raises(StreamError):
            await asyncio.wait_for(
                rig.host.submit([new_request(max_tokens=100_000)], address, None), 10
            )
        assert rig.server.loads == {}
        assert rig.engine.load().num_running == 0


async def test_nobody_listening_is_an_error_at_once() -> None:
    async with running_rig() as rig:
        address = rig.server.address
        rig.server.close()
        with pytest.raises(StreamError, match="cannot reach the ingress"):
            await rig.host.submit([new_request()], address, None)


async def test_an_idle_engine_still_tells_its_load() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        rig.submit(new_request(max_tokens=1))
        await read_all(stream)
        rig.engine.loaded["d" * 64] = "pirate"
        await until(lambda: rig.server.loads["e0"].adapters_on_device == ("d" * 64,))
        assert rig.server.loads["e0"].num_running == 0


async def test_a_stranger_may_not_make_the_ingress_hold_a_large_frame() -> None:
    async with running_rig() as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.address.port)
        writer.write((MAX_CONTROL_BYTES + 1).to_bytes(4, "big"))
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


def test_frames_survive_any_cut_of_the_bytes() -> None:
    output = TokenOutput("r", 0, 3, (7, 8), finish_reason="stop")
    frames: list[Frame] = [
        Hello("token", "e0"),
        Step((output,), EngineLoad(num_running=2, adapters_on_device=("d",)), False),
        Abort("r", None),
    ]
    data = b"".join(map(encode_frame, frames))
    for size in (1, 2, 3, 5, 8, len(data)):
        splitter = FrameSplitter(MAX_CONTROL_BYTES)
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        payloads = [payload for part in parts for payload in splitter.feed(part)]
        assert [decode_frame(payload) for payload in payloads] == frames


@pytest.mark.parametrize("payload", [b"", b"\x93\x00", b"\x92\x09\x01", b"junk", b"\x80"])
def test_junk_is_an_error_and_nothing_else(payload: bytes) -> None:
    with pytest.raises(StreamError):
        decode_frame(payload)


class StuckTransport(asyncio.Transport):
    """A transport whose peer does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self

    def setsockopt(self, *option: int) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


async def stuck_link() -> tuple[IngressLink, StuckTransport]:
    server = StreamServer()
    await server.listen("127.0.0.1")
    link = IngressLink(server.address, "e0", lambda *_: None, lambda _: None)
    transport = StuckTransport()
    link.connection_made(transport)
    server.close()
    return link, transport


async def test_what_a_slow_ingress_missed_comes_as_one_frame() -> None:
    link, transport = await stuck_link()
    link.pause_writing()
    for offset in range(10):
        link.send([TokenOutput("r", 0, offset, (1,))], EngineLoad(num_steps=offset))
    assert len(transport.written) == 1  # the hello
    link.resume_writing()
    (frame,) = [decode_frame(data[4:]) for data in transport.written[1:]]
    assert isinstance(frame, Step)
    assert [output.offset for output in frame.outputs] == list(range(10))
    assert frame.load.num_steps == 9


async def test_an_ingress_that_never_reads_is_cut_off_at_the_bound() -> None:
    link, transport = await stuck_link()
    link.pause_writing()
    outputs = [TokenOutput("r", 0, 0, (1,))] * MAX_WAITING_OUTPUTS
    link.send(outputs, EngineLoad())
    assert not transport.is_aborted
    link.send(outputs[:1], EngineLoad())
    assert transport.is_aborted
