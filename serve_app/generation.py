"""One submit call as an ingress holds it: the unary call to the engine replica and the tokens that
come back beside it on the side stream.

The call says whether the engine took the request and still lives, the stream carries the tokens.
`close` ends both wherever they stand. Ignorant of HTTP and text.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from engine.admission import EngineLimits
from engine.errors import EngineDeadError
from engine.types import EngineLoad, Request, TokenOutput
from registry.entities import AdapterVersion
from serve_app.errors import OverloadedError, ServiceUnavailableError
from serve_app.ray_errors import root_cause
from serve_app.routing.asks import make_ask
from serve_app.stream import StreamError
from serve_app.stream_server import StreamServer
from serve_app.topology import SubmitCall

# The call returns when all tokens are written to the socket; they may still be on their way.
_LATE_TOKENS_S = 10.0


class Generation:
    """Use as a context manager: leaving it aborts in the engine whatever has not ended.

    All prompts of one HTTP request travel in one call: Serve's routers tell calls made inside one
    HTTP request apart by nothing, some of them would wait for ever.
    """

    def __init__(
        self,
        server: StreamServer,
        handle: DeploymentHandle[object],
        requests: tuple[Request, ...],
        adapter: AdapterVersion | None,
        limits: EngineLimits,
        session: str | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._open_choices = {
            (request.request_id, choice)
            for request in requests
            for choice in range(request.params.n)
        }
        self._stream = server.open(request.request_id for request in requests)
        ask = make_ask(requests, adapter, limits, session)
        call = SubmitCall(requests, adapter, server.address, ask)
        response = handle.submit.remote(call)
        assert isinstance(response, DeploymentResponse)
        self._response: DeploymentResponse[object] = response
        self._watch = self._loop.create_task(self._watch_call())
        self._late: asyncio.TimerHandle | None = None

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def engine_load(self) -> EngineLoad | None:
        """Of the engine that answers, as of its last step; None before the first token."""
        return self._stream.engine_load

    @property
    def is_done(self) -> bool:
        return not self._open_choices

    async def read(self) -> list[TokenOutput]:
        """Everything that arrived since the last read, at least one output.

        Raises what ended the call: OverloadedError, ServiceUnavailableError, an EngineError or a
        RegistryError.
        """
        outputs = await self._stream.read()
        for output in outputs:
            if output.finish_reason is not None:
                self._open_choices.discard((output.request_id, output.choice))
        return outputs

    def end_choice(self, request_id: str, choice: int) -> None:
        """The reader needs no more of this choice (a stop string): the engine drops it."""
        if (request_id, choice) in self._open_choices:
            self._open_choices.discard((request_id, choice))
            self._stream.abort(request_id, choice)

    def fail(self, error: Exception) -> None:
        """The reader gets this error after what already arrived."""
        self._stream.fail(error)

    def close(self) -> None:
        if self._open_choices:
            # Both ways: the frame is faster, the cancellation also reaches a request that waits
            # for a replica or for its adapter.
            for request_id in {request_id for request_id, _ in self._open_choices}:
                self._stream.abort(request_id)
            self._open_choices.clear()
            if not self._watch.done():
                # A call that failed this very moment raises its failure here.
                with suppress(RayError, RayServeException):
                    self._response.cancel()  # type: ignore[no-untyped-call]
        self._watch.cancel()
        if self._late is not None:
            self._late.cancel()
        self._stream.close()

    async def _watch_call(self) -> None:
        try:
            await self._response
        except Exception as error:
            self._stream.fail(_in_our_words(error))
        else:
            late = EngineDeadError("the engine's last tokens did not arrive")
            self._late = self._loop.call_later(_LATE_TOKENS_S, self._stream.fail, late)


def _in_our_words(error: Exception) -> BaseException:
    """Ray's and the stream's failures as the domain's; the others as they were raised."""
    cause = root_cause(error)
    if isinstance(cause, BackPressureError):
        return OverloadedError("Too many requests wait for this model.")
    if isinstance(cause, RayActorError | StreamError | RequestCancelledError):
        return EngineDeadError("the engine replica of this request is gone")
    if isinstance(cause, RayServeException):  # its application was removed a moment ago
        return ServiceUnavailableError("This model is not served at the moment.")
    return cause
