"""The side stream over real sockets: an engine host with the paced engine, an ingress's server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

import pytest

from engine.errors import EngineDeadError, InvalidRequestError, UnknownAdapterError
from engine.types import (
    EngineLoad,
    Request,
    ResumedChoice,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
    TokenOutput,
)
from serve_app.messages import StreamAddress
from serve_app.metrics.engine import EngineMetrics
from serve_app.openai.engine_params import MAX_LOGPROB_ENTRIES
from serve_app.replica.engine_actor import EngineHost
from serve_app.stream import server as stream_server
from serve_app.stream.client import MAX_FRAME_BYTES, MIN_MERGED, IngressLink, IngressLinks
from serve_app.stream.server import StreamServer, TokenStream
from serve_app.stream.snapshot import EngineSnapshot
from serve_app.stream.wire import (
    MAX_CONTROL_BYTES,
    MAX_STEP_BYTES,
    Abort,
    Accepted,
    Frame,
    FrameSplitter,
    Hello,
    Step,
    StreamError,
    decode_frame,
    encode_frame,
)
from tests.fakes_engine import PacedEngine
from tests.routing_factory import EngineEvents
from tests.waiting import until


@pytest.fixture(autouse=True)
def _pauses_end_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may stand still for longer than the limits of a dialling and of a handshake."""
    monkeypatch.setattr("serve_app.stream.client._DIAL_TIMEOUT_S", 600.0)
    monkeypatch.setattr("serve_app.stream.server._HELLO_TIMEOUT_S", 600.0)


@dataclass
class Rig:
    engine: PacedEngine
    host: EngineHost
    server: StreamServer
    events: EngineEvents

    def submit(self, *requests: Request) -> asyncio.Task[None]:
        call = self.host.submit(requests, self.server.address, None)
        return asyncio.get_running_loop().create_task(call)


@asynccontextmanager
async def running_rig(
    rate: float = 500.0, *, encrypt: bool = False, engine: PacedEngine | None = None
) -> AsyncIterator[Rig]:
    engine = engine or PacedEngine(rate=rate)
    host = EngineHost(engine, "e0", EngineMetrics("base", "e0", 16))
    events = EngineEvents()
    server = StreamServer(events)
    await server.listen("127.0.0.1", encrypt=encrypt)
    host.start()
    try:
        yield Rig(engine, host, server, events)
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
        outputs += await asyncio.wait_for(stream.read(), 120)
    return outputs


def sample(rig: Rig, name: str, reason: str | None = None) -> float:
    """Returns a value of the engine's metrics. `reason`: its label `finished_reason`."""
    lines = rig.host._metrics.text().decode().splitlines()
    label = "" if reason is None else f'finished_reason="{reason}"'
    (line,) = [line for line in lines if line.startswith(name + "{") and label in line]
    return float(line.rsplit(" ", 1)[1])


async def test_tokens_arrive_in_order_and_the_call_returns_after_the_last() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        call = rig.submit(new_request())
        outputs = await read_all(stream)
        await asyncio.wait_for(call, 120)
        assert [output.offset for output in outputs] == [0, 1, 2, 3, 4]
        assert [output.token_ids for output in outputs] == [(11,), (12,), (13,), (11,), (12,)]
        assert outputs[-1].finish_reason == "length"


async def test_several_requests_of_one_call_end_it_together() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["a", "b"])
        call = rig.submit(new_request("a", max_tokens=1), new_request("b", max_tokens=6, n=2))
        outputs = await read_all(stream, num_choices=3)
        await asyncio.wait_for(call, 120)
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
        await asyncio.wait_for(asyncio.gather(*calls), 120)
        assert list(rig.server.loads) == ["e0"]


async def test_a_refused_request_fails_the_call_and_aborts_its_companions() -> None:
    async with running_rig() as rig:
        rig.server.open(["good", "bad"])
        bad = replace(new_request("bad"), prompt_token_ids=())
        with pytest.raises(InvalidRequestError, match="prompt"):
            await rig.submit(new_request("good", max_tokens=10_000), bad)
        assert ("good", None) in rig.engine.aborted
        assert rig.engine.load().num_running == 0


class LongStepEngine(PacedEngine):
    """Admits a request at once and reports it after the step under way, which `step_ended` ends."""

    def __init__(self) -> None:
        super().__init__(rate=500.0)
        self.step_ended = asyncio.Event()
        self.admitted: list[str] = []

    async def submit(self, request: Request) -> None:
        await super().submit(request)
        self.admitted.append(request.request_id)
        await self.step_ended.wait()


async def test_prompts_aborted_while_an_earlier_one_is_submitted_never_run() -> None:
    engine = LongStepEngine()
    async with running_rig(engine=engine) as rig:
        names = ["a", "b", "c"]
        rig.server.open(names)
        call = rig.submit(*(new_request(name, max_tokens=10_000) for name in names))
        await until(lambda: engine.admitted == ["a"])
        for name in ("a", "c"):
            rig.host.abort(name)
        engine.step_ended.set()
        await until(lambda: "b" in engine.admitted)
        assert engine.admitted == ["a", "b"]
        assert engine.load().num_running == 1
        rig.host.abort("b")
        await asyncio.wait_for(call, 120)
        assert engine.load().num_running == 0
        assert sample(rig, "vllm:request_success_total", "abort") == 3


async def test_prompts_aborted_while_their_ingress_is_dialled_never_run() -> None:
    engine = LongStepEngine()
    engine.step_ended.set()
    async with running_rig(engine=engine) as rig:
        stream = rig.server.open(["a", "b"])
        call = rig.submit(new_request("a", max_tokens=10_000), new_request("b"))
        await asyncio.sleep(0)  # the dialling begins
        rig.host.abort("a")
        await read_all(stream)
        await asyncio.wait_for(call, 120)
        assert engine.admitted == ["b"]


async def test_a_call_that_the_engine_refuses_and_takes_later_counts_once() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["a", "b"])
        requests = [replace(new_request(name), adapter="d" * 64) for name in ("a", "b")]
        with pytest.raises(UnknownAdapterError):
            await rig.submit(*requests)
        await rig.engine.load_adapter("adapter", "d" * 64, "nowhere")
        call = rig.submit(*requests)
        await read_all(stream, num_choices=2)
        await asyncio.wait_for(call, 120)
        assert sample(rig, "vllm:request_success_total", "abort") == 0
        assert sample(rig, "vllm:request_success_total", "length") == 2
        for name in ("e2e_request_latency_seconds", "request_prompt_tokens"):
            assert sample(rig, f"vllm:{name}_count") == 2


async def test_an_abort_frame_ends_one_choice_and_leaves_the_other() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        rig.engine.pause_at = 2
        call = rig.submit(new_request(max_tokens=100, n=2))
        outputs = await stream.read()
        stream.abort("r", 1)
        await until(lambda: bool(rig.engine.aborted))
        rig.engine.pause_at = None
        outputs += await read_all(stream)
        await asyncio.wait_for(call, 120)
        assert rig.engine.aborted == [("r", 1)]
        choices = [output.choice for output in outputs]
        assert choices.count(0) == 100
        assert choices.count(1) <= 2


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
            await asyncio.wait_for(call, 120)
        with pytest.raises(EngineDeadError, match="connection to the engine was lost"):
            await read_all(stream)
        assert rig.engine.load().num_running == 0
        again = rig.server.open(["again"])
        second = rig.submit(new_request("again"))
        assert len(await read_all(again)) == 5
        await asyncio.wait_for(second, 120)


async def test_an_engine_whose_loop_ends_fails_every_call() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        call = rig.submit(new_request(max_tokens=100_000))
        await stream.read()
        rig.engine.die()
        with pytest.raises(EngineDeadError, match="step loop ended"):
            await asyncio.wait_for(call, 120)
        await asyncio.wait_for(rig.host.dead.wait(), 120)


async def attended(rig: Rig) -> list[Step]:
    """Returns a list that gets the frames from now on."""
    frames = rig.events.frames = []
    await rig.host.attend(rig.server.address)
    return frames


async def test_an_ingress_that_asked_is_told_of_every_step_and_of_the_end() -> None:
    async with running_rig() as rig:
        other = StreamServer(EngineEvents())
        await other.listen("127.0.0.1")
        stream = other.open(["r"])
        frames, lost = await attended(rig), rig.events.lost
        await until(lambda: bool(frames))
        assert rig.server.engines == {"e0"}
        call = asyncio.create_task(rig.host.submit([new_request()], other.address, None))
        await read_all(stream)
        await asyncio.wait_for(call, 120)
        await until(lambda: frames[-1].load.num_steps == 5)
        assert [frame.outputs for frame in frames] == [()] * len(frames)
        assert [frame.is_whole for frame in frames] == [True] + [False] * (len(frames) - 1)
        assert {frame.load.num_steps for frame in frames} == set(range(6))
        rig.host.stop()
        await until(lambda: lost == ["e0"])
        assert rig.server.engines == frozenset()
        other.close()


async def test_a_second_asking_brings_the_whole_again_over_the_same_link() -> None:
    async with running_rig() as rig:
        frames = await attended(rig)
        rig.host.note_disk(("d" * 64,), 0.5, 0.0)
        await asyncio.gather(*(rig.host.attend(rig.server.address) for _ in range(3)))
        await until(lambda: sum(frame.is_whole for frame in frames) == 4)
        wholes = [frame for frame in frames if frame.is_whole]  # a heartbeat may follow them
        assert wholes[-1].adapters_on_disk == ("d" * 64,)
        assert len(rig.server._connections) == 1


async def test_a_frame_says_once_that_the_engine_has_a_request_and_its_load_counts_it() -> None:
    async with running_rig(rate=50) as rig:
        frames = await attended(rig)
        stream = rig.server.open(["a", "b"])
        rig.engine.loaded["x"] = "pirate"
        rig.engine.pause_at = 0  # no step has only one of them
        requests = [replace(new_request(name, max_tokens=3), adapter="x") for name in "ab"]
        call = rig.host.submit(requests, rig.server.address, "pirate", "disk", 0.25)
        task = asyncio.create_task(call)
        await until(lambda: rig.engine.load().num_running == 2)
        rig.engine.pause_at = None
        await read_all(stream, 2)
        await asyncio.wait_for(task, 120)
        told = [frame for frame in frames if frame.accepted]
        accepted = [one for frame in told for one in frame.accepted]
        assert accepted == [Accepted("a", 0.25, "disk"), Accepted("b", 0.25, "disk")]
        assert stream.found_in == "disk"
        assert told[0].load.num_running == 2
        first = next(frame for frame in frames if frame.outputs)
        assert frames.index(told[0]) <= frames.index(first)


async def test_a_request_taken_and_not_begun_fails_when_its_engine_is_lost() -> None:
    async with running_rig(rate=0.2) as rig:  # no step within the test
        frames = await attended(rig)
        stream = rig.server.open(["r"])
        call = rig.submit(new_request())
        await until(lambda: any(frame.accepted for frame in frames))
        for connection in tuple(rig.server._connections):
            connection.close()
        with pytest.raises(EngineDeadError, match="connection to the engine was lost"):
            await read_all(stream)
        with pytest.raises(StreamError):
            await asyncio.wait_for(call, 120)


async def test_ingresses_that_come_and_go_leave_nothing_behind() -> None:
    async with running_rig() as rig:
        for _ in range(20):
            server = StreamServer(EngineEvents())
            await server.listen("127.0.0.1")
            await rig.host.attend(server.address)
            await until(lambda server=server: server.engines == {"e0"})  # type: ignore[misc]
            server.close()
            await until(lambda: not rig.host._links._links)
        assert not rig.host._links._dialling


async def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        rig.engine.pause_at = 1
        call = rig.submit(new_request(max_tokens=20))
        await stream.read()
        with pytest.raises(InvalidRequestError, match="in use"):
            await rig.submit(new_request("other"), new_request())
        rig.engine.pause_at = None
        assert (await read_all(stream))[-1].offset == 19
        await asyncio.wait_for(call, 120)


async def test_a_resumed_call_ends_with_its_own_choices() -> None:
    async with running_rig() as rig:
        stream = rig.server.open(["r"])
        resumed = (ResumedChoice(2, (11,)), ResumedChoice(0, (11, 12, 13)))
        call = rig.submit(replace(new_request(n=3), resumed=resumed))
        outputs = await read_all(stream, 2)
        await asyncio.wait_for(call, 120)
        offsets = {c: [o.offset for o in outputs if o.choice == c] for c in range(3)}
        assert offsets == {0: [3, 4], 1: [], 2: [1, 2, 3, 4]}


async def test_a_wrong_token_gets_nothing() -> None:
    async with running_rig() as rig:
        rig.server.open(["r"])
        address = replace(rig.server.address, token="guess")
        with pytest.raises(StreamError):
            await asyncio.wait_for(
                rig.host.submit([new_request(max_tokens=100_000)], address, None), 120
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
        digests = ("d" * 64,)
        frames = rig.events.frames
        await until(lambda: any(one.load.adapters_on_device == digests for one in frames))
        assert rig.server.loads["e0"].num_running == 0


async def test_a_stranger_may_not_make_the_ingress_hold_a_large_frame() -> None:
    async with running_rig() as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.address.port)
        writer.write((MAX_CONTROL_BYTES + 1).to_bytes(4, "big"))
        assert await asyncio.wait_for(reader.read(), 120) == b""
        writer.close()


@pytest.mark.parametrize("encrypt", [False, True])
async def test_strangers_hold_a_bounded_number_of_connections_and_keep_no_engine_out(
    encrypt: bool,
) -> None:
    async with running_rig(encrypt=encrypt) as rig:
        port = rig.server.address.port
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(70)]
        closed = [reader.read() for reader, _ in strangers[:6]]  # the oldest
        assert await asyncio.wait_for(asyncio.gather(*closed), 120) == [b""] * 6
        assert len(rig.server._strangers) == 64
        assert not any(reader.at_eof() for reader, _ in strangers[6:])
        await rig.host.attend(rig.server.address)
        await until(lambda: rig.server.engines == {"e0"})
        for _, writer in strangers:
            writer.close()
        await until(lambda: not rig.server._strangers)


async def test_what_leaves_this_machine_is_encrypted_and_the_rest_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = StreamServer(EngineEvents())
    await server.listen("127.0.0.1")
    assert server.address.certificate == ""
    server.close()
    monkeypatch.setattr("serve_app.stream.server.is_loopback", lambda host: False)
    other = StreamServer(EngineEvents())
    await other.listen("127.0.0.1")
    assert "BEGIN CERTIFICATE" in other.address.certificate
    other.close()


async def test_tokens_arrive_over_tls_and_aborts_go_back() -> None:
    async with running_rig(encrypt=True) as rig:
        stream, endless = rig.server.open(["r"]), rig.server.open(["s"])
        call, other = rig.submit(new_request()), rig.submit(new_request("s", max_tokens=100_000))
        assert [output.offset for output in await read_all(stream)] == [0, 1, 2, 3, 4]
        await asyncio.wait_for(call, 120)
        await endless.read()
        endless.abort("s")
        await asyncio.wait_for(other, 120)


async def test_a_connection_without_a_handshake_is_closed_as_one_without_a_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.stream.server._HELLO_TIMEOUT_S", 1.0)
    async with running_rig(encrypt=True) as rig:
        port = rig.server.address.port
        admit = rig.server._admit_stranger
        admitted: list[stream_server._EngineConnection] = []

        def admit_and_note(connection: stream_server._EngineConnection) -> None:
            admit(connection)
            admitted.append(connection)

        monkeypatch.setattr(rig.server, "_admit_stranger", admit_and_note)
        silent, wrong = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: len(admitted) == 2)
        wrong[1].write(b"GET / HTTP/1.1\r\n\r\n")
        for reader, writer in (silent, wrong):
            with suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 120)
            writer.close()
        await until(lambda: not rig.server._strangers)


async def test_tls_begins_on_uvloop_too() -> None:
    """Runs the test on uvloop, as Serve runs the ingress."""
    uvloop = pytest.importorskip("uvloop")

    async def check() -> None:
        async with running_rig(encrypt=True) as rig:
            stream = rig.server.open(["r"])
            call = rig.submit(new_request())
            assert len(await read_all(stream)) == 5
            await asyncio.wait_for(call, 120)

    await asyncio.to_thread(uvloop.run, check())


async def test_an_engine_trusts_no_other_certificate_than_that_of_its_ingress() -> None:
    async with running_rig(encrypt=True) as rig, running_rig(encrypt=True) as other:
        address = replace(rig.server.address, certificate=other.server.address.certificate)
        with pytest.raises(StreamError, match="cannot reach the ingress"):
            await rig.host.attend(address)
        assert not rig.server.engines


async def test_a_plain_hello_gets_nothing_from_an_encrypted_ingress() -> None:
    async with running_rig(encrypt=True) as rig:
        address = replace(rig.server.address, certificate="")
        with pytest.raises(StreamError):
            await rig.host.submit([new_request(max_tokens=100_000)], address, None)
        assert rig.server.loads == {}


async def test_an_engine_cannot_call_itself_another() -> None:
    async with running_rig() as rig, running_rig() as thief:
        await rig.host.attend(rig.server.address)
        await until(lambda: rig.server.engines == {"e0"})
        # The other rig's engine has the same id and a key of its own.
        link_lost = asyncio.Event()
        thief.host._links._on_lost = lambda _: link_lost.set()
        await thief.host.attend(rig.server.address)
        await asyncio.wait_for(link_lost.wait(), 120)
        assert len(rig.server._connections) == 1


async def test_an_engine_cannot_speak_for_a_request_that_another_one_took() -> None:
    async with running_rig() as rig:
        other = EngineHost(PacedEngine(rate=500), "e1", EngineMetrics("base", "e1", 16))
        other.start()
        stream = rig.server.open(["r"])
        call = rig.submit(new_request(max_tokens=100_000))
        await stream.read()
        foreign = asyncio.create_task(
            other.submit([new_request(max_tokens=7)], rig.server.address, None)
        )
        await asyncio.wait_for(foreign, 120)
        loads = rig.server.loads
        await until(lambda: "e1" in loads and loads["e1"].num_steps >= 7)
        assert not any(output.finish_reason for output in await stream.read())
        assert stream.engine_id == "e0"
        call.cancel()
        other.stop()


def test_frames_survive_any_cut_of_the_bytes() -> None:
    output = TokenOutput("r", 0, 3, (7, 8), finish_reason="stop")
    frames: list[Frame] = [
        Hello("token", "e0", "key"),
        Step((output,), EngineLoad(num_running=2, adapters_on_device=("d",)), False),
        Abort("r", None),
    ]
    data = b"".join(map(encode_frame, frames))
    for size in (1, 2, 3, 5, 8, len(data)):
        splitter = FrameSplitter(MAX_CONTROL_BYTES)
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        payloads = [payload for part in parts for payload in splitter.feed(part)]
        assert [decode_frame(payload) for payload in payloads] == frames


NO_UTF8 = b"\x94\x00\xa1\xff\xa2e0\xa1k"  # a Hello whose token is the byte 255


@pytest.mark.parametrize("payload", [b"", b"\x93\x00", b"\x92\x09\x01", b"junk", b"\x80", NO_UTF8])
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


async def stuck_link() -> tuple[IngressLink, StuckTransport, EngineSnapshot]:
    server = StreamServer(EngineEvents())
    await server.listen("127.0.0.1")
    links = IngressLinks("e0", lambda *_: None, lambda _: None)
    snapshot = links.snapshot
    link = IngressLink(server.address, links)
    transport = StuckTransport()
    link.connection_made(transport)
    link.send_full_state()
    server.close()
    return link, transport, snapshot


def steps_of(transport: StuckTransport) -> list[Step]:
    frames = [decode_frame(data[4:]) for data in transport.written[1:]]
    return [frame for frame in frames if isinstance(frame, Step)]


def step(*outputs: TokenOutput, **load: int | tuple[str, ...]) -> StepOutput:
    return StepOutput(outputs, EngineLoad(**load))  # type: ignore[arg-type]


async def test_what_a_slow_ingress_missed_comes_as_one_frame() -> None:
    link, transport, snapshot = await stuck_link()
    link.pause_writing()
    for offset in range(10):
        snapshot.observe(
            replace(
                step(num_steps=offset), cached_prefixes=(offset,), evicted_prefixes=(offset - 3,)
            )
        )
        if offset == 4:
            link.accept(Accepted("r", 0.5, "disk"))
        link.send([TokenOutput("r", 0, offset, (1,))])
    assert len(steps_of(transport)) == 1  # the first frame
    link.resume_writing()
    _, frame = steps_of(transport)
    assert [output.offset for output in frame.outputs] == list(range(10))
    assert frame.load.num_steps == 9
    assert frame.accepted == (Accepted("r", 0.5, "disk"),)
    assert set(frame.cached_prefixes) == {7, 8, 9} == snapshot.prefixes
    assert not frame.is_whole
    link.send()
    assert steps_of(transport)[-1].outputs == ()


async def test_a_request_is_told_of_with_a_load_that_counts_it() -> None:
    link, transport, snapshot = await stuck_link()
    snapshot.observe(step(num_waiting=0))
    link.accept(Accepted("r", 0.0, ""))
    link.send(is_step=False)  # a heartbeat while a long step runs
    link.send_full_state()
    assert [frame.accepted for frame in steps_of(transport)] == [(), (), ()]
    snapshot.observe(step(num_waiting=1))
    link.send()
    snapshot.observe(step(num_waiting=1))
    link.send()
    *_, told, later = steps_of(transport)
    assert (told.accepted, told.load.num_waiting) == ((Accepted("r", 0.0, ""),), 1)
    assert later.accepted == ()


async def test_changes_that_outgrow_the_whole_are_replaced_by_it() -> None:
    link, transport, snapshot = await stuck_link()
    link.pause_writing()
    for first in range(0, 4 * MIN_MERGED, 64):
        chunk = tuple(range(first, first + 64))
        snapshot.observe(replace(step(), cached_prefixes=chunk, evicted_prefixes=chunk[8:]))
        link.send()
    link.resume_writing()
    frame = steps_of(transport)[-1]
    assert frame.is_whole
    assert set(frame.cached_prefixes) == snapshot.prefixes
    assert frame.evicted_prefixes == ()


async def test_the_first_frame_has_the_whole_and_the_next_ones_the_changes() -> None:
    link, transport, snapshot = await stuck_link()
    snapshot.observe(replace(step(adapters_on_device=("a",)), cached_prefixes=(1, 2)))
    snapshot.note_disk(("a", "b"), 0.25, 3.0)
    link.send()
    link.send_full_state()
    snapshot.observe(replace(step(adapters_on_device=("a",)), cached_prefixes=(3,)))
    link.send()
    snapshot.observe(replace(step(adapters_on_device=("c",)), evicted_prefixes=(1,)))
    link.send([TokenOutput("r", 0, 0, (1,))])
    first, changed, whole, third, last = steps_of(transport)
    assert (first.is_whole, first.cached_prefixes, first.adapters_on_disk) == (True, (), ())
    assert (changed.is_whole, changed.cached_prefixes) == (False, (1, 2))
    assert changed.adapters_on_disk == ("a", "b")
    assert changed.load_s == (0.0, 0.25, 3.0)
    assert (whole.is_whole, set(whole.cached_prefixes)) == (True, {1, 2})
    assert (whole.adapters_on_disk, whole.load.adapters_on_device) == (("a", "b"), ("a",))
    assert (third.cached_prefixes, third.adapters_on_disk) == ((3,), None)
    assert (third.same_adapters, third.load.adapters_on_device) == (True, ())
    assert (last.evicted_prefixes, last.load.adapters_on_device) == ((1,), ("c",))
    assert len(last.outputs) == 1


@pytest.fixture
def max_frame_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Lowers the bounds, so that outputs of a few KiB are large."""
    monkeypatch.setattr("serve_app.stream.client.MAX_FRAME_BYTES", 16 * 1024)
    return 16 * 1024


def large_output(request_id: str, offset: int = 0, num_positions: int = 16) -> TokenOutput:
    """Returns an output of about 5 KiB, or 0.3 KiB per position."""
    entry = TokenLogprobs(12345, -1.25, 1, tuple((rank, -1.5 - rank) for rank in range(20)))
    return TokenOutput(request_id, 0, offset, (1,), prompt_logprobs=(entry,) * num_positions)


def frame_bytes(transport: StuckTransport) -> int:
    """Returns the length of the longest frame."""
    return max(len(data) for data in transport.written)


async def test_what_waits_for_a_slow_ingress_goes_out_in_frames_of_a_bounded_size(
    max_frame_bytes: int,
) -> None:
    link, transport, snapshot = await stuck_link()
    link.pause_writing()
    link.accept(Accepted("r", 0.0, ""))
    for offset in range(10):
        snapshot.observe(replace(step(num_steps=offset), cached_prefixes=(offset,)))
        link.send([large_output("r", offset)])
    link.resume_writing()
    _, *frames = steps_of(transport)
    assert [one.offset for frame in frames for one in frame.outputs] == list(range(10))
    assert all(frame.outputs for frame in frames)
    assert frame_bytes(transport) < 1.5 * max_frame_bytes
    assert [frame.accepted for frame in frames if frame.accepted] == [(Accepted("r", 0.0, ""),)]
    assert frames[0].accepted
    assert [len(frame.cached_prefixes) for frame in frames] == [10] + [0] * (len(frames) - 1)
    link.send()
    assert steps_of(transport)[-1].outputs == ()


async def test_a_slow_ingress_gets_one_frame_at_a_time(max_frame_bytes: int) -> None:
    link, transport, snapshot = await stuck_link()
    link.pause_writing()
    snapshot.observe(step())
    link.send([large_output("r", offset) for offset in range(9)])
    num_told = len(steps_of(transport))

    class Stuck(StuckTransport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            transport.write(data)
            link.pause_writing()  # as a transport with a full buffer does

    link._transport = Stuck()
    for num_frames in range(1, 4):
        link.resume_writing()
        assert len(steps_of(transport)) == num_told + num_frames
    link.send([large_output("r", 9)])  # behind the waiting outputs
    while link._waiting:
        link.resume_writing()
    told = [output.offset for frame in steps_of(transport) for output in frame.outputs]
    assert told == list(range(10))
    assert link._waiting_bytes == 0


async def test_the_large_outputs_of_one_step_go_out_in_frames_of_a_bounded_size(
    max_frame_bytes: int,
) -> None:
    link, transport, snapshot = await stuck_link()
    snapshot.observe(step())
    link.send([large_output(f"r{number}") for number in range(9)])
    names = [output.request_id for frame in steps_of(transport) for output in frame.outputs]
    assert names == [f"r{number}" for number in range(9)]
    assert frame_bytes(transport) < 1.5 * max_frame_bytes


@pytest.mark.parametrize("num_top", [0, 20])
def test_the_largest_output_that_a_request_may_ask_for_fits_into_a_frame(num_top: int) -> None:
    top = tuple((2**31, -1.5) for _ in range(num_top))
    entry = TokenLogprobs(2**31, -1.25, 2**31, top)
    output = TokenOutput("r" * 100, 0, 0, (1,), prompt_logprobs=(entry,) * 1000)
    num_positions = MAX_LOGPROB_ENTRIES / (num_top + 1)
    num_bytes = len(encode_frame(Step((output,), EngineLoad(), True))) * num_positions / 1000
    assert num_bytes < 0.9 * MAX_STEP_BYTES


async def test_a_burst_of_large_outputs_beside_a_slow_ingress_costs_no_other_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.stream.server.MAX_STEP_BYTES", 3 * MAX_FRAME_BYTES)
    async with running_rig(rate=20) as rig:
        stream = rig.server.open(["r"])
        bursts = rig.server.open(["burst"])
        rig.engine.pause_at = 1
        call = rig.submit(new_request(max_tokens=30))
        outputs = await stream.read()
        (connection,) = rig.server._connections
        assert connection._transport is not None
        connection._transport.pause_reading()
        rig.engine.pause_at = None
        (link,) = rig.host._links._links.values()
        num_sent = 0
        while len(link._waiting) < 15:  # the sockets' buffers fill first
            link.send([large_output("burst", num_sent, num_positions=1000)])
            num_sent += 1
            await asyncio.sleep(0)
        connection._transport.resume_reading()
        outputs += await read_all(stream)
        assert [output.offset for output in outputs] == list(range(30))
        await asyncio.wait_for(call, 120)
        told: list[TokenOutput] = []
        while len(told) < num_sent:
            told += await asyncio.wait_for(bursts.read(), 120)
        assert [output.offset for output in told] == list(range(num_sent))
        assert rig.server.engines == {"e0"}


async def test_an_ingress_that_never_reads_loses_its_own_streams_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.stream.client.MAX_WAITING_BYTES", 4000)
    async with running_rig() as rig:
        other = StreamServer(EngineEvents())
        await other.listen("127.0.0.1")
        stuck, reading = rig.server.open(["stuck"]), other.open(["reading"])
        call = rig.submit(new_request("stuck", max_tokens=100_000))
        request = new_request("reading", max_tokens=200)
        honest = asyncio.create_task(rig.host.submit([request], other.address, None))
        await stuck.read()
        rig.host._links._links[rig.server.address.ingress_id].pause_writing()
        with pytest.raises(EngineDeadError, match="connection to the engine was lost"):
            await read_all(stuck)
        with pytest.raises(StreamError, match="connection to the ingress was lost"):
            await asyncio.wait_for(call, 120)
        assert [output.offset for output in await read_all(reading)] == list(range(200))
        await asyncio.wait_for(honest, 120)
        assert rig.engine.aborted == [("stuck", None)]
        other.close()


async def test_an_ingress_that_never_reads_is_cut_off_at_the_bound_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve_app.stream.client.MAX_WAITING_BYTES", 12 * 1024)
    link, transport, snapshot = await stuck_link()
    link.pause_writing()
    snapshot.observe(step())
    link.send([large_output("r", offset) for offset in range(2)])
    assert not transport.is_aborted
    link.send([large_output("r", 2)])
    assert transport.is_aborted
    link.connection_lost(None)
    assert (len(link._waiting), link._waiting_bytes) == (0, 0)


async def test_a_link_that_ends_right_behind_its_dialling_takes_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_rig() as rig:
        dial = rig.host._links._dial

        async def dial_and_lose(address: StreamAddress) -> IngressLink:
            link = await dial(address)
            assert link._transport is not None
            link._transport.abort()  # `connection_lost` precedes the dialling's waiters
            return link

        monkeypatch.setattr(rig.host._links, "_dial", dial_and_lose)
        rig.server.open(["r"])
        with pytest.raises(StreamError, match="closed the connection at once"):
            await asyncio.wait_for(rig.submit(new_request(max_tokens=100_000)), 120)
        assert rig.engine.load().num_steps == 0
        monkeypatch.undo()
        again = rig.server.open(["again"])
        call = rig.submit(new_request("again"))
        assert len(await read_all(again)) == 5
        await asyncio.wait_for(call, 120)


async def test_only_the_engines_lost_most_recently_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_server, "_MAX_LOST", 2)
    events = EngineEvents()
    server = StreamServer(events)
    await server.listen("127.0.0.1")
    for name in ("e0", "e1", "e2", "e1"):  # e1 comes back
        links = IngressLinks(name, lambda *_: None, lambda _: None)
        monkeypatch.setattr(links, "engine_key", f"the key of {name}")
        await links.attend(server.address)
        await until(lambda name=name: name in server.engines)  # type: ignore[misc]
        num_lost = len(events.lost)
        assert not server.has_lost(name, time.monotonic())
        links.close()
        await until(lambda num_lost=num_lost: len(events.lost) > num_lost)  # type: ignore[misc]
    assert events.lost == ["e0", "e1", "e2", "e1"]
    now_s = time.monotonic()
    assert [server.has_lost(name, now_s) for name in ("e0", "e1", "e2")] == [False, True, True]
    assert list(server._lost_s) == ["e2", "e1"]
    assert set(server._keys) == {"e1", "e2"}
    server.close()
