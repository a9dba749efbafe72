"""The errors that HAProxy answers by itself, in OpenAI's shape: files with whole responses, and the
edits of Serve's configuration that have HAProxy send them.

They are made before any request, so they hold no id of it, and are the same at every path. What is
no HTTP, or comes too late, HAProxy answers from its program alone: 400 and 408 stay as they are.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from serve_app.errors import SERVER_ERROR, ApiError

_NO_SERVER = ApiError(
    503, "The server is unavailable at the moment.", SERVER_ERROR, None, "unavailable", 1
)
# By the status that HAProxy would send: the answer in its place.
_ERRORS = {
    404: ApiError(404, "No application is served at this path.", code="not_found"),
    500: ApiError(500, "The server failed on this request.", SERVER_ERROR, None, "internal"),
    502: _NO_SERVER,
    503: _NO_SERVER,
    504: ApiError(408, "The request took longer than the server allows.", code="request_timeout"),
}


def error_edits(folder: Path) -> tuple[str, ...]:
    """Writes the responses into `folder`. Returns commands for `sed -E`, which replace Serve's
    error files, and its own answer where no application is."""
    lines = []
    for status, error in _ERRORS.items():
        file = folder / f"{status}.http"
        file.write_bytes(_response(error))
        lines.append(f"    errorfile {status} {file}")
    return (
        "/^ *errorfile /d",
        "\\n".join(("s|^defaults$|&", *lines)) + "|",
        "s|^( *http-request return status 404) .*|\\1 default-errorfiles|",
    )


def _response(error: ApiError) -> bytes:
    body = error.body()
    fields = {
        **error.headers(),
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        *(f"{name}: {value}" for name, value in fields.items()),
    )
    return "\r\n".join((*head, "", "")).encode() + body
