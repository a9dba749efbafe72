"""Engine replicas follow the load on a real Serve, with paced engines: 1, 2, and 1 again."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from serve_app.config import AutoscalingArgs, PlatformArgs
from tests.serve_rig import (
    RIG_BASE,
    RIG_TOKEN,
    Rig,
    deploy,
    metric,
    rig_args,
    wait_ready,
)
from tests.waiting import eventually

pytestmark = pytest.mark.serve

ROWS = 4
MANY, LONG = 300, 1200  # tokens
SCALING = AutoscalingArgs(max_replicas=2, upscale_delay_s=0.5, downscale_delay_s=2.0)


def scaled_args() -> PlatformArgs:
    args = rig_args(100, RIG_BASE)
    (model,) = args.models
    scaled = model.model_copy(
        update={
            "autoscaling": SCALING,
            "engine": model.engine.model_copy(update={"max_num_seqs": ROWS}),
            "graceful_shutdown_timeout_s": 60,
        }
    )
    return args.model_copy(update={"models": (scaled,)})


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    rig = deploy(serve_port, scaled_args(), tmp_path_factory.mktemp("registry"))
    wait_ready(rig)
    return rig


def line(client: httpx.Client) -> dict[str, object]:
    headers = {"authorization": f"Bearer {RIG_TOKEN}"}
    (found,) = client.get("/admin/bases", headers=headers).json()["bases"]
    assert isinstance(found, dict)
    return found


def wait_for(client: httpx.Client, replicas: int) -> None:
    def is_reached() -> bool:
        now = line(client)
        return now["replicas"] == now["wanted_replicas"] == replicas

    eventually(is_reached, 120.0)


async def stream(client: httpx.AsyncClient, number: int, max_tokens: int) -> str:
    """Returns the text, after checking that it ended as it should."""
    body = {
        "model": RIG_BASE,
        "prompt": f"stream {number:03d} ",
        "max_tokens": max_tokens,
        "stream": True,
    }
    text, is_done, reason = "", False, None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for one in answer.aiter_lines():
            if one == "data: [DONE]":
                is_done = True
            elif one.startswith("data: "):
                (choice,) = httpx.Response(200, content=one[6:]).json()["choices"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    assert (is_done, reason) == (True, "length")
    return text


def test_replicas_come_with_the_load_and_go_after_it_and_no_stream_notices(rig: Rig) -> None:
    with httpx.Client(base_url=rig.url, timeout=120) as client:
        before = line(client)
        assert before | {"replicas": 1, "min_replicas": 1, "max_replicas": 2} == before
        asyncio.run(_load(rig, client))
        wait_for(client, 1)
        for state in ("running", "wanted"):
            labels = {"model_name": RIG_BASE, "state": state}
            eventually(lambda labels=labels: metric(client, "loraplex_replicas", **labels) == 1)


async def _load(rig: Rig, watcher: httpx.Client) -> None:
    is_scaled = asyncio.Event()

    async def keep_asking(client: httpx.AsyncClient, number: int) -> None:
        while not is_scaled.is_set():
            await check(client, number, MANY)

    async with (
        httpx.AsyncClient(base_url=rig.url, timeout=120) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(2 * ROWS):
            tasks.create_task(keep_asking(client, number))
        await asyncio.to_thread(wait_for, watcher, 2)
        is_scaled.set()
        # On both replicas; they last until after Serve has told one replica to stop.
        for number in (100, 101):
            tasks.create_task(check(client, number, LONG))


async def check(client: httpx.AsyncClient, number: int, length: int) -> None:
    prompt = f"stream {number:03d} "
    assert await stream(client, number, length) == (prompt * length)[:length]
