"""Requests of the commands to a running server; refusals become sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import msgspec

from serve_app.cli.commands.common import Failure
from serve_app.home import API_KEY


class ModelLine(msgspec.Struct):
    id: str
    parent: str | None = None
    root: str | None = None
    max_model_len: int | None = None

    @property
    def model(self) -> str:
        """The name for requests."""
        return self.id if self.parent is None else f"{self.parent}:{self.id}"


class _ModelList(msgspec.Struct):
    data: list[ModelLine]


class ErrorText(msgspec.Struct):
    message: str = ""
    code: str | int | None = None  # of OpenAI a word, of vLLM the status


class _ErrorBody(msgspec.Struct):
    error: ErrorText


def served_models(client: httpx.Client, url: str) -> list[ModelLine]:
    with server_errors(url):
        answer = client.get(f"{url}/v1/models")
        if answer.status_code != 200:
            raise Failure(refusal(answer.status_code, answer.content, API_KEY))
        try:
            return msgspec.json.decode(answer.content, type=_ModelList).data
        except msgspec.DecodeError as error:
            raise Failure(f"{url}/v1/models did not answer with a model list: {error}") from error


def refusal(status: int, body: bytes, key_variable: str | None = None) -> str:
    """Returns an OpenAI error body as a sentence. `key_variable`: has the key that the command
    sends, and is named if the key is refused."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        error = ErrorText(body.decode(errors="replace").strip()[:200])
    words = f"The server answered {status}: {error.message}"
    if key_variable is not None and error.code == "invalid_api_key":
        words += f" This command takes the key from {key_variable}."
    return words


@contextmanager
def server_errors(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise Failure(f"Nothing answers at {url}; start it with: loraplex serve CONFIG") from error
    except httpx.UnsupportedProtocol as error:
        raise Failure(f"{url} is not a URL: it must begin with http:// or https://") from error
    except httpx.InvalidURL as error:
        raise Failure(f"{url} is not a URL: {error}") from error
    except httpx.HTTPError as error:
        raise Failure(f"The connection to {url} failed: {error or type(error).__name__}") from error
