"""HTTP below the routes: bodies with a limit, clients that disconnect, SSE in as few writes as
possible, and error responses. Independent of models and engines.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ApiError, ClientGoneError, shown, to_api_error
from serve_app.field_problems import problem_of

logger = logging.getLogger(__name__)

_JSON_TYPE = re.compile(r"\s*application/(?:[\w.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
REQUEST_ID = b"x-request-id"
ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_OVERLOADED = 529
CLIENT_CLOSED_REQUEST = 499  # as in nginx; for the metrics only, since the client is gone


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the raw body. Raises ApiError: 415 unless it is plain JSON, 413 if it is too long.

    A request with neither a content type nor an authorization is refused with 415, too: a web page
    of another origin can send such a request without a CORS preflight.
    """
    content_type = request.headers.get("content-type")
    if content_type is None:
        is_json = "authorization" in request.headers
    else:
        is_json = _JSON_TYPE.match(content_type) is not None
    if not is_json:
        raise ApiError(
            415,
            "The body must be JSON; send the header content-type: application/json.",
            code="unsupported_media_type",
        )
    encoding = ", ".join(request.headers.getlist("content-encoding"))
    if any(part.strip().lower() not in ("", "identity") for part in encoding.split(",")):
        raise ApiError(
            415,
            f"The body must be sent without an encoding; its content-encoding is "
            f"{shown(encoding)}.",
            code="unsupported_media_type",
        )
    try:  # the body is complete, see `Arrivals`; Starlette's `body` would keep it
        body = b"".join([part async for part in request.stream()])
    except ClientDisconnect:
        raise ClientGoneError from None
    if len(body) > max_bytes:
        raise too_long(max_bytes)
    return body


def too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"The body is longer than the limit of {max_bytes} bytes.", code="body_too_large"
    )


class SseResponse(Response):
    """A response of encoded server-sent events; each item of `chunks` is one write.

    The first chunk exists before the response, so a request that fails until then gets its status.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, chunks: AsyncIterator[bytes], close: Callable[[], None]
    ) -> None:
        """`close` is always called at the end, also after a failure."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first = first
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGoneError, OSError):
            return  # the client is gone
        finally:
            self._close()


def json_response(value: object, status: int = 200) -> Response:
    """Returns a JSON response of any value that msgspec encodes."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class HeadAsGet:
    """Middleware that answers HEAD as GET without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["route"] = as_get.get("route")
            elif message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app(as_get, receive, send_head)


def request_id_of(scope: Scope) -> str | None:
    """Returns the id in the headers of a request: the client's or the front's. None: it did not
    come through the front."""
    return Headers(scope=scope).get(REQUEST_ID.decode())


def error_response(error: BaseException, scope: Scope) -> Response:
    """Returns the response to an exception, in the shape of the API that the path belongs to."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    api_error = to_api_error(error)
    if api_error.status == 500:
        logger.error("request failed", exc_info=error)
    status = api_error.status
    if status == 503 and api_error.should_retry and scope["path"].startswith(ANTHROPIC_PATH):
        status = _ANTHROPIC_OVERLOADED
    return Response(error_body(api_error, scope), status, api_error.headers(), "application/json")


def error_body(error: ApiError, scope: Scope) -> bytes:
    """Returns the error in the shape of the API that the path belongs to."""
    if scope["path"].startswith(ANTHROPIC_PATH):
        return error.anthropic_body(request_id_of(scope))
    return error.body()


def install_error_handlers(app: FastAPI) -> None:
    """Makes every exception of a route a response in OpenAI's shape."""

    async def respond(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope)

    async def respond_to_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method, path, status = request.method, request.url.path[:128], error.status_code
        message, code = {
            404: (f"No such endpoint: {method} {path}.", "not_found"),
            405: (f"The method {method} is not allowed for {path}.", "method_not_allowed"),
        }.get(status, ("The request cannot be answered.", None))
        response = error_response(ApiError(status, message, code=code), request.scope)
        response.headers.update(error.headers or {})
        return response

    async def respond_to_bad_query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        message = f"{name}: {problem_of(first)}, got {shown(first.get('input'))}."
        refused = ApiError(400, message, param=name, code="invalid_value")
        return error_response(refused, request.scope)

    app.add_exception_handler(HTTPException, respond_to_http_error)
    app.add_exception_handler(RequestValidationError, respond_to_bad_query)
    app.add_exception_handler(Exception, respond)
