"""Request bodies on their way in: a deadline for each, and bounds on all of them together.

A body has a few seconds to arrive and one more for every MIN_BYTES_PER_S bytes that came. When too
many bodies arrive at once, or too many bytes of them, the oldest is given up and not the newest:
clients that never finish their bodies cannot lock out those that send theirs in one go. Unaware of
routes and of the content of bodies.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope

from serve_app.config import IngressArgs
from serve_app.errors import ApiError, ClientGoneError

MIN_BYTES_PER_S = 16 * 1024
# Of each body, outside the byte budget: it is for large bodies, small ones are bounded in number.
FREE_BYTES = 64 * 1024
MAX_HEADERS = 100

Headers = list[tuple[bytes, bytes]]


class _Arrival:
    """One body on its way in, and its share of the byte budget."""

    __slots__ = ("charge", "is_given_up", "timeout")

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.timeout = timeout
        self.charge = 0
        self.is_given_up = False


class Arrivals:
    """The bodies on their way into one process."""

    def __init__(self, args: IngressArgs) -> None:
        self._args = args
        self._arriving: dict[_Arrival, None] = {}  # the oldest first
        self._num_bytes = 0

    @property
    def num_arriving(self) -> int:
        return len(self._arriving)

    @property
    def num_bytes(self) -> int:
        """Charged to the budget, bodies included that are whole and not yet read."""
        return self._num_bytes

    async def whole(self, scope: Scope, receive: Receive) -> Receive:
        """Returns when the body is whole: a `receive` that begins with it, in one message.

        The body stays in the budget until that is called once more, which an application does when
        it is through with the body, or until `done` is. Raises ApiError with 408 (too slow), 413
        (too long) or 429 (too many), and ClientGoneError.
        """
        declared = _declared_bytes(scope)
        if declared == 0:
            return receive
        if declared is not None and declared > self._args.max_body_bytes:
            raise self._too_long()
        return await self._receive_all(receive)

    def done(self, receive: Receive) -> None:
        """The request that `whole` returned this for has been answered."""
        if isinstance(receive, _Body):
            receive.release()

    async def _receive_all(self, receive: Receive) -> Receive:
        loop = asyncio.get_running_loop()
        start_s, arrival = loop.time(), None
        body = bytearray()
        try:
            async with asyncio.timeout(self._args.body_timeout_s) as timeout:
                arrival = self._enter(timeout)
                while True:
                    message = await receive()
                    if arrival.is_given_up:
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
            if arrival is not None and arrival.is_given_up:
                raise _too_many() from None
            raise ApiError(
                408, "The body of the request did not arrive in time.", code="body_timeout"
            ) from None
        finally:
            if arrival is not None:
                self._arriving.pop(arrival, None)
                self.release(arrival.charge)

    def _enter(self, timeout: asyncio.Timeout) -> _Arrival:
        if len(self._arriving) >= self._args.max_arriving_requests:
            self._give_up(next(iter(self._arriving)))
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
                (one for one in self._arriving if one.charge and one is not arrival), None
            )
            if victim is None:  # all others are whole: they are being read
                raise _too_many()
            self._give_up(victim)

    def _give_up(self, arrival: _Arrival) -> None:
        del self._arriving[arrival]
        arrival.is_given_up = True
        self.release(arrival.charge)
        arrival.charge = 0
        if not arrival.timeout.expired():
            arrival.timeout.reschedule(asyncio.get_running_loop().time())

    def release(self, charge: int) -> None:
        self._num_bytes -= charge

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"The body is longer than {self._args.max_body_bytes} bytes.",
            code="body_too_large",
        )


class _Replay:
    """A `receive` that begins with a message that came already."""

    __slots__ = ("_message", "_receive")

    def __init__(self, message: Message, receive: Receive) -> None:
        self._message: Message | None = message
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._message = self._message, None
        return await self._receive() if message is None else message


class _Body:
    """A `receive` that begins with a long body, which is in the budget while it is needed."""

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
    # The separators of each line count too.
    if sum(len(name) + len(value) + 4 for name, value in headers) > max_bytes:
        raise ApiError(
            431, f"The headers are longer than {max_bytes} bytes.", code="headers_too_large"
        )


def _declared_bytes(scope: Scope) -> int | None:
    """None: not said, the body comes in chunks; 0: there is none."""
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
        "Too many request bodies arrive at once.",
        "rate_limit_error",
        code="overloaded",
        retry_after_s=1,
    )
