"""Keys in front of the routes, in this process: who may call which, and which models a key has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Response
from starlette.types import Receive, Scope, Send

from registry.catalog import Catalog, Resolution
from registry.entities import AdapterVersion, BaseVersion, Rejected, WeightedVersion
from serve_app.api.completions import ClientRequest
from serve_app.api.ingress import _note_act, build_asgi
from serve_app.api.model_access import check_body
from serve_app.api.state import IngressState
from serve_app.config import IngressArgs, ModelArgs
from serve_app.dispatch.base_handle import BaseHandle, Route
from serve_app.openai.completions import CompletionRequest
from serve_app.platform_view import PlatformView, ServedBase
from serve_app.tenancy.access import ROUTES, required
from serve_app.tenancy.authentication import AuthenticationMiddleware, Authenticator
from serve_app.tenancy.caller import SCOPES, Caller, KeyPolicy
from serve_app.tenancy.keys import new_id, new_key
from serve_app.tenancy.orders import KeyOrder
from serve_app.tenancy.service import KeyService
from serve_app.tenancy.table import KeyTable
from tests.ingress_app import make_state
from tests.key_helpers import LocalManager, make_key, open_service
from tests.test_serve_admin import routes_of

TOKEN = "the master key"
BASE = BaseVersion("base", 2, "b" * 64, "")
ADAPTERS = tuple(
    AdapterVersion(name, version, f"digest {name} {version}", "base", BASE.digest, 8, (), "")
    for name, version in (("pirate", 1), ("pirate", 3), ("sql", 1))
)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class World:
    """An ingress and the manager's keys."""

    def __init__(self, folder: Path) -> None:
        self.service: KeyService = open_service(folder)
        self.table = KeyTable()
        authenticator = Authenticator(self.table, TOKEN)
        args = IngressArgs(allow_runtime_lora_updating=True)
        manager = LocalManager(self.service)
        self.state: IngressState = make_state(args, manager, authenticator)
        served = ServedBase(BASE, "app", "running", ModelArgs(name="base"))
        catalog = Catalog((BASE,), ADAPTERS)
        self.state.gateway.view = PlatformView("1", catalog, (served,), (), True, None)
        self.app = build_asgi(self.state)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://testserver")

    async def follow(self) -> None:
        delta = await self.service.delta(self.table.revision, 5)
        assert delta is not None
        self.table.apply(delta)

    async def key(self, **changes: Any) -> dict[str, str]:
        """Returns the header with a new key."""
        _, text = await make_key(self.service, **changes)
        await self.follow()
        return {"authorization": f"Bearer {text}"}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    async with world.http:
        yield world


def endpoints(world: World) -> list[tuple[str, str]]:
    app: object = world.app
    while not isinstance(app, FastAPI):
        app = app._app  # type: ignore[attr-defined]  # the layers around it
    found = [(m, route.path) for route in routes_of(app.routes) for m in route.methods or ()]
    assert len(found) > 40
    return found


def filled(path: str) -> str:
    return path.replace("{model:path}", "base").replace("{", "").replace("}", "")


def test_every_route_is_in_the_table_and_nothing_else(world: World) -> None:
    assert {path for _, path in endpoints(world)} == set(ROUTES)


def test_every_filled_route_needs_what_its_pattern_needs(world: World) -> None:
    for method, path in endpoints(world):
        read, write = ROUTES[path]
        expected = read if method in ("GET", "HEAD") else write
        assert required(method, filled(path)) == expected


async def test_without_a_valid_key_every_closed_route_answers_401(world: World) -> None:
    await world.key()
    wrong = {"authorization": f"Bearer {new_key(new_id())}"}
    for method, path in endpoints(world):
        if required(method, filled(path)) == "open":
            continue
        for headers in ({}, wrong, {"authorization": "Basic eDp5"}, {"x-api-key": "sk-ant"}):
            answer = await world.http.request(method, filled(path), headers=headers)
            assert (method, path, answer.status_code) == (method, path, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method == "HEAD":
                continue
            error = answer.json()["error"]
            if path.startswith("/v1/messages"):
                assert error["type"] == "authentication_error"
            else:
                assert error["code"] == "invalid_api_key"


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_scope_opens_its_routes_and_no_others(world: World, scope: str) -> None:
    # Without a model: the base of this world never answers.
    headers = await world.key(scopes=frozenset({scope}), models=())
    for method, path in endpoints(world):
        needed = required(method, filled(path))
        answer = await world.http.request(method, filled(path), headers=headers)
        if needed not in ("open", "any", scope):
            assert (path, answer.status_code) == (path, 403)
        if method != "HEAD" and not path.startswith("/v1/messages"):
            is_refused = needed not in ("open", "any", scope)
            assert (path, '"missing_scope"' in answer.text) == (path, is_refused)


async def test_a_path_that_is_no_route_is_404_with_a_key_and_401_without(world: World) -> None:
    headers = await world.key(scopes=frozenset(SCOPES))
    assert (await world.http.get("/v2/secret", headers=headers)).status_code == 404
    assert (await world.http.get("/v2/secret")).status_code == 401


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
async def test_a_key_comes_in_the_header_of_each_client(world: World, header: str) -> None:
    text = (await world.key())["authorization"].removeprefix("Bearer ")
    value = f"bearer {text}" if header == "authorization" else text
    answer = await world.http.get("/v1/models", headers={header: value})
    assert answer.status_code == 200


async def test_the_admin_token_is_the_master_key(world: World) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    # It works before any key is known, as after a start while the database is away.
    assert not world.table.is_known
    assert (await world.http.get("/v1/models", headers=headers)).status_code == 200
    made = await world.http.post("/key/generate", json={}, headers=headers)
    assert made.status_code == 200


async def test_while_the_keys_are_unknown_a_key_gets_503_and_not_401(world: World) -> None:
    headers = {"authorization": f"Bearer {new_key(new_id())}"}
    answer = await world.http.get("/v1/models", headers=headers)
    assert answer.status_code == 503
    assert "keys are not known yet" in answer.json()["error"]["message"]
    assert "retry-after" in answer.headers


async def test_no_bearer_is_logged_and_failures_are_counted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await world.key()
    text = new_key(new_id())
    for _ in range(3):
        await world.http.get("/v1/models", headers={"authorization": f"Bearer {text}"})
    await world.http.get("/v1/models")
    assert text not in caplog.text
    assert world.state.authenticator is not None
    lines = world.state.authenticator.text("i").decode().splitlines()
    name = "loraplex_authentication_failures_total"
    assert f'{name}{{ingress="i",reason="invalid"}} 3.0' in lines
    assert f'{name}{{ingress="i",reason="missing"}} 1.0' in lines
    assert len(await world.service.acts(10, None)) == 1  # of the one key that was made


async def test_the_list_of_models_is_what_the_key_may_call(world: World) -> None:
    async def listed(**changes: Any) -> list[str]:
        answer = await world.http.get("/v1/models", headers=await world.key(**changes))
        return [one["id"] for one in answer.json()["data"]]

    assert await listed() == ["base", "pirate", "sql"]
    assert await listed(models=("base",)) == ["base"]
    assert await listed(models=("base:p*", "sql@1")) == ["pirate", "sql"]
    assert await listed(models=("pirate@1",)) == []  # the name means version 3
    assert await listed(models=()) == []


async def test_a_forbidden_and_an_unknown_name_answer_alike(world: World) -> None:
    headers = await world.key(models=("sql",))
    names = "base", "pirate", "base:pirate", "sql@9", "nobody", "base:nobody", "org/model"
    for name in names:
        bodies = [
            await world.http.post(path, json={"model": name, **body}, headers=headers)
            for path, body in (
                ("/v1/chat/completions", CHAT),
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/responses", {"input": "hi"}),
                ("/tokenize", {"prompt": "hi"}),
                ("/detokenize", {"tokens": [1]}),
            )
        ]
        bodies.append(await world.http.get(f"/v1/models/{name}", headers=headers))
        bodies.append(await world.http.get(f"/tokenizer_info?model={name}", headers=headers))
        for answer in bodies:
            assert answer.status_code == 404, answer.text
            error = answer.json()["error"]
            assert error["code"] == "model_not_found"
            assert error["message"].replace(repr(name), "NAME") == (
                "The model NAME does not exist, or this API key may not use it."
            )
    message = {"model": "pirate", "max_tokens": 1, **CHAT}
    answer = await world.http.post("/v1/messages", json=message, headers=headers)
    assert answer.json()["error"]["type"] == "not_found_error"
    assert (await world.http.get("/v1/models/sql", headers=headers)).status_code == 200


async def test_the_reason_of_a_refused_version_is_for_keys_that_may_use_it_alone(
    world: World,
) -> None:
    refused = Rejected("ia3", 2, "it is IA3", is_public=True)
    view = world.state.gateway.view
    assert view is not None
    world.state.gateway.view = replace(view, catalog=replace(view.catalog, rejected=(refused,)))
    names = ("ia3", "ia3@2", "base:ia3", "base:sql+ia3")
    for models, told in {
        ("*",): ("ia3", "ia3@2", "base:ia3"),
        ("ia3",): ("ia3", "ia3@2"),  # not whether there is a base of this name
        ("ia3@2", "base:*"): ("ia3@2",),
        ("ia3", "base:ia3"): ("ia3", "ia3@2", "base:ia3"),
        ("base", "base:*", "sql"): (),
    }.items():
        headers = await world.key(models=models)
        for name in names:
            answer = await world.http.get(f"/v1/models/{name}", headers=headers)
            chat = {"model": name, **CHAT}
            other = await world.http.post("/v1/chat/completions", json=chat, headers=headers)
            assert (models, name, answer.status_code) == (
                models,
                name,
                422 if name in told else 404,
            )
            assert other.json() == answer.json()
            assert ("it is IA3" in answer.text) == (name in told)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "base:sql+pirate"},
        {"model": "base:sql+pirate@1"},
        {"model": "pirate+sql"},
        {"model": "sql+0.5*nobody"},
        {"model": "base", "adapters": [{"name": "sql"}, {"name": "pirate"}]},
    ],
)
async def test_a_key_needs_every_adapter_of_a_request(world: World, fields: dict[str, Any]) -> None:
    one, both = await world.key(models=("sql",)), await world.key(models=("sql", "pirate"))
    view = world.state.gateway.view
    assert view is not None
    is_known = "nobody" not in str(fields)
    if "adapters" not in fields:
        path = f"/v1/models/{fields['model']}"
        shown = [(await world.http.get(path, headers=key)).status_code for key in (one, both)]
        assert shown == [404, 200 if is_known else 404]
    failed = replace(view.bases[0], state="failed")
    world.state.gateway.view = replace(view, bases=(failed,))
    answer = await world.http.post("/v1/chat/completions", json={**fields, **CHAT}, headers=one)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "or this API key may not use it" in answer.json()["error"]["message"]
    answer = await world.http.post("/v1/chat/completions", json={**fields, **CHAT}, headers=both)
    assert answer.status_code == (503 if is_known else 404)


@pytest.mark.parametrize(("models", "param"), [(("base", "sql"), "adapters"), (("sql",), "model")])
async def test_a_forbidden_adapter_of_several_is_refused_by_its_field(
    world: World, models: tuple[str, ...], param: str
) -> None:
    """The field is `model` where the key may not use the base either: no name is shown to exist."""
    body = {"model": "base", "adapters": [{"name": "sql"}, {"name": "pirate"}], **CHAT}
    headers = await world.key(models=models)
    answer = await world.http.post("/v1/chat/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, param)


async def test_a_name_that_is_left_out_shows_no_forbidden_one(world: World) -> None:
    headers = await world.key(models=("sql",))
    for answer in (
        await world.http.post("/tokenize", json={"prompt": "hi"}, headers=headers),
        await world.http.post("/detokenize", json={"tokens": [1]}, headers=headers),
        await world.http.get("/tokenizer_info", headers=headers),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model")
        assert "base" not in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"max_tokens": 9, **CHAT}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 9, **CHAT}, "max_completion_tokens"),
        ("/v1/chat/completions", {"min_tokens": 9, **CHAT}, "min_tokens"),
        ("/v1/chat/completions", {"priority": -1, **CHAT}, "priority"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 9}, "max_tokens"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 17}, "max_output_tokens"),
    ],
)
async def test_a_request_for_more_than_the_key_allows_is_refused_with_the_field(
    world: World, path: str, fields: dict[str, Any], param: str
) -> None:
    headers = await world.key(max_tokens=8, lowest_priority=0)
    answer = await world.http.post(path, json={"model": "base", **fields}, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "with this API key" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "lowest", "queued"),
    [(None, None, 0), (None, 5, 5), (None, 0, 0), (None, -5, 0), (7, 5, 7), (-3, -5, -3)],
)
def test_a_request_without_a_priority_has_the_nearest_to_zero_that_its_key_allows(
    sent: int | None, lowest: int | None, queued: int
) -> None:
    body = CompletionRequest(model="base", prompt="a", priority=sent)
    check_body(Caller("key", KeyPolicy(lowest_priority=lowest)), body)  # refuses none of them
    assert ClientRequest(body, "", None, lowest_priority=lowest).priority == queued


async def test_a_key_of_loading_loads_only_names_that_it_may_call(world: World) -> None:
    headers = await world.key(scopes=frozenset({"load"}), models=("mine-*",))
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = await world.http.post(path, json={"lora_name": "pirate"}, headers=headers)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_key_of_loading_cannot_tell_which_names_exist(world: World) -> None:
    headers = await world.key(scopes=frozenset({"load"}), models=("base9:*",))

    async def answers(path: str, **body: str) -> set[tuple[int, str]]:
        found = set()
        for name in ("pirate", "nobody", "base", "base:pirate", "org/model"):
            sent = {"lora_name": "x", **body, **{key: name for key in body if not body[key]}}
            answer = await world.http.post(path, json=sent, headers=headers)
            text = answer.text.replace(f"'{name}'", "NAME")
            found.add((answer.status_code, text))
        return found

    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    for found in (
        await answers(load, lora_name=""),
        await answers(unload, lora_name=""),
        await answers(load, base_model_name="", lora_path="/nowhere"),
        await answers(load, base_model_name="base", lora_path="/nowhere", lora_name=""),
    ):
        assert len(found) == 1, found
        assert {status for status, _ in found} <= {403, 404}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"max_tokens": 9, **CHAT}),
        ("/v1/messages", {"max_tokens": 9, **CHAT}),
        ("/v1/messages/count_tokens", CHAT),
        ("/tokenize", {"prompt": "hi"}),
    ],
)
@pytest.mark.parametrize(
    ("change", "status"), [("revoked", 401), ("narrowed", 404), ("moved", 404), ("shortened", 400)]
)
async def test_a_key_and_its_model_are_checked_again_after_a_cold_start(
    world: World,
    path: str,
    fields: dict[str, Any],
    change: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if change == "shortened" and path != "/v1/chat/completions":
        return  # the others' lengths are cut, or none
    headers = await world.key(alias="k", models=("pirate@3",))
    pirates = {
        one.version: Resolution(BASE, (WeightedVersion(one),))
        for one in ADAPTERS
        if one.name == "pirate"
    }
    held: list[int] = []

    async def admit(*arguments: object) -> tuple[Route, Callable[[], None]]:
        """Stands for a base that wakes up while operators work."""
        held.append(1)
        version = 3
        if change == "revoked":
            await world.service.revoke("admin-token", ["k"])
        elif change == "moved":
            version = 1
        else:
            changes = {"models": ("sql",)} if change == "narrowed" else {"max_tokens": 8}
            await world.service.order(KeyOrder("update", "admin-token", "k", changes))
        if change != "moved":
            await world.follow()
        return Route(cast("BaseHandle", None), pirates[version]), held.clear

    monkeypatch.setattr(world.state.cold_starts, "admit", admit)
    answer = await world.http.post(path, json={"model": "pirate", **fields}, headers=headers)
    assert answer.status_code == status, answer.text
    assert not held


async def test_a_key_is_made_shown_once_changed_rotated_and_revoked(world: World) -> None:
    admin = {"authorization": f"Bearer {TOKEN}"}
    body = {
        "key_alias": "ci",
        "team_id": "acme",
        "models": ["base:*"],
        "duration": "30d",
        "rpm_limit": 60,
        "tpm_limit": 1000,
        "max_parallel_requests": 4,
        "metadata": {"owner": "x"},
    }
    made = (await world.http.post("/key/generate", json=body, headers=admin)).json()
    assert {name: made[name] for name in body if name != "duration"} == {
        name: value for name, value in body.items() if name != "duration"
    }
    assert made["expires"] is not None
    await world.follow()
    own = {"authorization": f"Bearer {made['key']}"}
    seen = await world.http.get("/key/info", headers=own)
    assert seen.json()["info"]["team_id"] == "acme"
    assert made["key"] not in seen.text
    other = await world.http.get("/key/info?key=nobody", headers=own)
    assert other.status_code == 403

    change = {"key": made["key"], "rpm_limit": None, "models": ["*"], "scopes": ["infer", "load"]}
    changed = (await world.http.post("/key/update", json=change, headers=admin)).json()
    assert (changed["rpm_limit"], changed["tpm_limit"]) == (None, 1000)
    assert (changed["models"], changed["scopes"]) == (["*"], ["infer", "load"])

    turn = {"key": "ci", "grace_period": "1h"}
    turned = (await world.http.post("/key/regenerate", json=turn, headers=admin)).json()
    assert turned["key"] != made["key"]
    await world.follow()
    for text in (made["key"], turned["key"]):
        seen = await world.http.get("/v1/models", headers={"x-api-key": text})
        assert seen.status_code == 200

    listed = (await world.http.get("/key/list?return_full_object=true", headers=admin)).json()
    assert [one["key_alias"] for one in listed["keys"]] == ["ci"]
    ids = (await world.http.get("/key/list?team_id=acme", headers=admin)).json()
    assert ids["keys"] == [made["token_id"]]
    assert (await world.http.get("/key/list?team_id=x", headers=admin)).json()["keys"] == []

    gone = {"keys": [turned["key"]]}
    assert (await world.http.post("/key/delete", json=gone, headers=admin)).json() == {
        "deleted_keys": [made["token_id"]]
    }
    await world.follow()
    seen = await world.http.get("/v1/models", headers={"x-api-key": turned["key"]})
    assert seen.status_code == 401
    acts = (await world.http.get("/admin/audit?limit=3", headers=admin)).json()["acts"]
    assert [one["action"] for one in acts] == ["key.revoke", "key.rotate", "key.update"]
    assert acts[0]["actor"] == "admin-token"
    assert (acts[2]["before"]["rpm_limit"], acts[2]["after"]["rpm_limit"]) == (60, None)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/key/generate", {"duration": "soon"}, "duration"),
        ("/key/generate", {"duration": 1e300}, "duration"),
        ("/key/generate", {"duration": 1e12}, "duration"),
        ("/key/generate", {"rpm_limit": 0}, "rpm_limit"),
        ("/key/generate", {"scopes": ["root"]}, "scopes"),
        ("/key/generate", {"max_budget": 5}, "max_budget"),
        ("/key/generate", {"team_id": "a\nb"}, "team_id"),
        ("/key/update", {"rpm_limit": 5}, "key"),
        ("/key/delete", {}, "key_aliases"),
    ],
)
async def test_a_wrong_field_of_a_key_is_named(
    world: World, path: str, body: dict[str, Any], words: str
) -> None:
    admin = {"authorization": f"Bearer {TOKEN}"}
    answer = await world.http.post(path, json=body, headers=admin)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/key/list?page=x", "page"),
        ("/key/list?page=1000001", "page"),
        ("/key/list?size=10001", "size"),
        ("/key/list?return_full_object=perhaps", "return_full_object"),
        ("/key/list?page=1&team=acme", "team"),
        ("/key/info?token=x", "token"),
        ("/admin/status?base=x", "base"),
        ("/admin/audit?limit=x", "limit"),
        ("/admin/audit?before=99999999999999999999999", "before"),
    ],
)
async def test_a_wrong_parameter_is_named_as_openai_names_it(
    world: World, path: str, param: str
) -> None:
    await world.key()
    answer = await world.http.get(path, headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [1]})]
)
async def test_without_keys_an_unknown_adapter_of_the_only_base_is_named(
    path: str, body: dict[str, Any]
) -> None:
    state = make_state()
    served = ServedBase(BASE, "app", "running", ModelArgs(name="base"))
    state.gateway.view = PlatformView("1", Catalog((BASE,), ADAPTERS), (served,), (), True, None)
    transport = httpx.ASGITransport(build_asgi(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as http:
        answer = await http.post(path, json={**body, "adapters": [{"name": "nobody"}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        404,
        "model_not_found",
        "adapters",
    )
    assert error["message"] == "no adapter is named 'nobody'"


async def test_no_key_is_shown_to_a_caller_of_the_name_of_its_alias(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_key(world.service, alias="jwt:ann", metadata={"private": True})
    ann = Caller("jwt:ann", KeyPolicy(scopes=frozenset({"infer"})))

    async def find(bearer: bytes | None) -> Caller:
        return ann

    monkeypatch.setattr(world.state.authenticator, "_find", find)
    for query, status in (("", 404), ("?key=jwt:ann", 404), ("?key=jwt:bob", 403)):
        answer = await world.http.get(f"/key/info{query}")
        assert answer.status_code == status
        assert "private" not in answer.text


async def test_an_administrative_act_is_in_the_audit_log_and_a_refused_one_is_not(
    world: World,
) -> None:
    noted: list[tuple[str, str, str]] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        status = 404 if scope["path"].endswith("nobody/wake") else 200
        await Response(status_code=status)(scope, receive, send)

    assert world.state.authenticator is not None
    app = AuthenticationMiddleware(
        answer, world.state.authenticator, lambda *act: noted.append(act)
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        await client.post("/admin/drain")
        await client.post("/admin/bases/nobody/wake")
        await client.post("/admin/route")
        await client.get("/admin/bases")
        await client.post("/key/generate")
        await client.post("/v1/load_lora_adapter")
        await client.post("/v1/chat/completions")
    assert noted == [
        ("admin-token", "POST", "/admin/drain"),
        ("admin-token", "POST", "/v1/load_lora_adapter"),
    ]
    _note_act(cast(Any, LocalManager(world.service)), *noted[0])
    await world.key()
    async with asyncio.timeout(120):
        while len(acts := await world.service.acts(10, None)) < 2:
            await asyncio.sleep(0.01)
    assert {one["action"] for one in acts} == {"key.generate", "POST /admin/drain"}


async def test_a_wrong_duration_is_refused_in_a_plain_sentence(world: World) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = await world.http.post("/key/generate", json={"duration": "-1d"}, headers=headers)
    assert answer.json()["error"]["message"] == (
        "duration: must be a number with s, m, h, d, w or mo, such as 30d, got '-1d'."
    )


async def test_keys_are_off_without_tenancy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_TOKEN", TOKEN)
    app = build_asgi(make_state(manager=LocalManager(None)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = await client.post("/key/generate", json={}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "keys_off")
        assert (await client.get("/key/list")).status_code == 401
