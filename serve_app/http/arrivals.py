"""Buffers request bodies: with a deadline for each, and bounds on all of them together.

A body has a few seconds to arrive and one more for every MIN_BYTES_PER_S bytes received. When too
many bodies or bytes arrive at once, the oldest body is dropped rather than the newest: clients that
never finish their bodies cannot lock out clients that send theirs in one go. This module is
independent of routes and of the content of bodies.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope

from serve_app.config import IngressArgs
from serve_app.errors import ApiError, ClientGoneError, OverloadedError
from serve_app.http.asgi import REQUEST_ID, too_long

MIN_BYTES_PER_S = 16 * 1024
# Not charged to the byte budget, which is for large bodies; small bodies are bounded in number.
FREE_BYTES = 64 * 1024
MAX_HEADERS = 100
_TOO_MANY = "Too many request bodies are arriving at once."


class Arrivals:
    """The request bodies that this process is receiving."""

    def __init__(self, args: IngressArgs) -> None:
        self._args = args
        # The share of the byte budget of each body, by its time-out; the oldest first. A body that
        # is dropped is removed here, and its time-out expires.
        self._arriving: dict[asyncio.Timeout, int] = {}
        self.num_bytes = 0  # charged, including complete bodies that have not been read

    def check_header(self, scope: Scope) -> None:
        """Raises ApiError with 431 for headers that are too long or too many, without the one of a
        request id, which the front adds where a client has none."""
        headers, max_bytes = [*scope["headers"]], self._args.max_header_bytes
        own = next((header for header in headers if header[0] == REQUEST_ID), None)
        if own is not None:
            headers.remove(own)
        words = ""
        if len(headers) > MAX_HEADERS:
            words = f"The request has more than {MAX_HEADERS} headers."
        # Plus 4 for the separators of each line.
        elif sum(len(name) + len(value) + 4 for name, value in headers) > max_bytes:
            words = f"The headers are longer than the limit of {max_bytes} bytes."
        if words:
            raise ApiError(431, words, code="headers_too_large")

    async def receive_body(self, scope: Scope, receive: Receive) -> Receive:
        """Waits for the whole body and returns a `receive` that begins with it, in one message.

        The body stays in the budget until that `receive` is called again, which an application does
        after it has read the body, or until `release_body` is called. Raises ApiError with 408 (too
        slow) or 413 (too long), OverloadedError and ClientGoneError.
        """
        declared = _declared_bytes(scope)
        if declared == 0:
            return receive
        if declared is not None and declared > self._args.max_body_bytes:
            raise too_long(self._args.max_body_bytes)
        return await self._receive_all(receive)

    def release_body(self, receive: Receive) -> None:
        """Releases the body behind the result of `receive_body`; call it after the response."""
        if isinstance(receive, _WholeBody):
            receive.release()

    async def _receive_all(self, receive: Receive) -> Receive:
        max_bytes, timeout_s = self._args.max_body_bytes, self._args.body_timeout_s
        start_s = asyncio.get_running_loop().time()
        body = bytearray()
        timeout = asyncio.timeout(timeout_s)
        try:
            async with timeout:
                self._add(timeout)
                while True:
                    message = await receive()
                    if timeout not in self._arriving:
                        raise OverloadedError(_TOO_MANY)
                    if message["type"] != "http.request":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    is_whole = not message.get("more_body", False)
                    if len(body) + len(part) > max_bytes:
                        raise too_long(max_bytes)
                    if is_whole and not body and len(part) <= FREE_BYTES:
                        return _WholeBody(self, message, 0, receive)  # almost every request
                    body += part
                    self._charge(timeout, max(0, len(body) - FREE_BYTES))
                    if is_whole:
                        message = {"type": "http.request", "body": bytes(body), "more_body": False}
                        return _WholeBody(self, message, self._arriving.pop(timeout), receive)
                    timeout.reschedule(start_s + timeout_s + len(body) / MIN_BYTES_PER_S)
        except TimeoutError:
            if timeout not in self._arriving:
                raise OverloadedError(_TOO_MANY) from None
            raise ApiError(
                408, "The request body did not arrive in time.", code="body_timeout"
            ) from None
        finally:
            self.num_bytes -= self._arriving.pop(timeout, 0)

    def _add(self, timeout: asyncio.Timeout) -> None:
        if len(self._arriving) >= self._args.max_arriving_requests:
            self._drop(next(iter(self._arriving)))
        self._arriving[timeout] = 0

    def _charge(self, timeout: asyncio.Timeout, charge: int) -> None:
        self.num_bytes += charge - self._arriving[timeout]
        self._arriving[timeout] = charge
        while charge and self.num_bytes > self._args.max_arriving_bytes:
            others = (one for one, its in self._arriving.items() if its and one is not timeout)
            victim = next(others, None)
            if victim is None:  # all other bodies are complete and being read
                raise OverloadedError(_TOO_MANY)
            self._drop(victim)

    def _drop(self, timeout: asyncio.Timeout) -> None:
        self.num_bytes -= self._arriving.pop(timeout)
        if not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time())


class _WholeBody:
    """A `receive` that begins with a whole body, which is charged to the budget until released."""

    __slots__ = ("_arrivals", "_charge", "_message", "_receive")

    def __init__(self, arrivals: Arrivals, message: Message, charge: int, receive: Receive) -> None:
        self._arrivals = arrivals
        self._message: Message | None = message
        self._charge = charge
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._message = self._message, None
        if message is not None:
            return message
        self.release()
        return await self._receive()

    def release(self) -> None:
        charge, self._charge, self._message = self._charge, 0, None
        self._arrivals.num_bytes -= charge


def _declared_bytes(scope: Scope) -> int | None:
    """Returns the body's length, 0 if there is no body, None if it arrives in chunks."""
    declared: int | None = 0
    for name, value in scope["headers"]:
        if name == b"content-length":
            declared = int(value) if value.isdigit() and len(value) < 20 else None
        elif name == b"transfer-encoding":
            return None
    return declared
