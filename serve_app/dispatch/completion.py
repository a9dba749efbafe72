"""An answer being made: the engine's outputs go in, stop strings are told to the engine.

Streamed, whole, or for nobody (a shadow). Ignorant of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence

from engine.types import EngineLoad, Request, TokenOutput
from serve_app.admission.queue import Ticket
from serve_app.canary.arm_stats import ArmRequest
from serve_app.dispatch.activity import Visit
from serve_app.dispatch.generation import Generation
from serve_app.errors import ClientGoneError, to_api_error
from serve_app.openai.answer import FeedResult, ResponseBuilder
from serve_app.openai.logprobs import PartsRenderer, Render
from serve_app.openai.responses import error_event

OnFirstToken = Callable[[EngineLoad | None], None]


class Completion:
    def __init__(
        self,
        generation: Generation,
        answer: ResponseBuilder,
        requests: tuple[Request, ...],
        watch: ArmRequest | None = None,
        on_first_token: OnFirstToken | None = None,
        visit: Visit | None = None,
        ticket: Ticket | None = None,
        render: Render | None = None,
    ) -> None:
        """`watch`: of the arm that this request belongs to; `visit`: keeps its base awake;
        `ticket`: charges its tenant; `render`: of many log-probabilities, outside the event loop.
        """
        self._generation = generation
        self._answer = answer
        self._prompt_of = {request.request_id: i for i, request in enumerate(requests)}
        self._watch = watch
        self._on_first_token = on_first_token
        self._visit = visit
        self._ticket = ticket
        self._render = render
        self._has_first_token = False
        self.first_token_s = 0.0  # time.time(); 0: not yet

    @property
    def call_id(self) -> str:
        """Of its submit call."""
        return next(iter(self._prompt_of))

    @property
    def waited_s(self) -> float:
        """In the fair queue."""
        return 0.0 if self._ticket is None else self._ticket.waited_s

    async def read(self) -> bytes:
        """The next bytes of the stream: all chunks that arrived together, as one write."""
        answer = self._answer
        while True:
            parts = await self._feed()
            if answer.is_done:
                return b"".join((*parts, answer.stream_end()))
            if parts:
                return b"".join(parts)

    async def rest(self) -> AsyncIterator[bytes]:
        """After the first `read`. A failure becomes the last event."""
        try:
            while not self._answer.is_done:
                yield await self.read()
        except ClientGoneError:
            raise
        except Exception as error:
            yield error_event(to_api_error(error))

    async def whole(self) -> bytes:
        await self.finish()
        return await self._renderer().run(self._answer.rendering())

    async def finish(self) -> None:
        while not self._answer.is_done:
            await self._feed()

    def leave(self) -> None:
        self._generation.fail(ClientGoneError())

    def close(self) -> None:
        if self._watch is not None:
            self._note_warm(self._watch)
            self._watch.left(self._answer.num_tokens)  # unless it ended otherwise
        self._generation.close()
        if self._ticket is not None:
            self._ticket.leave()
        if self._visit is not None:
            self._visit.leave()

    async def _feed(self) -> list[bytes]:
        """What arrived since the last time, as chunks."""
        answer = self._answer
        try:
            outputs = await self._generation.read()
            if not self._has_first_token:
                self._begin()
            feds = [self._feed_one(output) for output in outputs]
        except BaseException as error:
            if self._watch is not None:
                self._note_warm(self._watch)
                self._watch.failed(error, answer.num_tokens)
            raise
        if self._ticket is not None:
            self._ticket.generated(answer.num_tokens)
        if answer.is_done and self._watch is not None:
            self._watch.done(answer.has_text, answer.num_tokens)
        if any(fed.rendering is not None for fed in feds):
            return await self._rendered(feds)
        return [fed.data for fed in feds if fed.data]

    async def _rendered(self, feds: Sequence[FeedResult]) -> list[bytes]:
        renderer = self._renderer()
        parts = [
            fed.data if fed.rendering is None else await renderer.run(fed.rendering) for fed in feds
        ]
        return [part for part in parts if part]

    def _renderer(self) -> PartsRenderer:
        return PartsRenderer(self._answer.tokenizer, self._render)

    def _begin(self) -> None:
        self._has_first_token = True
        self.first_token_s = time.time()
        if self._watch is not None:
            self._note_warm(self._watch)
            self._watch.first_token()
        if self._on_first_token is not None:
            self._on_first_token(self._generation.engine_load)

    def _note_warm(self, watch: ArmRequest) -> None:
        if self._generation.is_warm:
            watch.warm()

    def _feed_one(self, output: TokenOutput) -> FeedResult:
        fed = self._answer.feed(self._prompt_of[output.request_id], output)
        if fed.abort:
            self._generation.end_choice(output.request_id, output.choice)
        return fed
