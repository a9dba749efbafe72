"""A client of the admin API. A call imports its libraries, so that --help does not load them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from serve_app.cli.commands.common import Failure
from serve_app.home import ADMIN_TOKEN, default_home, kept_token

_TIMEOUT_S = 120.0  # a preload may fetch an adapter first

T = TypeVar("T")


def call_server(
    url: str, method: str, path: str, kind: type[T], body: Mapping[str, object] | None = None
) -> T:
    """Calls a path of a running server with the admin token and decodes the answer as a `kind`.
    `body`: as JSON, without the fields that are None. Raises Failure, with the server's words if it
    refuses."""
    import httpx
    import msgspec

    from serve_app.cli.commands.client import refusal, server_errors

    token = kept_token(default_home())
    if token is None:
        raise Failure(f"No admin token: set {ADMIN_TOKEN} to the one that the server runs with")
    if body is not None:
        body = {name: value for name, value in body.items() if value is not None}
        for name, value in body.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise Failure(f"{name}: must be a finite number, got {value}")
    headers = {"authorization": f"Bearer {token}"}
    with server_errors(url), httpx.Client(timeout=_TIMEOUT_S, headers=headers) as client:
        answer = client.request(method, f"{url.rstrip('/')}{path}", json=body)
    if answer.status_code >= 400:
        raise Failure(refusal(answer.status_code, answer.content))
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except msgspec.DecodeError as error:
        raise Failure(f"{url} did not answer as loraplex does: {error}") from error
