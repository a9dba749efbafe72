"""An answer in the making: the engine's outputs go in, stop strings go back to the engine.

Streamed, whole, or discarded (a shadow). Ignorant of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from engine.types import EngineLoad, Grammar, Request, TokenOutput
from registry.entities import WeightedVersion
from serve_app.canary.arm_stats import ArmRequest
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.generation import Generation
from serve_app.dispatch.migrations import Migrations
from serve_app.errors import ClientGoneError, to_api_error
from serve_app.messages import RoutingRequest
from serve_app.observe.record import RequestRecord
from serve_app.openai.answer import FeedResult, ResponseBuilder
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import Prompt
from serve_app.openai.logprobs import PartsRenderer, Render
from serve_app.openai.responses import ResponseHead, UsageInfo

OnFirstToken = Callable[[EngineLoad | None], None]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """An HTTP request as it goes to the engines of its base; a shadow gets a changed copy."""

    handle: BaseHandle
    body: ChatRequest | CompletionRequest
    head: ResponseHead
    prompts: tuple[Prompt, ...]
    requests: tuple[Request, ...]  # each with one prompt
    adapters: tuple[WeightedVersion, ...]
    routing: RoutingRequest
    is_copy: bool = False  # no client waits for the answer

    @property
    def grammar(self) -> Grammar | None:
        """The language of the answers, the same for all prompts."""
        return self.requests[0].params.grammar

    def with_grammar(self, grammar: Grammar | None) -> PreparedRequest:
        requests = (
            replace(one, params=replace(one.params, grammar=grammar)) for one in self.requests
        )
        return replace(self, requests=tuple(requests))

    def generation(self, migrations: Migrations) -> Generation:
        """Raises RequestQuarantinedError."""
        work = self.requests, self.adapters, self.routing
        return Generation(migrations, self.handle, *work, is_copy=self.is_copy)

    def response_builder(self) -> ResponseBuilder:
        return ResponseBuilder(self.body, self.prompts, self.handle.text, self.head)


class Completion:
    """Feeds a generation to a response builder; `close` ends both it and its arm's record."""

    def __init__(
        self,
        generation: Generation,
        builder: ResponseBuilder,
        arm_request: ArmRequest | None = None,
        on_first_token: OnFirstToken | None = None,
        on_tokens: Callable[[int], None] | None = None,
        render: Render | None = None,
        record: RequestRecord | None = None,
    ) -> None:
        """`arm_request`: the record of its arm; `on_tokens` is called with the number of
        output tokens so far; `render` renders many log-probabilities outside the event loop;
        `record`: filled in here, ended elsewhere."""
        self._generation = generation
        self._builder = builder
        self._prompt_of = {name: i for i, name in enumerate(generation.request_ids)}
        self._arm_request = arm_request
        self._on_first_token = on_first_token
        self._on_tokens = on_tokens
        self._render = render
        self._record = record or RequestRecord("", 0.0)  # of a copy: nothing reads it
        self._has_left = False
        self.has_failed = False  # by an error that the client receives
        self.has_begun = False  # a part of the stream was made for the client
        self.first_token_s = 0.0  # time.time() of the first token; 0 before it
        self.engine_s = 0.0  # its share of the time of engines

    async def read(self) -> bytes:
        """Returns the next write of the stream: all chunks that arrived together."""
        builder = self._builder
        while True:
            parts = await self._feed()
            self.has_begun |= builder.is_done or bool(parts)
            if builder.is_done:
                return b"".join((*parts, builder.stream_end()))
            if parts:
                return b"".join(parts)

    async def rest(self) -> AsyncIterator[bytes]:
        """Yields the stream after the first `read`. A failure becomes the last event."""
        try:
            while not self._builder.is_done:
                yield await self.read()
        except ClientGoneError:
            raise
        except Exception as error:
            self._note_failure(error)
            yield self._builder.failure(to_api_error(error))

    async def whole(self) -> bytes:
        await self.finish()
        try:
            return await self._renderer().run(self._builder.rendering())
        except Exception as error:
            self._note_failure(error)
            raise

    async def finish(self) -> None:
        while not self._builder.is_done:
            await self._feed()

    @property
    def has_computed(self) -> bool:
        """True if engines made a part of the answer, or were at its prompts when the client
        left."""
        return bool(self.first_token_s) or (self._has_left and self._generation.is_accepted)

    def usage(self) -> UsageInfo:
        return self._builder.usage()

    def client_left(self) -> None:
        self._has_left = True
        self._generation.fail(ClientGoneError())

    def close(self) -> None:
        if self._arm_request is not None:
            self._record_warmth(self._arm_request)
            self._arm_request.left(self._builder.num_tokens)  # unless it ended otherwise
        self._fill_in(self._record)
        self._generation.close()

    async def _feed(self) -> list[bytes]:
        """Returns the chunks of everything that arrived since the last call."""
        builder, arm_request = self._builder, self._arm_request
        try:
            outputs = await self._generation.read()
            if not self.first_token_s:
                self._note_first_token()
            self.engine_s += sum([output.engine_s for output in outputs])
            results = [self._feed_one(output) for output in outputs]
        except BaseException as error:
            self._has_left |= isinstance(error, asyncio.CancelledError)
            self._note_failure(error)
            if arm_request is not None:
                self._record_warmth(arm_request)
                arm_request.failed(error, builder.num_tokens)
            raise
        if self._on_tokens is not None:
            self._on_tokens(builder.num_tokens)
        if builder.is_done and arm_request is not None:
            arm_request.done(builder.has_text, builder.num_tokens)
        if any(result.rendering is not None for result in results):
            return await self._rendered(results)
        return [result.data for result in results if result.data]

    def _note_failure(self, error: BaseException) -> None:
        self.has_failed = not self._has_left
        self._record.error = self._record.error or error

    async def _rendered(self, results: Sequence[FeedResult]) -> list[bytes]:
        renderer = self._renderer()
        parts = [
            result.data if result.rendering is None else await renderer.run(result.rendering)
            for result in results
        ]
        return [part for part in parts if part]

    def _renderer(self) -> PartsRenderer:
        return PartsRenderer(self._builder.tokenizer, self._render)

    def _note_first_token(self) -> None:
        self.first_token_s = time.time()
        self._record.note_first_token(self.first_token_s)
        if self._arm_request is not None:
            self._record_warmth(self._arm_request)
            self._arm_request.first_token()
        if self._on_first_token is not None:
            self._on_first_token(self._generation.engine_load)

    def _fill_in(self, record: RequestRecord) -> None:
        builder = self._builder
        usage = builder.usage()
        record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        record.has_text, record.is_complete = builder.has_text, builder.is_done
        record.finish_reasons = builder.finish_reasons
        record.moves = self._generation.moves

    def _record_warmth(self, arm_request: ArmRequest) -> None:
        if self._generation.is_warm:
            arm_request.warm()

    def _feed_one(self, output: TokenOutput) -> FeedResult:
        result = self._builder.feed(self._prompt_of[output.request_id], output)
        if result.abort:
            self._generation.end_choice(output.request_id, output.choice)
        return result
