"""The outermost layer in the process that clients connect to: Serve's HTTP proxy or, behind
HAProxy, each ingress replica. Serve loads it through RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH.

Serve forwards every byte as fast as it arrives, and reads some headers itself; so headers are
checked and bodies are complete before Serve sees a request, and Serve's own errors leave in
OpenAI's shape.
"""

from __future__ import annotations

import logging
import re
from http import HTTPStatus

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.config import IngressArgs, front_limits
from serve_app.errors import INVALID_REQUEST, SERVER_ERROR, SHOULD_RETRY, ApiError, ClientGoneError
from serve_app.http.arrivals import Arrivals, Headers, check_header_size
from serve_app.http.asgi import error_response
from serve_app.http.connection import install

logger = logging.getLogger(__name__)

_REQUEST_ID = b"x-request-id"
_LEGAL_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# Orders to Serve, not to this server: to keep a request whose client left, to choose a replica.
_DROPPED = frozenset(
    {
        b"x-request-disconnect-disabled",
        b"serve-multiplexed-model-id",
        b"serve_multiplexed_model_id",
    }
)
_DECODED = frozenset({b"x-session-id", b"x-request-timeout-seconds"})  # by Serve, as UTF-8
_SERVES_OWN_PATHS = "/-/"  # health and routes: for probes, which read the status
_MESSAGES = {
    404: "No application is served at this path.",
    408: "The request took longer than the server allows.",
    429: "Too many requests wait here.",
    503: "The server cannot answer now.",
}
_WAIT_S = 1


def middlewares() -> list[Middleware]:
    """Serve calls this once, before its HTTP server starts."""
    args = front_limits()
    install(args)
    return [Middleware(Front, args)]


class Front:
    def __init__(self, app: ASGIApp, args: IngressArgs) -> None:
        self._app = app
        self._max_header_bytes = args.max_header_bytes
        self._arrivals = Arrivals(args)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            check_header_size(scope["headers"], self._max_header_bytes)
            scope["headers"] = clean(scope["headers"])
            receive = await self._arrivals.whole(scope, receive)
        except ClientGoneError:
            return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        finally:
            self._arrivals.done(receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False
        refusal: Message | None = None  # Serve's own

        async def send_shaped(message: Message) -> None:
            nonlocal is_started, refusal
            if not is_started:
                is_started = True
                if message["type"] == "http.response.start" and _is_serves_own(scope, message):
                    refusal = message
                    return
            if refusal is None:
                await send(message)

        try:
            await self._app(scope, receive, send_shaped)
        except Exception:
            if is_started:
                raise
            logger.exception("Serve failed on a request")
        if refusal is not None:
            await _shaped(refusal)(scope, receive, send)
        elif not is_started:
            # The ingress answers every exception, so that it must have ended itself.
            error = ApiError(503, _MESSAGES[503], SERVER_ERROR, None, "unavailable", _WAIT_S)
            await error_response(error)(scope, receive, send)


def clean(headers: Headers) -> Headers:
    """The headers without those that Serve would stumble over or take as orders; an illegal request
    id gives way to a new one of Serve's."""
    kept: Headers = []
    has_id = False
    for name, value in headers:
        if name == _REQUEST_ID:
            if has_id or _LEGAL_ID.fullmatch(value) is None:
                continue
            has_id = True
        elif name in _DROPPED or (name in _DECODED and not _is_utf8(value)):
            continue
        kept.append((name, value))
    return kept


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_serves_own(scope: Scope, message: Message) -> bool:
    """The ingress marks every error, so that an unmarked one is Serve's."""
    return (
        message["status"] >= 400
        and not scope["path"].startswith(_SERVES_OWN_PATHS)
        and all(name.lower() != SHOULD_RETRY.encode() for name, _ in message["headers"])
    )


def _shaped(refusal: Message) -> ASGIApp:
    status = refusal["status"]
    headers = {bytes(name).lower(): bytes(value) for name, value in refusal["headers"]}
    given = headers.get(b"retry-after", b"")
    wait_s = int(given) if given.isdigit() else (_WAIT_S if status in (429, 503) else None)
    kind = (
        "rate_limit_error" if status == 429 else SERVER_ERROR if status >= 500 else INVALID_REQUEST
    )
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    message = _MESSAGES.get(status, "The request cannot be answered.")
    code = {429: "overloaded", 503: "unavailable", 500: "internal"}.get(status, code)
    response = error_response(ApiError(status, message, kind, None, code, wait_s))
    if (request_id := headers.get(_REQUEST_ID)) is not None:
        response.headers["x-request-id"] = request_id.decode()
    return response
