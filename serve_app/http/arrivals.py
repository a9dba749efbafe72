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
from serve_app.errors import ApiError, ClientGoneError

MIN_BYTES_PER_S = 16 * 1024
# Not charged to the byte budget, which is for large bodies; small bodies are bounded in number.
FREE_BYTES = 64 * 1024
MAX_HEADERS = 100

Headers = list[tuple[bytes, bytes]]


class _Arrival:
    """A body being received, and its share of the byte budget."""

    __slots__ = ("charge", "is_dropped", "timeout")

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.timeout = timeout
        self.charge = 0
        self.is_dropped = False


class Arrivals:
    """The request bodies that this process is receiving."""

    def __init__(self, args: IngressArgs) -> None:
        self._args = args
        self._arriving: dict[_Arrival, None] = {}  # the oldest first
        self._num_bytes = 0

    @property
    def num_arriving(self) -> int:
        return len(self._arriving)

    @property
    def num_bytes(self) -> int:
        """The bytes charged to the budget, including complete bodies that have not been read."""
        return self._num_bytes

    async def receive_body(self, scope: Scope, receive: Receive) -> Receive:
        """Waits for the whole body and returns a `receive` that begins with it, in one message.

        The body stays in the budget until that `receive` is called again, which an application does
        after it has read the body, or until `release_body` is called. Raises ApiError with 408 (too
        slow), 413 (too long) or 429 (too many), and ClientGoneError.
        """
        declared = _declared_bytes(scope)
        if declared == 0:
            return receive
        if declared is not None and declared > self._args.max_body_bytes:
            raise self._too_long()
        return await self._receive_all(receive)

    def release_body(self, receive: Receive) -> None:
        """Releases the body behind the result of `receive_body`; call it after the response."""
        if isinstance(receive, _Body):
            receive.release()

    async def _receive_all(self, receive: Receive) -> Receive:
        loop = asyncio.get_running_loop()
        start_s, arrival = loop.time(), None
        body = bytearray()
        try:
            async with asyncio.timeout(self._args.body_timeout_s) as timeout:
                arrival = self._add(timeout)
                while True:
                    message = await receive()
                    if arrival.is_dropped:
                        raise _too_many()
                    if message["type"] != "http.request":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    is_whole = not message.get("more_body", False)
                    self._check_size(len(body) + len(part))
                    if is_whole and not body and len(part) <= FREE_BYTES:
                        return _Replay(message, receive)  # almost every request
                    body += part
                    self._charge(arrival, max(0, len(body) - FREE_BYTES))
                    if is_whole:
                        charge, arrival.charge = arrival.charge, 0
                        return _Body(self, bytes(body), charge, receive)
                    timeout.reschedule(
                        start_s + self._args.body_timeout_s + len(body) / MIN_BYTES_PER_S
                    )
        except TimeoutError:
            if arrival is not None and arrival.is_dropped:
                raise _too_many() from None
            raise ApiError(
                408, "The request body did not arrive in time.", code="body_timeout"
            ) from None
        finally:
            if arrival is not None:
                self._arriving.pop(arrival, None)
                self.release(arrival.charge)

    def _add(self, timeout: asyncio.Timeout) -> _Arrival:
        if len(self._arriving) >= self._args.max_arriving_requests:
            self._drop(next(iter(self._arriving)))
        arrival = _Arrival(timeout)
        self._arriving[arrival] = None
        return arrival

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._args.max_body_bytes:
            raise self._too_long()

    def _charge(self, arrival: _Arrival, charge: int) -> None:
        self._num_bytes += charge - arrival.charge
        arrival.charge = charge
        while charge and self._num_bytes > self._args.max_arriving_bytes:
            victim = next(
                (other for other in self._arriving if other.charge and other is not arrival), None
            )
            if victim is None:  # all other bodies are complete and being read
                raise _too_many()
            self._drop(victim)

    def _drop(self, arrival: _Arrival) -> None:
        del self._arriving[arrival]
        arrival.is_dropped = True
        self.release(arrival.charge)
        arrival.charge = 0
        if not arrival.timeout.expired():
            arrival.timeout.reschedule(asyncio.get_running_loop().time())

    def release(self, charge: int) -> None:
        self._num_bytes -= charge

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"The body is longer than the limit of {self._args.max_body_bytes} bytes.",
            code="body_too_large",
        )


class _Replay:
    """A `receive` that begins with a message that has been received already."""

    __slots__ = ("_message", "_receive")

    def __init__(self, message: Message, receive: Receive) -> None:
        self._message: Message | None = message
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._message = self._message, None
        return await self._receive() if message is None else message


class _Body:
    """A `receive` that begins with a long body, which is charged to the budget until released."""

    __slots__ = ("_arrivals", "_body", "_charge", "_receive")

    def __init__(self, arrivals: Arrivals, body: bytes, charge: int, receive: Receive) -> None:
        self._arrivals = arrivals
        self._body: bytes | None = body
        self._charge = charge
        self._receive = receive

    async def __call__(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        self.release()
        return await self._receive()

    def release(self) -> None:
        charge, self._charge, self._body = self._charge, 0, None
        self._arrivals.release(charge)


def check_header_size(headers: Headers, max_bytes: int) -> None:
    """Raises ApiError with 431 for headers that are too long or too many."""
    if len(headers) > MAX_HEADERS:
        raise ApiError(
            431, f"The request has more than {MAX_HEADERS} headers.", code="headers_too_large"
        )
    # Plus 4 for the separators of each line.
    if sum(len(name) + len(value) + 4 for name, value in headers) > max_bytes:
        raise ApiError(
            431,
            f"The headers are longer than the limit of {max_bytes} bytes.",
            code="headers_too_large",
        )


def _declared_bytes(scope: Scope) -> int | None:
    """Returns the body's length, 0 if there is no body, None if it arrives in chunks."""
    declared: int | None = 0
    for name, value in scope["headers"]:
        if name == b"content-length":
            declared = int(value) if value.isdigit() and len(value) < 20 else None
        elif name == b"transfer-encoding":
            return None
    return declared


def _too_many() -> ApiError:
    return ApiError(
        429,
        "Too many request bodies are arriving at once.",
        "rate_limit_error",
        code="overloaded",
        retry_after_s=1,
    )
