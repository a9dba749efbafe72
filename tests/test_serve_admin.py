"""Who may operate the server, and the token that `loraplex serve` keeps for its home."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from serve_app import admin_routes
from serve_app.admin_auth import ensure_token, kept_token
from serve_app.asgi import install_error_handlers
from serve_app.config import ADMIN_TOKEN


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(admin_routes.router)
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
