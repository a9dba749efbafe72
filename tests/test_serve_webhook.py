"""The webhook's route: which deliveries it accepts, and that it only wakes the manager."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from mlflow.webhooks import delivery
from mlflow.webhooks.constants import (
    WEBHOOK_DELIVERY_ID_HEADER,
    WEBHOOK_SIGNATURE_HEADER,
    WEBHOOK_TIMESTAMP_HEADER,
)
from ray.exceptions import RayError

from registry import webhooks
from serve_app.api import webhook
from serve_app.api.webhook import PATH
from serve_app.config import WEBHOOK_SECRET
from serve_app.http.asgi import install_error_handlers

SECRET = "a secret of ours"
BODY = b'{"entity": "model_version_alias", "action": "created", "data": {"name": "\xc3\xa9"}}'


class FakeManager:
    """Replaces the manager's handle."""

    def __init__(self) -> None:
        self.num_wakes = 0
        self.is_away = False
        self.wake = SimpleNamespace(remote=self._wake)

    async def _wake(self) -> None:
        if self.is_away:
            raise RayError("the manager restarts")
        self.num_wakes += 1


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture
def client(manager: FakeManager, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv(WEBHOOK_SECRET, SECRET)
    app = FastAPI()
    app.state.ingress = SimpleNamespace(
        gateway=SimpleNamespace(manager=manager), deliveries=webhooks.SeenDeliveries()
    )
    app.include_router(webhook.router)
    install_error_handlers(app)
    return TestClient(app, raise_server_exceptions=False)


def headers(
    body: bytes = BODY, age_s: float = 0, secret: str = SECRET, delivery_id: str = "id-1"
) -> dict[str, str]:
    """Returns headers with a signature by MLflow's own code."""
    stamp = str(int(time.time() - age_s))
    signature = delivery._generate_hmac_signature(secret, delivery_id, stamp, body.decode())
    return {
        WEBHOOK_DELIVERY_ID_HEADER: delivery_id,
        WEBHOOK_TIMESTAMP_HEADER: stamp,
        WEBHOOK_SIGNATURE_HEADER: signature,
        "content-type": "application/json",
    }


def test_what_mlflow_signed_wakes_the_manager(client: TestClient, manager: FakeManager) -> None:
    assert client.post(PATH, content=BODY, headers=headers()).status_code == 204
    assert manager.num_wakes == 1


def test_a_replayed_delivery_wakes_nobody(client: TestClient, manager: FakeManager) -> None:
    recorded = headers()
    for _ in range(5):
        assert client.post(PATH, content=BODY, headers=recorded).status_code == 204
    assert manager.num_wakes == 1
    assert client.post(PATH, content=BODY, headers=headers(delivery_id="id-2")).status_code == 204
    assert manager.num_wakes == 2


def test_a_delivery_that_was_not_taken_is_taken_when_it_comes_again(
    client: TestClient, manager: FakeManager
) -> None:
    recorded = headers()
    manager.is_away = True
    assert client.post(PATH, content=BODY, headers=recorded).status_code == 503
    manager.is_away = False
    assert client.post(PATH, content=BODY, headers=recorded).status_code == 204
    assert manager.num_wakes == 1


def test_ids_of_deliveries_are_kept_while_a_copy_could_pass_and_are_bounded() -> None:
    seen = webhooks.SeenDeliveries()
    seen.add("first", 0.0)
    assert seen.has("first", 2 * webhooks.MAX_AGE_S)
    assert not seen.has("first", 2 * webhooks.MAX_AGE_S + 1)
    assert len(seen) == 0
    for number in range(webhooks._MAX_SEEN + 50):
        seen.add(str(number), 700.0)
    assert len(seen) == webhooks._MAX_SEEN
    assert seen.has(str(webhooks._MAX_SEEN), 701.0)


def test_a_signed_body_is_not_read(client: TestClient, manager: FakeManager) -> None:
    assert client.post(PATH, content=b"{{{", headers=headers(b"{{{")).status_code == 204
    assert manager.num_wakes == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"signature": None},
        {"signature": ""},
        {"signature": "v1,"},
        {"signature": "v1,é"},
        {"timestamp": None},
        {"delivery-id": "another"},
        {"timestamp": "the next second"},
    ],
)
def test_what_was_not_signed_so_is_refused(
    client: TestClient, manager: FakeManager, changed: dict[str, str | None]
) -> None:
    given: dict[str, str | None] = {k.lower(): v for k, v in headers().items()}
    signed_s = int(given[WEBHOOK_TIMESTAMP_HEADER.lower()] or 0)
    words = {"the next second": str(signed_s + 1)}
    given |= {f"x-mlflow-{name}": words.get(value or "", value) for name, value in changed.items()}
    sent = {name: value.encode("latin-1") for name, value in given.items() if value is not None}
    answer = client.post(PATH, content=BODY, headers=sent)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_signature"
    assert manager.num_wakes == 0


@pytest.mark.parametrize(
    "signing",
    [
        {"secret": "another secret"},
        {"body": b"{}"},
        {"age_s": webhooks.MAX_AGE_S + 10},
        {"age_s": -webhooks.MAX_AGE_S - 10},
    ],
)
def test_another_secret_another_body_and_another_day_are_refused(
    client: TestClient, manager: FakeManager, signing: dict[str, Any]
) -> None:
    assert client.post(PATH, content=BODY, headers=headers(**signing)).status_code == 401
    assert manager.num_wakes == 0


def test_a_body_has_a_limit(client: TestClient, manager: FakeManager) -> None:
    body = b" " * (1024**2 + 1)
    assert client.post(PATH, content=body, headers=headers(body)).status_code == 413
    assert manager.num_wakes == 0


def test_without_a_secret_webhooks_are_off(
    client: TestClient, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WEBHOOK_SECRET)
    answer = client.post(PATH, content=BODY, headers=headers(secret=""))
    assert answer.status_code == 403
    assert WEBHOOK_SECRET in answer.json()["error"]["message"]
    assert manager.num_wakes == 0


def test_mlflow_is_told_to_try_again_while_the_manager_is_away(
    client: TestClient, manager: FakeManager
) -> None:
    manager.is_away = True
    answer = client.post(PATH, content=BODY, headers=headers())
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


def test_the_header_names_and_the_signature_are_mlflows() -> None:
    assert WEBHOOK_SIGNATURE_HEADER.lower() == webhooks.SIGNATURE
    assert WEBHOOK_DELIVERY_ID_HEADER.lower() == webhooks.DELIVERY_ID
    assert WEBHOOK_TIMESTAMP_HEADER.lower() == webhooks.TIMESTAMP
    theirs = delivery._generate_hmac_signature(SECRET, "a", "1", BODY.decode())
    assert webhooks.sign(SECRET, "a", "1", BODY) == theirs
