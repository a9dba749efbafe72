"""The outermost middleware of the process that clients connect to: Serve's HTTP proxy or, behind
HAProxy, each ingress replica. Serve loads it through RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH.

Serve forwards bytes as they arrive, and reads some headers itself. Here headers are checked and
bodies are completed before Serve gets a request, and Serve's own errors get OpenAI's shape.
"""

from __future__ import annotations

import logging
import re
import uuid
from http import HTTPStatus

from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.config import IngressArgs, front_limits
from serve_app.errors import (
    INVALID_REQUEST,
    SERVER_ERROR,
    SHOULD_RETRY,
    ApiError,
    ClientGoneError,
    OverloadedError,
    ServiceUnavailableError,
)
from serve_app.http.arrivals import Arrivals
from serve_app.http.asgi import ANTHROPIC_PATH, REQUEST_ID, SseResponse, error_body, error_response
from serve_app.http.connection import install

logger = logging.getLogger(__name__)
Headers = list[tuple[bytes, bytes]]

_LEGAL_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# Instructions to Serve: to keep a request after its client disconnects, to choose a replica.
_DROPPED = frozenset(
    {
        b"x-request-disconnect-disabled",
        b"serve-multiplexed-model-id",
        b"serve_multiplexed_model_id",
    }
)
_DECODED = frozenset({b"x-session-id", b"x-request-timeout-seconds"})  # Serve decodes as UTF-8
_SERVE_PATHS = "/-/"  # Serve's health and routes, for probes that read the status only
_MESSAGES = {
    404: "No application is served at this path.",
    408: "The request took longer than the server allows.",
    429: "Too many requests are waiting.",
    503: "The server is unavailable at the moment.",
}
_RETRY_AFTER_S = 1


def middlewares() -> list[Middleware]:
    """Returns the middlewares for Serve, which calls this once, before its HTTP server starts."""
    args = front_limits()
    install(args)
    return [Middleware(FrontMiddleware, args)]


class FrontMiddleware:
    def __init__(self, app: ASGIApp, args: IngressArgs) -> None:
        self._app = app
        self._arrivals = Arrivals(args)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = dict(scope)  # with the headers that the client sent: these are counted
        scope["headers"] = sanitize(scope["headers"])
        try:
            self._arrivals.check_header(received)
            receive = await self._arrivals.receive_body(scope, receive)
        except ClientGoneError:
            return
        except (ApiError, OverloadedError) as error:
            await _own_error(error, scope)(scope, receive, send)
            return
        try:
            await self._respond(scope, receive, send)
        finally:
            self._arrivals.release_body(receive)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = is_streaming = False
        serve_error: Message | None = None  # the start of an error response by Serve itself

        async def filtering_send(message: Message) -> None:
            nonlocal is_started, is_streaming, serve_error
            if not is_started:
                is_started = True
                if message["type"] == "http.response.start":
                    is_streaming = _is_stream(message)
                    message["headers"] = [*message["headers"], *_anthropic_id(scope)]
                if message["type"] == "http.response.start" and _is_from_serve(scope, message):
                    serve_error = message
                    return
            elif not message.get("more_body", False):
                is_streaming = False
            if serve_error is None:
                await send(message)

        try:
            await self._app(scope, receive, filtering_send)
        except Exception:
            if is_started and not is_streaming:
                raise
            logger.exception("Serve failed on a request")
        if is_streaming:
            # Serve ends it without a word: at a time limit, or when the ingress's process ends. The
            # connection is closed without an end of the body, for clients that skip the event.
            body = _cut_event(scope)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        elif serve_error is not None:
            await _client_error(serve_error, scope)(scope, receive, send)
        elif not is_started:
            # The ingress answers every exception, so its process must have ended.
            error = ServiceUnavailableError(_MESSAGES[503])
            await _own_error(error, scope)(scope, receive, send)


def sanitize(headers: Headers) -> Headers:
    """Returns the headers without any that Serve would fail on or obey, and with a request id: the
    client's or, if it has none or an illegal one, a new one."""
    kept: Headers = []
    has_id = False
    for name, value in headers:
        if name == REQUEST_ID:
            if has_id or _LEGAL_ID.fullmatch(value) is None:
                continue
            has_id = True
        elif name in _DROPPED or (name in _DECODED and not _is_utf8(value)):
            continue
        kept.append((name, value))
    if not has_id:
        kept.append((REQUEST_ID, str(uuid.uuid4()).encode()))
    return kept


def _is_utf8(value: bytes) -> bool:
    return value.decode(errors="ignore").encode() == value


def _is_from_serve(scope: Scope, message: Message) -> bool:
    """Returns True for an error without SHOULD_RETRY, a header that every error of the ingress
    has."""
    return (
        message["status"] >= 400
        and not scope["path"].startswith(_SERVE_PATHS)
        and all(name.lower() != SHOULD_RETRY.encode() for name, _ in message["headers"])
    )


def _is_stream(start: Message) -> bool:
    types = (value for name, value in start["headers"] if name.lower() == b"content-type")
    return any(value.startswith(SseResponse.media_type.encode()) for value in types)


def _cut_event(scope: Scope) -> bytes:
    """Returns the end of a stream that lacks its rest, as an event that SDKs raise on."""
    words = (
        "The answer is not complete: it reached its time limit, or a process of the server ended."
    )
    error = ApiError(500, words, SERVER_ERROR, code="stream_cut")
    return b"event: error\ndata: %b\n\n" % error_body(error, scope)


def _client_error(start: Message, scope: Scope) -> Response:
    """Returns the response that replaces an error of Serve's, given the start of that error."""
    status = start["status"]
    headers = {bytes(name).lower(): bytes(value) for name, value in start["headers"]}
    retry_after = headers.get(b"retry-after", b"")
    wait_s = _RETRY_AFTER_S if status in (429, 503) else None
    if retry_after.isdigit():
        wait_s = int(retry_after)
    kind = SERVER_ERROR if status >= 500 else INVALID_REQUEST
    kind = {429: "rate_limit_error"}.get(status, kind)
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    message = _MESSAGES.get(status, "The request cannot be answered.")
    code = {429: "overloaded", 503: "unavailable", 500: "internal"}.get(status, code)
    return _own_error(ApiError(status, message, kind, None, code, wait_s), scope)


def _own_error(error: Exception, scope: Scope) -> Response:
    """Returns the response to an error with the request's id, which Serve adds to its answers."""
    response = error_response(error, scope)
    own_id = dict(scope["headers"])[REQUEST_ID]
    response.raw_headers += [(REQUEST_ID, own_id), *_anthropic_id(scope)]
    return response


def _anthropic_id(scope: Scope) -> Headers:
    """Returns the request's id under the name that Anthropic's clients read, at their paths."""
    is_anthropic = scope["path"].startswith(ANTHROPIC_PATH)
    return [(b"request-id", dict(scope["headers"])[REQUEST_ID])] if is_anthropic else []
