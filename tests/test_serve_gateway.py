"""The readiness, health and routes of an ingress whose bases are missing, failed or refused."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from dataclasses import replace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentBroadcastResponse

from engine.admission import EngineLimits
from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion
from registry.errors import NotFoundError, RegistryUnavailableError
from serve_app.api import ingress
from serve_app.api.model_list import ModelList
from serve_app.config import MigrationArgs, ModelArgs
from serve_app.dispatch import base_handle
from serve_app.dispatch import gateway as gateway_module
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.errors import AdapterUnsupportedError, ServiceUnavailableError
from serve_app.messages import BaseDescription
from serve_app.platform_view import PlatformView, ServedBase
from serve_app.tenancy.table import KeyDelta, KeyTable
from tests.ingress_app import make_gateway


def test_a_base_that_is_not_registered_is_named_as_the_obstacle() -> None:
    gateway = make_gateway()
    assert not gateway.is_ready
    assert gateway.obstacles == []
    gateway.view = PlatformView(
        revision="1",
        catalog=Catalog((), ()),
        bases=(),
        missing=("nobody",),
        is_one_node=True,
        registry_error=None,
    )
    assert not gateway.is_ready
    assert gateway.obstacles == ["not registered: nobody"]


def test_only_a_base_that_the_server_waits_for_and_its_engine_refuses_is_a_refusal() -> None:
    gateway = make_gateway()
    assert gateway.refusals == []
    base = BaseVersion("base", 1, "d" * 64, "source")
    model = ModelArgs(name="base")
    refused = ServedBase(base, "app", "failed", model, "its reason", is_refused=True)
    gateway.view = PlatformView("1", Catalog((base,), ()), (refused,), (), True, None)
    assert gateway.refusals == gateway.obstacles == ["base: its reason"]
    for other in (replace(refused, is_refused=False), replace(refused, is_awaited=False)):
        gateway.view = replace(gateway.view, bases=(other,))
        assert gateway.refusals == []


def test_a_server_with_an_engine_that_is_silent_is_not_healthy() -> None:
    gateway = make_gateway()
    assert gateway.is_healthy
    gateway.migrations.has_silent_engine = True
    assert not gateway.is_healthy


def test_a_server_that_is_being_stopped_refuses_new_requests_and_says_so() -> None:
    gateway = make_gateway()
    gateway.view = PlatformView("1", Catalog((), ()), (), (), True, None, is_draining=True)
    assert not gateway.is_ready
    assert gateway.obstacles == ["the server is being stopped"]
    with pytest.raises(ServiceUnavailableError, match="is being stopped"):
        gateway.route("base", None)


@pytest.mark.parametrize("model", ["new", "base:new", "org/new", "new@champion"])
def test_an_unknown_name_while_the_registry_is_away_is_worth_another_try(model: str) -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    gateway = make_gateway()
    gateway.view = PlatformView("1", Catalog((base,), ()), (), (), True, "connection refused")
    with pytest.raises(RegistryUnavailableError):
        gateway.route(model, None)
    gateway.view = replace(gateway.view, registry_error=None)
    with pytest.raises(NotFoundError):
        gateway.route(model, None)


def test_an_adapter_that_cannot_be_served_is_refused_with_the_reason() -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    sound = AdapterVersion("dora", 1, "a" * 64, "base", base.digest, 8, (), "source")
    refused = replace(sound, version=2, digest="b" * 64, refused="it uses DoRA")
    gateway = make_gateway()
    gateway.view = PlatformView("1", Catalog((base,), (sound, refused)), (), (), True, None)
    with pytest.raises(AdapterUnsupportedError, match=r"'dora' version 2 .*: it uses DoRA"):
        gateway.route("dora@2", None)
    with pytest.raises(NotFoundError, match="not served here"):  # the sound version, of no base
        gateway.route("dora", None)
    meant = replace(refused, aliases=("champion",))
    gateway.view = replace(gateway.view, catalog=Catalog((base,), (sound, meant)))
    with pytest.raises(AdapterUnsupportedError):  # an alias is never followed to another version
        gateway.route("base:dora", None)


async def test_the_model_list_leaves_out_what_cannot_be_served() -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    sound = AdapterVersion("sound", 1, "a" * 64, "base", base.digest, 8, (), "source")
    refused = replace(sound, name="dora", digest="b" * 64, refused="it uses DoRA")
    served = ServedBase(base, "app", "running", ModelArgs(name="base"))
    view = PlatformView("1", Catalog((base,), (sound, refused)), (served,), (), True, None)
    gateway = make_gateway()
    listed = json.loads(await ModelList().encoded(gateway, view))["data"]
    assert [one["id"] for one in listed] == ["base", "sound"]


@pytest.mark.parametrize(
    ("error", "level", "words"),
    [(OSError("no memory"), "ERROR", "no memory"), (TimeoutError(), "WARNING", "TimeoutError()")],
)
async def test_a_base_whose_opening_fails_is_tried_again(
    error: Exception,
    level: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A late answer has no traceback in the log, as another call that fails; a fault has one."""
    base = BaseVersion("base", 1, "d" * 64, "source")
    served = ServedBase(base, "app", "running", ModelArgs(name="base"))
    gateway = make_gateway()
    gateway.view = PlatformView("1", Catalog((base,), ()), (served,), (), True, None)
    tries = []

    async def fail(*_: object) -> None:
        tries.append(1)
        if len(tries) == 3:
            gateway.view = replace(gateway.view, bases=())  # not wanted any more
        raise error

    monkeypatch.setattr(gateway_module, "open_base", fail)
    monkeypatch.setattr(gateway_module, "_RETRY_S", 0.001)
    gateway._opening["app", served.deployed_s] = cast("asyncio.Task[None]", None)
    await gateway._open(served)
    assert (len(tries), gateway._unusable) == (3, {})
    first = caplog.records[0]
    assert first.getMessage() == f"could not open app, retrying: {words}"
    assert (first.levelname, first.exc_info is None) == (level, level == "WARNING")


async def test_a_handle_has_the_migration_settings_of_the_newest_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    served = ServedBase(base, "app", "running", ModelArgs(name="base"))
    changed = replace(served, model=ModelArgs(name="base", migration=MigrationArgs(limit=7)))
    gateway = make_gateway()
    view = PlatformView("1", Catalog((base,), ()), (served,), (), True, None)
    gateway.view = view

    async def open_while_the_view_changes(*_: object) -> BaseHandle:
        gateway.view = replace(view, bases=(changed,))
        description = BaseDescription({}, EngineLimits(64, 64, 64))
        return BaseHandle(base, "app", Mock(), description, Mock(), 0.0)

    monkeypatch.setattr(gateway_module, "open_base", open_while_the_view_changes)
    gateway._opening["app", served.deployed_s] = cast("asyncio.Task[None]", None)
    await gateway._open(served)
    assert gateway.resolve("base")[0].migration.limit == 7
    gateway._apply(view)
    assert gateway.resolve("base")[0].migration == served.model.migration


def test_a_queue_does_not_keep_the_text_files_of_its_base_in_memory() -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    queues, limits = make_gateway().queues, EngineLimits(64, 64, 64)
    handle = BaseHandle(base, "app", Mock(), BaseDescription({}, limits), Mock(), 0.0)
    text = weakref.ref(handle.text)
    assert queues.of(handle.app_name, handle.base.name, handle.max_waiting).is_idle
    del handle
    gc.collect()
    assert text() is None


class FullReplicas:
    """The handle of a base whose replicas are full: each answers calls to all of them alone."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers
        self.describe = Mock()
        self.describe.remote.side_effect = AssertionError("it waits for the end of a request")

    def broadcast(self, method: str) -> DeploymentBroadcastResponse:
        assert method == "describe"
        return DeploymentBroadcastResponse(self._results(), None)

    async def _results(self) -> list[Any]:
        return [Mock(get_async=AsyncMock(side_effect=[answer])) for answer in self.answers]


async def test_an_ingress_opens_a_base_whose_engines_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that starts under load would serve nothing for as long as it lasts."""
    description, text = BaseDescription({}, EngineLimits(64, 64, 64)), Mock()
    served = ServedBase(
        BaseVersion("base", 1, "d" * 64, "source"), "app", "running", ModelArgs(name="base")
    )
    monkeypatch.setattr(base_handle, "open_text", AsyncMock(return_value=text))
    handles = [FullReplicas(RayError("died"), description), FullReplicas(RayError("died"))]
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: handles.pop(0))
    opened = await base_handle.open_base(served, None)
    assert (opened.description, opened.text) == (description, text)
    with pytest.raises(RayError, match="died"):
        await base_handle.open_base(served, None)


async def test_an_ingress_joins_once_it_can_answer_as_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    opened = asyncio.Event()

    async def open_base(served: ServedBase, _: object) -> BaseHandle:
        await opened.wait()
        description = BaseDescription({}, EngineLimits(64, 64, 64))
        return BaseHandle(served.base, "app", Mock(), description, Mock(), 0.0)

    monkeypatch.setattr(gateway_module, "open_base", open_base)
    monkeypatch.setattr(ingress, "_CATCH_UP_POLL_S", 0.001)
    gateway, keys = make_gateway(), KeyTable()
    joined = asyncio.create_task(ingress.catch_up(gateway, keys, 60))
    served = ServedBase(base, "app", "running", ModelArgs(name="base"))
    view = PlatformView("1", Catalog((base,), ()), (served,), (), True, None)
    for arrives in (
        lambda: gateway._apply(view),
        opened.set,
        lambda: keys.apply(KeyDelta("1", ())),
    ):
        await asyncio.sleep(0.02)
        assert not joined.done()
        arrives()
    await asyncio.wait_for(joined, 5)
    assert gateway.resolve("base")[0].base == base


async def test_an_ingress_without_a_manager_joins_at_the_time_out() -> None:
    await asyncio.wait_for(ingress.catch_up(make_gateway(), None, 0.01), 5)
