"""One submit call: the unary call to an engine replica, and the tokens that come back beside it on
the side stream.

The call says whether the engine took the requests and still lives, the stream carries the tokens.
`close` ends both wherever they stand. A Generation makes one attempt after another. Ignorant of
HTTP and text, and of what becomes of a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Generator
from contextlib import suppress
from contextvars import Context
from typing import Protocol, cast

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from engine.errors import EngineDeadError
from engine.types import EngineLoad, TokenOutput
from serve_app.errors import AdapterUnsupportedError, OverloadedError, ServiceUnavailableError
from serve_app.messages import SubmitCall
from serve_app.ray_calls import root_cause
from serve_app.stream.server import StreamServer
from serve_app.stream.wire import StreamError
from serve_app.tasks import spawn

# The call returns when all tokens are written to the socket; they may still be on their way.
_LATE_TOKENS_S = 10.0
# And it may return after all tokens came. Cancelled, it would count as a failure with Serve.
_RETURN_S = 1.0


class PendingCall(Protocol):
    """A DeploymentResponse, as it is used here."""

    def __await__(self) -> Generator[object, None, object]: ...
    def cancel(self) -> None: ...


class CallCancelledError(EngineDeadError):
    """By Serve: the client left, or the replica was stopped."""


class UnconnectedError(EngineDeadError):
    """The engine lives and says that it has no connection to this ingress."""


class Attempt:
    """All prompts of one HTTP request travel in one call: Serve's routers tell calls made inside
    one HTTP request apart by nothing, some of them would wait for ever."""

    def __init__(
        self,
        server: StreamServer,
        handle: DeploymentHandle[object],
        call: SubmitCall,
        *,
        is_first: bool = True,
        is_movable: bool = False,
    ) -> None:
        self.is_first = is_first  # else it goes on with what another engine began
        self.is_movable = is_movable  # may be told to go on elsewhere
        self.call_id = call.ask.call_id
        self.began_s = time.monotonic()
        self._is_closed = False
        self._stream = server.open(request.request_id for request in call.requests)
        try:
            # A later call in a context of its own: Serve would take it for the one before.
            response = (
                handle.submit.remote(call)
                if is_first
                else Context().run(handle.submit.remote, call)
            )
        except BaseException:
            self._stream.close()
            raise
        self._response = cast(PendingCall, response)
        self._late: asyncio.TimerHandle | None = None
        self._watch = spawn(self._watch_call(), "watch-call")

    @property
    def engine_id(self) -> str | None:
        """Known from the first frame on that tells of these requests."""
        return self._stream.engine_id

    @property
    def engine_load(self) -> EngineLoad | None:
        """Of the engine that answers, as of its last step; None before the first token."""
        return self._stream.engine_load

    @property
    def found_in(self) -> str:
        """See `Accepted`; empty until the engine took the requests."""
        return self._stream.found_in

    @property
    def has_output(self) -> bool:
        """A token came, whether read or not."""
        return self._stream.has_output

    async def read(self) -> list[TokenOutput]:
        """Everything that arrived since the last read, at least one output; then the failure:
        OverloadedError, ServiceUnavailableError, AdapterUnsupportedError, an EngineError or a
        RegistryError."""
        return await self._stream.read()

    def stop(self, request_id: str, choice: int, num_tokens: int) -> None:
        """As `TokenStream.stop`."""
        self._stream.stop(request_id, choice, num_tokens)

    def fail(self, error: BaseException) -> None:
        """The reader gets this error after what already arrived. The first one counts."""
        self._stream.fail(error)

    def close(self, open_requests: Collection[str]) -> None:
        """`open_requests`: those whose tokens nobody wants any more."""
        if self._is_closed:
            return
        self._is_closed = True
        # Both ways: the frame is faster, the cancellation also reaches a request that waits for a
        # replica or for its adapter.
        for request_id in open_requests:
            self._stream.abort(request_id)
        if open_requests and not self._watch.done():
            # A call that failed this very moment raises its failure here.
            with suppress(RayError, RayServeException):
                self._response.cancel()
        if open_requests:
            self._watch.cancel()
        elif not self._watch.done():
            timer = asyncio.get_running_loop().call_later(_RETURN_S, self._watch.cancel)
            self._watch.add_done_callback(lambda _: timer.cancel())
        if self._late is not None:
            self._late.cancel()
        self._stream.close()

    async def _watch_call(self) -> None:
        try:
            refusal = await self._response
        except asyncio.CancelledError:
            # With Ray 2.60 the far end's cancellation comes as one of the task that waits for it.
            if not self._is_closed:
                self._stream.fail(CallCancelledError("the call to the engine was cancelled there"))
            raise
        except Exception as error:
            self._stream.fail(_in_our_words(error))
            return
        if isinstance(refusal, AdapterUnsupportedError):
            self._stream.fail(refusal)
        elif not self._is_closed:
            late = EngineDeadError("the engine's last tokens did not arrive")
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(_LATE_TOKENS_S, self._stream.fail, late)


def _in_our_words(error: Exception) -> BaseException:
    """Ray's and the stream's failures as the domain's; the others as they were raised."""
    cause = root_cause(error)
    if isinstance(cause, BackPressureError):
        return OverloadedError("Too many requests wait for this model.")
    if isinstance(cause, RequestCancelledError):
        return CallCancelledError("the call to the engine replica was cancelled")
    if isinstance(cause, StreamError):
        return UnconnectedError("the engine of this request is not connected")
    if isinstance(cause, RayActorError):
        return EngineDeadError("the engine replica of this request is gone")
    if isinstance(cause, RayServeException):  # its application was removed a moment ago
        return ServiceUnavailableError("This model is not served at the moment.")
    return cause
