"""The side stream through Ray Serve: a paced engine sends every step to a server in the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from ray import serve

from serve_app.app import _http_host
from serve_app.cli.commands.serve import drain
from serve_app.messages import StreamAddress
from serve_app.stream.server import StreamServer
from serve_app.stream.wire import StreamError
from tests.fakes_engine import CRASH_TOKEN
from tests.routing_factory import EngineEvents
from tests.serve_rig import RIG_ADAPTER, RIG_BASE, RIG_TOKEN, deploy, held, rig_args, wait_ready
from tests.waiting import until

Attend = Callable[[StreamAddress], Awaitable[None]]


async def test_a_replica_attends_an_ingress_until_one_of_them_ends(
    serve_port: int, tmp_path: Path
) -> None:
    rig = deploy(serve_port, rig_args(200.0, RIG_BASE), tmp_path)
    wait_ready(rig)
    (name,) = (one for one in serve.status().applications if one != "api")
    attend: Attend = serve.get_app_handle(name).attend.remote
    events = EngineEvents()
    server, lost, frames = StreamServer(events), events.lost, events.frames
    await server.listen("127.0.0.1")
    await attend(server.address)
    await until(lambda: bool(frames))
    assert frames[0].is_whole
    (engine,) = server.engines
    # The engine is started twice before the request that ends it is given up.
    async with httpx.AsyncClient(base_url=rig.url, timeout=300) as client:
        body = {"model": f"{RIG_BASE}:{RIG_ADAPTER}", "prompt": "abcdefgh", "max_tokens": 5}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        await until(lambda: frames[-1].load.num_steps >= 5)
        assert not any(frame.outputs or frame.accepted for frame in frames)  # of the other ingress
        newest = next(frame for frame in reversed(frames) if not frame.same_adapters)
        (adapter,) = newest.load.adapters_on_device
        await until(lambda: any(adapter in (f.adapters_on_disk or ()) for f in frames))
        await until(lambda: frames[-1].load_s[1] > 0)  # it was loaded from there
        await attend(server.address)
        await until(lambda: sum(frame.is_whole for frame in frames) == 2)
        assert adapter in (frames[-1].adapters_on_disk or ())
        body = {"model": RIG_BASE, "prompt": [CRASH_TOKEN, 1], "max_tokens": 5}
        await client.post("/v1/completions", json=body)
    await until(lambda: lost == [engine])
    async with asyncio.timeout(300):
        while not server.engines:  # Serve starts another replica
            try:
                await attend(server.address)
            except Exception:  # the call to the dead replica
                await asyncio.sleep(0.1)
    assert engine not in server.engines
    server.close()
    await until(lambda: len(lost) == 2)
    with pytest.raises(StreamError, match="cannot reach the ingress"):
        await attend(server.address)


async def test_a_server_that_drains_ends_its_open_stream_and_takes_nothing_new(
    serve_port: int, tmp_path: Path
) -> None:
    rig = deploy(serve_port, rig_args(20.0, RIG_BASE), tmp_path)
    wait_ready(rig)
    assert _http_host() == "127.0.0.1"
    admin = {"authorization": f"Bearer {RIG_TOKEN}"}
    body = {"model": RIG_BASE, "prompt": "abcdefgh", "max_tokens": 60, "stream": True}
    async with httpx.AsyncClient(base_url=rig.url, timeout=300) as client:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            with held(rig):  # it is open, however late the answers below come
                assert (await client.post("/admin/drain")).status_code == 401
                asked = await client.post("/admin/drain", headers=admin)
                assert asked.json()["open_requests"] in (None, 1)
                await until_status(client, "/ready", 503)
                refused = await client.post("/v1/completions", json=body | {"stream": False})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "is being stopped" in refused.json()["error"]["message"]
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"text"' in line for line in rest) >= 50
    with httpx.Client(timeout=300) as client:
        assert drain(client, rig.url, RIG_TOKEN, 120.0, lambda: False)
    serve.delete("api")  # the next module starts its own server


async def until_status(client: httpx.AsyncClient, path: str, status: int) -> None:
    async with asyncio.timeout(300):
        while (await client.get(path)).status_code != status:
            await asyncio.sleep(0.05)
