"""The operators of a server, and the token that `loraplex serve` keeps for its home."""

import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from starlette.routing import BaseRoute

from serve_app.api import admin_status
from serve_app.api.ingress import MetricsMiddleware
from serve_app.config import ADMIN_TOKEN, IngressArgs
from serve_app.home import HomeError, ensure_token, kept_token
from serve_app.http.asgi import install_error_handlers
from tests.ingress_app import make_app

PUBLIC = {
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model:path}"),
    *("/v1/responses", "/v1/responses/{response_id}", "/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/tokenizer_info", "/openapi.json", "/docs"),
    *("/live", "/health", "/ready", "/metrics", "/version"),
}
ADMIN = {
    *(
        "/admin/status",
        "/admin/drain",
        "/admin/route",
        "/admin/decisions",
        "/admin/adapters",
        "/admin/bases",
    ),
    *(f"/admin/adapters/{{name}}/{order}" for order in ("pin", "unpin", "preload", "evict")),
    *("/admin/audit", "/admin/usage", "/admin/series", "/admin/registry"),
    *("/key/generate", "/key/update", "/key/regenerate", "/key/delete"),
    *("/key/info", "/key/list", "/key/usage"),
    *("/admin/bases/{name}", "/admin/bases/{name}/sleep", "/admin/bases/{name}/wake"),
    *("/admin/canaries", "/admin/canaries/{adapter}"),
    *(f"/admin/canaries/{{adapter}}/{order}" for order in ("promote", "abort")),
}
LORA_ADMIN = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
WEBHOOK = {"/v1/registry/webhook"}
CONSOLE = {
    *("/console", "/console/", "/console/assets/{path:path}"),
    *(f"/console/{name}" for name in ("session", "login", "logout")),
}


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(admin_status.router)
    install_error_handlers(app)
    return TestClient(app, raise_server_exceptions=False)


def test_without_a_token_of_its_own_the_server_has_no_administration(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADMIN_TOKEN, raising=False)
    answer = client.get("/admin/status", headers={"authorization": "Bearer "})
    assert answer.status_code == 403
    assert ADMIN_TOKEN in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic right", "right", "Bearer é"]
)
def test_only_the_bearer_of_the_token_gets_in(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, header: str | None
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN, "right")
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    answer = client.get("/admin/status", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_admin_token"


def routes_of(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    for route in routes:
        included = getattr(route, "original_router", None)  # newer FastAPI keeps routers whole
        if included is not None:
            yield from routes_of(included.routes)
        else:
            assert isinstance(route, APIRoute), f"{route} is of no known kind"
            yield route


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> MetricsMiddleware:
    monkeypatch.setenv(ADMIN_TOKEN, "right")
    app = make_app(IngressArgs(allow_runtime_lora_updating=True))
    assert isinstance(app, MetricsMiddleware)
    return app


def all_routes(whole: MetricsMiddleware) -> list[APIRoute]:
    app: object = whole
    while not isinstance(app, FastAPI):
        app = app._app  # type: ignore[attr-defined]  # the layers around it
    return list(routes_of(app.routes))


def test_every_route_is_known_as_public_or_as_guarded(whole: MetricsMiddleware) -> None:
    """A new route has to be listed here."""
    paths = {route.path for route in all_routes(whole)}
    assert paths == PUBLIC | ADMIN | LORA_ADMIN | WEBHOOK | CONSOLE


@pytest.mark.parametrize("path", ["/admin/bases", "/admin/canaries/pirate"])
def test_a_body_that_is_no_json_is_named_alike(whole: MetricsMiddleware, path: str) -> None:
    headers = {"authorization": "Bearer right"}
    answer = TestClient(whole).post(path, content=b'{"a":', headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert error["message"].startswith("The body is not valid JSON: ")


@pytest.mark.parametrize("header", [None, "Bearer wrong"])
def test_no_route_of_the_administration_answers_without_the_token(
    whole: MetricsMiddleware, header: str | None
) -> None:
    client = TestClient(whole)
    headers = {} if header is None else {"authorization": header}
    guarded = [route for route in all_routes(whole) if route.path in ADMIN | LORA_ADMIN]
    assert guarded
    for route in guarded:
        for method in route.methods:
            answer = client.request(method, route.path, headers=headers)
            assert (method, route.path, answer.status_code) == (method, route.path, 401)
            assert answer.json()["error"]["code"] == "invalid_admin_token"


def test_kept_token_is_made_once_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADMIN_TOKEN, raising=False)
    assert kept_token(tmp_path) is None
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: ensure_token(tmp_path), range(16)))
    assert tokens == {kept_token(tmp_path)}
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setenv(ADMIN_TOKEN, "of the environment")
    assert ensure_token(tmp_path) == "of the environment"


def test_an_empty_file_of_the_token_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADMIN_TOKEN, raising=False)
    (tmp_path / "admin_token").touch()
    with pytest.raises(HomeError, match="admin_token is empty; remove it"):
        ensure_token(tmp_path)
