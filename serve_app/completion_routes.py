"""/v1/chat/completions and /v1/completions: one body in, one answer out, streamed or whole.

Parse, resolve the model (its base may have to be woken), tokenize, submit, read the side stream
into an `Answer`. The first token is awaited before the response begins, so that every refusal has a
status. A client that goes away ends its requests in the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from engine.types import EngineLoad, Request
from registry.catalog import Resolution
from serve_app.answer import Answer
from serve_app.asgi import (
    ClientGoneError,
    SseResponse,
    call_when_gone,
    error_response,
    read_body,
)
from serve_app.cold_start import Admission
from serve_app.completion import Completion, OnFirstToken
from serve_app.gateway import Front
from serve_app.generation import Generation
from serve_app.params import Prompt, TextLimits, chat_prompt, completion_prompts, sampling_params
from serve_app.protocol import parse_body
from serve_app.protocol_chat import ChatRequest
from serve_app.protocol_completions import CompletionRequest
from serve_app.responses import ResponseHead
from serve_app.shadow import Submitted
from serve_app.state import IngressState, state_of
from serve_app.traffic import sticky_key

router = APIRouter()
T = TypeVar("T")
Body = ChatRequest | CompletionRequest

# Below these the work is shorter than the hand-over to a thread is worth (about 0.1 ms).
_INLINE_BODY_BYTES = 16 * 1024
_CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it, the metrics count it
_VERSION = version("loraplex")


@router.post("/v1/chat/completions")
async def chat_completions(request: HttpRequest) -> Response:
    return await _complete(request, ChatRequest)


@router.post("/v1/completions")
async def completions(request: HttpRequest) -> Response:
    return await _complete(request, CompletionRequest)


async def _complete(
    http: HttpRequest, kind: type[ChatRequest] | type[CompletionRequest]
) -> Response:
    arrival_s = time.time()
    state = state_of(http)
    raw = await read_body(http, state.args.max_body_bytes)
    is_small = len(raw) <= _INLINE_BODY_BYTES
    body = await _run(state, is_small, lambda: parse_body(kind, raw))
    session = _who_asks(http, body)
    try:
        admission = await state.cold_starts.admit(body.model, http.receive, session)
    except ClientGoneError:
        state.metrics.disconnected()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    try:
        completion = await _begin(state, body, admission, is_small, arrival_s, session)
        response = await _respond(http, bool(body.stream), completion)
    except BaseException as error:
        admission.visit.leave()
        if not isinstance(error, Exception):
            raise
        response = error_response(error)
    response.headers.update(admission.route.headers)
    return response


async def _begin(
    state: IngressState,
    body: Body,
    admission: Admission,
    is_small: bool,
    arrival_s: float,
    session: str | None,
) -> Completion:
    route, gateway = admission.route, state.gateway
    front, adapter = route.front, route.resolution.adapter
    limits = front.description.limits
    text_limits = TextLimits(limits.max_model_len, limits.vocab_size)
    prompts = await _run(state, is_small, lambda: _prompts(body, front, text_limits))
    requests = tuple(
        Request(
            uuid.uuid4().hex,
            prompt.token_ids,
            sampling_params(body, prompt, text_limits),
            None if adapter is None else adapter.digest,
            body.cache_salt or "",
            arrival_s,
        )
        for prompt in prompts
    )
    head = _head(body, route.resolution)
    watch = None if route.arm is None else gateway.arms.watch(route.arm)
    lane = gateway.lane(front)
    generation = Generation(gateway.migrations, lane, requests, adapter, session)
    answer = Answer(body, prompts, front.text, head)
    on_first_token: OnFirstToken | None = None
    if (shadow := route.shadow) is not None:
        submitted = Submitted(front, lane, body, prompts, requests, head)

        def on_first_token(load: EngineLoad | None) -> None:
            state.shadows.offer(submitted, shadow, load)

    return Completion(generation, answer, requests, watch, on_first_token, admission.visit)


async def _respond(http: HttpRequest, is_stream: bool, completion: Completion) -> Response:
    watch = asyncio.get_running_loop().create_task(call_when_gone(http.receive, completion.leave))

    def close() -> None:
        watch.cancel()
        completion.close()

    try:
        if is_stream:
            first = await completion.read()
            response: Response = SseResponse(first, completion.rest(), close)
        else:
            response = Response(await completion.whole(), media_type="application/json")
            close()
    except ClientGoneError:
        close()
        state_of(http).metrics.disconnected()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    except BaseException:  # CancelledError too: Serve's way to say that the client left
        close()
        raise
    return response


async def _run(state: IngressState, is_small: bool, work: Callable[[], T]) -> T:
    if is_small:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.tokenizer_pool, work)


def _who_asks(http: HttpRequest, body: Body) -> str | None:
    """A person first, then a conversation; last what may be shared by many."""
    session = http.headers.get("x-session-id")
    return sticky_key(body.user, body.safety_identifier, session, body.prompt_cache_key)


def _prompts(body: Body, front: Front, limits: TextLimits) -> tuple[Prompt, ...]:
    if isinstance(body, ChatRequest):
        return (chat_prompt(body, front.text, limits),)
    return completion_prompts(body, front.text, limits)


def _head(body: Body, resolution: Resolution) -> ResponseHead:
    is_chat = isinstance(body, ChatRequest)
    adapter = resolution.adapter
    parts = (_VERSION, resolution.base.digest, "" if adapter is None else adapter.digest)
    fingerprint = hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]
    return ResponseHead(
        "chat" if is_chat else "completion",
        ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex,
        body.model,
        int(time.time()),
        f"fp_{fingerprint}",
    )
