"""Requests of the commands to a running server; refusals become sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import msgspec

from serve_app.cli.commands.common import Failure

WAITING = "Waiting: "  # begins a status with a reason
REFUSED = "Refused: "  # begins a status that no waiting changes
LOADING = f"{WAITING}models are loading"


class ModelLine(msgspec.Struct):
    id: str
    parent: str | None = None
    root: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[ModelLine]


class ErrorText(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: ErrorText


class _Status(msgspec.Struct):
    status: str = ""
    refused: str = ""


def ready_status(client: httpx.Client, url: str) -> str | None:
    """Returns None if the server is ready, otherwise the reason why it is not."""
    try:
        answer = client.get(f"{url}/ready")
    except httpx.TransportError:
        return "Starting Ray"
    if answer.status_code == 200:
        return None
    try:
        found = msgspec.json.decode(answer.content, type=_Status)
    except msgspec.DecodeError:
        return "Starting Serve"
    if found.refused:
        return f"{REFUSED}{found.refused}"
    return f"{WAITING}{found.status}" if found.status else "Starting Serve"


def served_models(client: httpx.Client, url: str) -> list[ModelLine]:
    with server_errors(url):
        answer = client.get(f"{url}/v1/models")
        if answer.status_code != 200:
            raise Failure(refusal(answer.status_code, answer.content))
        try:
            return msgspec.json.decode(answer.content, type=_ModelList).data
        except msgspec.DecodeError as error:
            raise Failure(f"{url}/v1/models did not answer with a model list: {error}") from error


def list_served(client: httpx.Client, url: str) -> list[tuple[str, str | None]]:
    """Returns (name, base or None) of every model that the server serves."""
    return [(line.id, line.parent) for line in served_models(client, url)]


def refusal(status: int, body: bytes) -> str:
    """Returns an OpenAI error body as a sentence."""
    try:
        message = msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        message = body.decode(errors="replace").strip()[:200]
    return f"The server answered {status}: {message}"


@contextmanager
def server_errors(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise Failure(f"Nothing answers at {url}; start it with: loraplex serve CONFIG") from error
    except httpx.InvalidURL as error:
        raise Failure(f"{url} is not a URL: {error}") from error
    except httpx.HTTPError as error:
        raise Failure(f"The connection to {url} failed: {error or type(error).__name__}") from error
