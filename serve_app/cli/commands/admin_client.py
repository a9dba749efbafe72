"""A client of the admin API: adds the token, and turns refusals into sentences."""

from __future__ import annotations

import httpx
import msgspec

from serve_app.cli.admin_token import kept_token
from serve_app.cli.commands.common import Failure, refusal, server_errors
from serve_app.config import ADMIN_TOKEN, default_home

_TIMEOUT_S = 120.0  # a preload may fetch an adapter first


def call_admin(
    url: str, method: str, path: str, body: dict[str, object] | None = None
) -> dict[str, object]:
    """Calls `path` below /admin, such as "/adapters". Raises Failure with the server's words."""
    token = kept_token(default_home())
    if token is None:
        raise Failure(f"No admin token: set {ADMIN_TOKEN} to the one that the server runs with")
    with server_errors(url), httpx.Client(timeout=_TIMEOUT_S) as client:
        answer = client.request(
            method,
            f"{url.rstrip('/')}/admin{path}",
            headers={"authorization": f"Bearer {token}"},
            json=body,
        )
    if answer.status_code >= 400:
        raise Failure(refusal(answer.status_code, answer.content))
    try:
        return msgspec.json.decode(answer.content, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise Failure(f"{url} did not answer as loraplex does: {error}") from error
