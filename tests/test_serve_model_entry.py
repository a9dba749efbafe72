"""`GET /v1/models/{model}`: the names that it describes are those that completions accept."""

from __future__ import annotations

from urllib.parse import quote, unquote

import pytest
from fastapi.testclient import TestClient

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion
from serve_app.api.ingress import build_asgi
from serve_app.config import ModelArgs
from serve_app.platform_view import PlatformView, ServedBase
from tests.ingress_app import make_state

COMBINATION = "base:0.5*a+-2*b@1"


def client_of(registry_error: str | None = None) -> TestClient:
    """Serves a base with adapters of different ages."""
    base = BaseVersion("base", 1, "d" * 64, "source", created_s=1)
    ages = {"a": 7, "b": 9, "c": 8}
    adapters = tuple(
        AdapterVersion(name, 1, name * 64, "base", base.digest, 8, (), "source", created_s=age_s)
        for name, age_s in ages.items()
    )
    served = ServedBase(base, "app", "running", ModelArgs(name="base"))
    state = make_state()
    catalog = Catalog((base,), adapters)
    state.gateway.view = PlatformView("1", catalog, (served,), (), True, registry_error)
    return TestClient(build_asgi(state))


@pytest.mark.parametrize(
    ("path", "root"),
    [
        (COMBINATION, "0.5*a@1+-2*b@1"),
        (quote(COMBINATION, safe=""), "0.5*a@1+-2*b@1"),
        ("a+b", "a@1+b@1"),
        ("base:0.5*b", "0.5*b@1"),
    ],
)
def test_adapters_with_weights_are_a_model(path: str, root: str) -> None:
    assert client_of().get(f"/v1/models/{path}").json() == {
        "id": unquote(path),
        "object": "model",
        "created": 9,  # the newest adapter's
        "owned_by": "loraplex",
        "root": root,
        "parent": "base",
        "max_model_len": None,
    }


@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("base:a+none", 404, "no adapter is named 'none'"),
        ("none:a+b", 404, "no base model is named 'none'"),
        ("base:a+x*b", 400, "the weight 'x' in"),
        ("base:a+101*b", 400, "got 101"),
        ("base:a+a", 400, "'a' is twice in"),
        ("base+a", 400, "is a base, not an adapter"),
    ],
)
def test_a_wrong_name_is_refused_as_in_completions(model: str, status: int, words: str) -> None:
    client = client_of()
    answers = [client.get(f"/v1/models/{model}")]
    answers.append(client.post("/v1/completions", json={"model": model, "prompt": "a"}))
    assert [answer.status_code for answer in answers] == [status, status]
    shown, refused = (answer.json()["error"] for answer in answers)
    assert words in shown["message"]
    assert shown == refused


def test_an_unknown_name_may_be_new_while_the_registry_is_away() -> None:
    client = client_of("no answer")
    answers = client.get("/v1/models/new"), client.get("/v1/models/base")
    assert [answer.status_code for answer in answers] == [503, 200]
