"""A submit call: the unary call to an engine replica, and its tokens from the side stream.

The call reports whether the engine accepted the requests and is still alive; the stream carries the
tokens. `close` ends both at any time. A Generation makes one attempt after another. Ignorant of
HTTP and text, and of the reaction to a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress
from typing import cast

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentResponse

from engine.errors import EngineDeadError
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.errors import AdapterUnsupportedError, OverloadedError, ServiceUnavailableError
from serve_app.messages import SubmitCall
from serve_app.ray_calls import call_apart, root_cause
from serve_app.stream.server import StreamServer
from serve_app.stream.wire import StreamError
from serve_app.tasks import spawn

# The call returns when all tokens were written to the socket; they may still be in transit.
_LATE_TOKENS_S = 10.0
# The call may return after all tokens came. If cancelled, Serve would count it as a failure.
_RETURN_S = 1.0


class CallCancelledError(EngineDeadError):
    """Serve cancelled the call, because the replica was stopped."""


class UnconnectedError(EngineDeadError):
    """The engine is alive and reports that it has no connection to this ingress."""


class Attempt:
    """A call with all prompts of an HTTP request, and the `stream` of its tokens.

    Reading the stream raises the failure of the call: OverloadedError, ServiceUnavailableError,
    AdapterUnsupportedError, an EngineError or a RegistryError. There is a single call for all
    prompts because Serve's routers cannot distinguish calls made inside the same HTTP request, so
    that some of several calls would wait for ever.
    """

    def __init__(
        self, server: StreamServer, base: BaseHandle, call: SubmitCall, *, is_first: bool = True
    ) -> None:
        """`is_first`: False if the call continues the work of another engine."""
        self.is_first = is_first
        self.is_movable = base.migration.limit > 0
        self.app_name = base.app_name
        self.call_id = call.routing.call_id
        self.num_sequences = call.routing.num_sequences
        self.max_num_seqs = base.description.limits.max_num_seqs  # of an engine of the base
        self.began_s = time.monotonic()
        self._is_closed = False
        self.stream = server.open(request.request_id for request in call.requests)
        try:
            # The generation alone decides when the call ends: a cancellation that came before the
            # report of a client that left would look like the loss of the engine.
            response = call_apart(base.handle.submit.remote, call)
        except BaseException:
            self.stream.close()
            raise
        self._response = cast("DeploymentResponse[object]", response)
        self._late: asyncio.TimerHandle | None = None
        self._watch = spawn(self._watch_call(), "watch-call")

    def close(self, open_requests: Collection[str]) -> None:
        """Ends the attempt. `open_requests`: ids of the requests to abort in the engine."""
        if self._is_closed:
            return
        self._is_closed = True
        # Both ways: the frame is faster, the cancellation also reaches a request that waits for a
        # replica or for its adapter.
        for request_id in open_requests:
            self.stream.abort(request_id)
        if open_requests and not self._watch.done():
            # A call that failed at this very moment raises its failure here.
            with suppress(RayError, RayServeException):
                self._response.cancel()  # type: ignore[no-untyped-call]
        if open_requests:
            self._watch.cancel()
        elif not self._watch.done():
            timer = asyncio.get_running_loop().call_later(_RETURN_S, self._watch.cancel)
            self._watch.add_done_callback(lambda _: timer.cancel())
        if self._late is not None:
            self._late.cancel()
        self.stream.close()

    async def _watch_call(self) -> None:
        try:
            refusal = await self._response
        except asyncio.CancelledError:
            # With Ray 2.60 the far end's cancellation arrives as that of the awaiting task.
            if not self._is_closed:
                self.stream.fail(CallCancelledError("the call to the engine was cancelled there"))
            raise
        except Exception as error:
            self.stream.fail(_domain_error(error))
            return
        if isinstance(refusal, AdapterUnsupportedError):
            self.stream.fail(refusal)
        elif not self._is_closed:
            late = EngineDeadError("the engine's last tokens did not arrive")
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(_LATE_TOKENS_S, self.stream.fail, late)


def _domain_error(error: Exception) -> BaseException:
    """Maps failures of Ray and of the stream to this project's errors; returns others unchanged."""
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
