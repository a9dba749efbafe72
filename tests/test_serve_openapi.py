"""The OpenAPI document: the bodies and responses of the public routes, and no other route."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from serve_app.config import IngressArgs
from tests.ingress_app import make_app
from tests.test_serve_admin import ADMIN, LORA_ADMIN, PUBLIC, WEBHOOK


def document(has_lora: bool = False) -> dict[str, Any]:
    args = IngressArgs(allow_runtime_lora_updating=has_lora)
    answer: httpx.Response = TestClient(make_app(args)).get("/openapi.json")
    assert answer.status_code == 200
    return dict(answer.json())


def schema_of(found: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return dict(found["components"]["schemas"][name])


def test_the_document_shows_the_public_routes_and_none_of_the_administration() -> None:
    found = document()
    shown = {path.replace("{model}", "{model:path}") for path in found["paths"]}
    # A stored response does not exist, so the route that says so is left out.
    assert shown == PUBLIC - {"/openapi.json", "/docs", "/v1/responses/{response_id}"}
    assert not shown & (ADMIN | LORA_ADMIN | WEBHOOK)
    assert set(document(has_lora=True)["paths"]) - set(found["paths"]) == LORA_ADMIN
    assert found["info"] == {"title": "loraplex", "version": version("loraplex")}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"model", "messages", "max_completion_tokens", "request_id"}),
        ("/v1/completions", {"model", "prompt", "echo", "stop", "logit_bias"}),
        ("/v1/responses", {"model", "input", "instructions", "max_output_tokens"}),
        ("/v1/messages", {"model", "messages", "system", "max_tokens", "stop_sequences"}),
        ("/v1/messages/count_tokens", {"model", "messages", "system", "tools"}),
        ("/tokenize", {"model", "prompt", "messages", "return_token_strs"}),
        ("/detokenize", {"model", "tokens"}),
        ("/v1/load_lora_adapter", {"lora_name", "lora_path", "base_model_name"}),
        ("/v1/unload_lora_adapter", {"lora_name"}),
    ],
)
def test_every_body_has_its_schema(path: str, fields: set[str]) -> None:
    found = document(has_lora=True)
    body = schema_of(found, found["paths"][path]["post"]["requestBody"]["content"])
    assert fields <= set(body["properties"])


def test_every_operation_has_its_answer_and_the_error_body() -> None:
    found = document(has_lora=True)
    openai, anthropic = {"message", "type", "param", "code"}, {"message", "type"}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert "200" in operation["responses"]
            error = schema_of(found, operation["responses"]["default"]["content"])
            expected = anthropic if path.startswith("/v1/messages") else openai
            assert set(error["properties"]["error"]["properties"]) == expected


def test_the_page_of_the_document_names_every_route_and_loads_nothing() -> None:
    answer: httpx.Response = TestClient(make_app(IngressArgs())).get("/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    for path in document()["paths"]:
        assert f"<code>{path}</code>" in answer.text
    assert "<script" not in answer.text
    assert "https://" not in answer.text.replace("https://json-schema.org", "")
    assert "/admin" not in answer.text
