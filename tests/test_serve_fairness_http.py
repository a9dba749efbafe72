"""The fair queue behind HTTP: one paced engine of four rows, and more requests than it can take."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

import httpx
import pytest

from serve_app.config import EngineArgs, FairnessArgs, ModelArgs
from tests.serve_rig import (
    RIG_ADAPTER,
    RIG_BASE,
    RIG_TOKEN,
    Rig,
    deploy,
    held,
    metric,
    rig_args,
    wait_ready,
)
from tests.waiting import eventually, until

ROWS = 4
RATE = 40  # tokens a second of each row
TOKENS = 20  # of an answer: 8 requests a second in all, fewer than a busy machine can send
LIMIT = 40  # requests that wait
MAX_OPEN = 70

Answers = list["Answer"]


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    model = ModelArgs(
        name=RIG_BASE,
        engine=EngineArgs(seed=RATE, max_num_seqs=ROWS),
        max_queued_requests=LIMIT,
        graceful_shutdown_timeout_s=1,
    )
    args = rig_args(RATE, RIG_BASE)
    ingress = args.ingress.model_copy(
        update={"max_ongoing_requests": MAX_OPEN, "trusted_gateway": "the tests"}
    )
    # On a busy machine requests wait for long, and age must not decide their order.
    fairness = FairnessArgs(weights={"gold": 3.0}, max_wait_s=120.0, max_queue_s=600.0)
    args = args.model_copy(update={"models": (model,), "fairness": fairness, "ingress": ingress})
    rig = deploy(serve_port, args, tmp_path_factory.mktemp("registry"))
    wait_ready(rig)
    with httpx.Client(base_url=rig.url, timeout=120) as client:
        # From the engine's first frame on its rows are known.
        ask_once(client)
        ask_once(client, model=f"{RIG_BASE}:{RIG_ADAPTER}")
    return rig


@dataclass(frozen=True, slots=True)
class Answer:
    tenant: str
    status: int
    fair_s: float
    retry_after: str | None
    end_s: float  # by the clock of this process


def body(model: str = RIG_BASE, **fields: object) -> dict[str, object]:
    return {"model": model, "prompt": "abc", "max_tokens": TOKENS} | fields


def ask_once(client: httpx.Client, **fields: object) -> None:
    assert client.post("/v1/completions", json=body(**fields)).status_code == 200


async def ask(client: httpx.AsyncClient, tenant: str, **fields: object) -> Answer:
    headers = {
        "x-tenant-id": tenant,
        "x-loraplex-explain": "1",
        "authorization": f"Bearer {RIG_TOKEN}",
    }
    response = await client.post("/v1/completions", json=body(**fields), headers=headers)
    timing = response.headers.get("server-timing", "")
    parts = dict(part.split(";dur=") for part in timing.split(", ")) if timing else {}
    return Answer(
        tenant,
        response.status_code,
        float(parts.get("fair", 0)) / 1000,
        response.headers.get("retry-after"),
        time.monotonic(),
    )


def async_client(rig: Rig) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(base_url=rig.url, timeout=180, limits=limits)


def num_waiting(rig: Rig) -> float:
    with httpx.Client(base_url=rig.url, timeout=120) as probe:
        return metric(probe, "loraplex_queue_waiting", model_name=RIG_BASE)


def num_in_engine(rig: Rig) -> float:
    with httpx.Client(base_url=rig.url, timeout=120) as probe:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(metric(probe, name, model_name=RIG_BASE) for name in names)


async def until_they_wait(rig: Rig, count: int) -> None:
    """Returns when so many requests wait or run, while `held` keeps them from ending."""
    await asyncio.to_thread(eventually, lambda: num_waiting(rig) + num_in_engine(rig) >= count)


async def flood(rig: Rig, counts: dict[str, int]) -> Answers:
    """All are there, or refused, before the first of them is answered."""
    async with async_client(rig) as client:
        with held(rig):
            tasks = [
                asyncio.create_task(ask(client, tenant))
                for tenant, count in counts.items()
                for _ in range(count)
            ]

            def are_there() -> bool:
                refused = sum(task.done() for task in tasks)
                return refused + num_waiting(rig) + num_in_engine(rig) >= len(tasks)

            await asyncio.to_thread(eventually, are_there)
        return await asyncio.gather(*tasks)


async def is_overtaking(rig: Rig, client: httpx.AsyncClient, count: int, **fields: object) -> bool:
    """True if a request with `fields` that comes after `count` others ends before half of them."""
    with held(rig):
        others = [asyncio.create_task(ask(client, "one")) for _ in range(count)]
        await until_they_wait(rig, count)
        last = asyncio.create_task(ask(client, "one", **fields))
        await until_they_wait(rig, count + 1)
    ends_s = sorted(answer.end_s for answer in await asyncio.gather(*others))
    answer = await last
    assert answer.status == 200
    return answer.end_s < ends_s[count // 2]


async def test_in_a_flood_tenants_share_the_queue_and_the_rest_is_told_to_come_back(
    rig: Rig,
) -> None:
    answers = await flood(rig, {"loud": 50, "quiet": 10})
    statuses = Counter((answer.tenant, answer.status) for answer in answers)
    assert statuses["quiet", 200] == 10
    assert statuses["loud", 429] == 50 - statuses["loud", 200]
    assert 25 <= statuses["loud", 200] < 50
    shed = [answer for answer in answers if answer.status == 429]
    assert all(1 <= int(answer.retry_after or 0) <= 60 for answer in shed)


async def test_a_tenant_with_weight_waits_less(rig: Rig) -> None:
    """All are there before the first of them is taken, so that their order is the queue's."""
    names = ("tin", "gold") * 17
    async with async_client(rig) as client:
        with held(rig):
            before = [asyncio.create_task(ask(client, "one", max_tokens=2000)) for _ in range(ROWS)]
            await asyncio.to_thread(eventually, lambda: num_in_engine(rig) >= ROWS)
            tasks = [asyncio.create_task(ask(client, name)) for name in names]
            await until_they_wait(rig, ROWS + len(names))
            for task in before:
                task.cancel()
        answers = await asyncio.gather(*tasks)
    assert {answer.status for answer in answers} == {200}
    order = [answer.tenant for answer in sorted(answers, key=lambda answer: answer.end_s)]
    # Gold is through when tin has had about a third: the last of all are tin's.
    assert Counter(order[: len(order) // 2])["gold"] > Counter(order[len(order) // 2 :])["gold"]
    assert max(answer.fair_s for answer in answers) > 0


async def test_a_cold_adapter_overtakes_a_hot_base(rig: Rig) -> None:
    """Both belong to the same tenant."""
    async with async_client(rig) as client:
        assert await is_overtaking(rig, client, 40, model=f"{RIG_BASE}:{RIG_ADAPTER}")


async def test_a_better_class_goes_first(rig: Rig) -> None:
    async with async_client(rig) as client:
        assert await is_overtaking(rig, client, 35, priority=-1)


async def test_probes_are_answered_when_no_request_is_taken_any_more(rig: Rig) -> None:
    async with async_client(rig) as client:
        asks = [asyncio.create_task(ask(client, "loud")) for _ in range(150)]
        await until(lambda: any(task.done() for task in asks))  # the first is refused
        for path in ("/health", "/ready", "/live", "/metrics"):
            assert (await client.get(path)).status_code == 200
        answers = await asyncio.gather(*asks)
    assert {answer.status for answer in answers} == {200, 429}
    assert all(answer.retry_after for answer in answers if answer.status == 429)


async def test_a_client_that_leaves_frees_its_place(rig: Rig) -> None:
    async with async_client(rig) as client:
        with held(rig):
            running = [asyncio.create_task(ask(client, "a", max_tokens=100)) for _ in range(8)]
            leaving = [asyncio.create_task(ask(client, "a", max_tokens=100)) for _ in range(20)]
            await until_they_wait(rig, 28)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            await asyncio.to_thread(eventually, lambda: num_waiting(rig) + num_in_engine(rig) == 8)
        await asyncio.gather(*running)
    await until(lambda: all(task.done() for task in running))


@pytest.mark.parametrize("tenant", ["x" * 129, "tab\tin it"])
def test_a_tenant_that_is_no_name_is_refused(rig: Rig, tenant: str) -> None:
    with httpx.Client(base_url=rig.url, timeout=120) as client:
        response = client.post("/v1/completions", json=body(), headers={"x-tenant-id": tenant})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-tenant-id"


def test_a_priority_out_of_range_is_refused(rig: Rig) -> None:
    with httpx.Client(base_url=rig.url, timeout=120) as client:
        response = client.post("/v1/completions", json=body(priority=2**31))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"


def test_the_metrics_tell_of_waits_sheds_and_named_tenants(rig: Rig) -> None:
    asyncio.run(flood(rig, {"gold": 60}))
    with httpx.Client(base_url=rig.url, timeout=120) as client:
        assert metric(client, "loraplex_shed_total", model_name=RIG_BASE, reason="full") > 0
        assert metric(client, "loraplex_queue_wait_seconds_count", model_name=RIG_BASE) > 0
        assert metric(client, "loraplex_tenant_tokens_total", tenant="gold") > 0
