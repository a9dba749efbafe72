"""Tests of what the commands that call the API as a client say of a missing or wrong key."""

import json

import httpx
import pytest

from serve_app.cli.commands.client import served_models
from serve_app.cli.commands.common import Failure


@pytest.mark.parametrize(
    ("status", "code", "is_named"),
    [(401, "invalid_api_key", True), (403, "missing_scope", False)],
)
def test_a_refused_key_is_named_by_its_variable(status: int, code: str, is_named: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, text=json.dumps({"error": {"message": "No.", "code": code}}))

    with (
        httpx.Client(transport=httpx.MockTransport(answer)) as client,
        pytest.raises(Failure) as caught,
    ):
        served_models(client, "http://127.0.0.1:1")
    assert str(caught.value).startswith(f"The server answered {status}: No.")
    assert ("LORAPLEX_API_KEY" in str(caught.value)) is is_named
