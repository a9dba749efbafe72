"""GET /v1/models with many adapters: its cost for other requests, and that it is never stale."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion
from serve_app.api.model_list import ModelList
from serve_app.config import ModelArgs
from serve_app.dispatch.gateway import Gateway
from serve_app.platform_view import PlatformView, ServedBase
from tests.ingress_app import make_gateway

BASE = BaseVersion("base", 1, "b" * 64, "")
NUM_ADAPTERS = 3_000


def adapter(name: str) -> AdapterVersion:
    return AdapterVersion(name, 1, f"digest of {name}", "base", BASE.digest, 8, (), "")


def make_view(*names: str) -> PlatformView:
    catalog = Catalog((BASE,), tuple(map(adapter, names)))
    return PlatformView(
        "1", catalog, (ServedBase(BASE, "app", "running", ModelArgs(name="base")),), (), True, None
    )


async def ids(models: ModelList, gateway: Gateway, view: PlatformView) -> list[str]:
    listed: list[dict[str, Any]] = json.loads(await models.encoded(gateway, view))["data"]
    return [str(one["id"]) for one in listed]


async def test_the_event_loop_goes_on_while_a_long_list_is_made() -> None:
    models, gateway = ModelList(), make_gateway()
    view = make_view(*(f"a{i}" for i in range(NUM_ADAPTERS)))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.get_running_loop().create_task(count())
    assert len(await ids(models, gateway, view)) == NUM_ADAPTERS + 1
    assert turns >= NUM_ADAPTERS / 100
    counting.cancel()


async def test_the_list_is_made_once_for_all_who_ask() -> None:
    models, gateway, view = ModelList(), make_gateway(), make_view("a")
    first, second = await asyncio.gather(*(models.encoded(gateway, view) for _ in range(2)))
    assert first is second is await models.encoded(gateway, view)


async def test_a_list_that_failed_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    models, gateway, view = ModelList(), make_gateway(), make_view("a")

    async def no_thread(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("serve_app.api.model_list.asyncio.to_thread", no_thread)
        with pytest.raises(RuntimeError):
            await models.encoded(gateway, view)
    assert await ids(models, gateway, view) == ["base", "a"]


async def test_the_list_follows_the_view_and_the_length_of_the_context() -> None:
    models, gateway, view = ModelList(), make_gateway(), make_view("a")
    assert await ids(models, gateway, view) == ["base", "a"]
    # Another view object, although of the same revision.
    assert await ids(models, gateway, make_view("b")) == ["base", "b"]
    gateway.max_model_len = lambda digest: 4096  # type: ignore[method-assign]
    (entry, _) = json.loads(await models.encoded(gateway, view))["data"]
    assert entry["max_model_len"] == 4096
