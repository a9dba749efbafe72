"""/v1/chat/completions and /v1/completions: a body in, an answer out, streamed or whole.

`_complete` parses the body, resolves the model (whose base may have to be woken), tokenizes, waits
for an engine with capacity, submits and reads the side stream into a `ResponseBuilder`. It awaits
the first token before the response begins, so that every refusal has a status. A client that
disconnects ends its requests in the engine.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from functools import partial
from importlib.metadata import version

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from engine.types import EngineLoad
from registry.catalog import Resolution
from serve_app.admission.queued_request import QueuedRequest
from serve_app.api.explain import explain_headers, is_wanted
from serve_app.api.state import IngressState, state_of
from serve_app.canary.split import sticky_key
from serve_app.disconnects import RequestScope
from serve_app.dispatch.base_handle import BaseHandle, Route
from serve_app.dispatch.completion import Completion, OnFirstToken, PreparedRequest
from serve_app.errors import ApiError
from serve_app.http.asgi import SseResponse, error_response, read_body
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import Prompt, engine_requests, read_prompts
from serve_app.openai.fields import MAX_SESSION_CHARS
from serve_app.openai.json_body import parse_body
from serve_app.openai.responses import ResponseHead
from serve_app.routing.request import make_routing_request
from serve_app.text.template_guard import TemplateBudgetError

router = APIRouter()
PATHS = ("/v1/chat/completions", "/v1/completions")
Body = ChatRequest | CompletionRequest

# Shorter bodies need 20 ms at most, and mostly less than the hand-over to a worker (0.5 ms).
INLINE_BODY_BYTES = 16 * 1024
_SESSION_HEADER = "x-session-id"
_VERSION = version("loraplex")


@router.post(PATHS[0])
async def chat_completions(request: HttpRequest) -> Response:
    return await _complete(request, ChatRequest)


@router.post(PATHS[1])
async def completions(request: HttpRequest) -> Response:
    return await _complete(request, CompletionRequest)


async def _complete(
    http: HttpRequest, kind: type[ChatRequest] | type[CompletionRequest]
) -> Response:
    arrival_s = time.time()
    state = state_of(http)
    tenant = state.queues.tenant(http.headers.get(state.queues.tenant_header))
    body, raw = await _read(http, state, kind)
    session = session_key(http, body)
    headers: dict[str, str] = {}
    try:
        with RequestScope() as scope:
            route, visit = await state.cold_starts.admit(body.model, http.receive, session)
            scope.callback(visit.leave)
            headers = route.headers
            queue = state.queues.of(route.handle)
            account, priority = state.queues.tenants.account(tenant, body.priority or 0)
            adapter, limits = route.resolution.adapter, route.handle.description.limits
            queue.check(
                make_routing_request((), adapter, limits, tenant=account, priority=priority)
            )
            prompts = await _prompts(state, body, raw, route.handle)
            del raw  # a thousand requests may wait for an engine
            prepared = prepare(
                state,
                route.handle,
                route.resolution,
                body,
                prompts,
                tenant=tenant,
                session=session,
                arrival_s=arrival_s,
            )
            max_tokens = sum(one.params.max_tokens * one.params.n for one in prepared.requests)
            queued = await queue.add_request(prepared.routing, max_tokens, http.receive)
            scope.callback(queued.close)
            completion = _make_completion(state, route, prepared, queued)
            scope.callback(completion.close)
            scope.watch_client(http.receive, completion.client_left)
            content = await (completion.read() if body.stream else completion.whole())
            if is_wanted(http):
                times = arrival_s, queued.waited_s, completion.first_token_s
                headers |= explain_headers(http, prepared, *times)
            if body.stream:  # which releases everything at its own end
                close = scope.pop_all().close
                response: Response = SseResponse(content, completion.rest(), close)
            else:
                response = Response(content, media_type="application/json")
    except Exception as error:
        response = error_response(error)
    response.headers.update(headers)
    return response


async def _read(
    http: HttpRequest, state: IngressState, kind: type[ChatRequest] | type[CompletionRequest]
) -> tuple[Body, bytes]:
    """Returns the body, without its texts if it is long, and its bytes."""
    raw = await read_body(http, state.args.max_body_bytes)
    if len(raw) <= INLINE_BODY_BYTES:
        return parse_body(kind, raw), raw
    return await state.texts.parse(kind, raw), raw


async def _prompts(
    state: IngressState, body: Body, raw: bytes, handle: BaseHandle
) -> tuple[Prompt, ...]:
    """Tokenizes the prompts; a worker does so for a long body, or a template that needs long."""
    limits, files = handle.description.limits, handle.description.files
    if len(raw) <= INLINE_BODY_BYTES:
        try:
            return read_prompts(body, handle.text, limits)
        except TemplateBudgetError:
            pass
    return await state.texts.prompts(type(body), raw, handle.base.digest, files, limits)


def prepare(
    state: IngressState,
    handle: BaseHandle,
    resolution: Resolution,
    body: Body,
    prompts: tuple[Prompt, ...],
    *,
    tenant: str,
    session: str | None,
    arrival_s: float,
) -> PreparedRequest:
    """Returns the request as it goes to the engines of its base. `tenant`, `session`: of its
    client; `arrival_s`: time.time()."""
    adapter, limits = resolution.adapter, handle.description.limits
    requests = engine_requests(
        body,
        prompts,
        adapter,
        limits,
        arrival_s,
        defaults=handle.defaults,
        cache_salt=state.gateway.cache_salt(tenant, body.cache_salt),
    )
    account, priority = state.queues.tenants.account(tenant, body.priority or 0)
    return PreparedRequest(
        state.gateway.call_parameters(handle),
        handle.text,
        body,
        _head(body, resolution),
        prompts,
        requests,
        adapter,
        make_routing_request(requests, adapter, limits, session, tenant=account, priority=priority),
    )


def _make_completion(
    state: IngressState, route: Route, prepared: PreparedRequest, queued: QueuedRequest
) -> Completion:
    """Raises RequestQuarantinedError."""
    handle, gateway = route.handle, state.gateway
    builder = prepared.response_builder()
    generation = prepared.generation(gateway.migrations)
    on_first_token: OnFirstToken | None = None
    if (shadow := route.shadow) is not None:

        def on_first_token(load: EngineLoad | None) -> None:
            # A copy never waits in the queue: while other requests do, none is made.
            is_queueing = state.queues.of(handle).num_waiting > 0
            state.shadows.offer(prepared, shadow, None if is_queueing else load)

    render = partial(state.texts.logprobs, base=handle.base.digest, files=handle.description.files)
    arm_request = None if route.arm is None else gateway.arms.begin(route.arm)
    return Completion(generation, builder, arm_request, on_first_token, queued, render)


def session_key(http: HttpRequest, body: Body) -> str | None:
    """Returns the key by which requests stick to an arm and a replica: that of a person if the
    request has it, otherwise that of a conversation, otherwise a key that clients may share."""
    session = http.headers.get(_SESSION_HEADER)
    if session is not None and len(session) > MAX_SESSION_CHARS:
        raise ApiError(
            400,
            f"{_SESSION_HEADER}: at most {MAX_SESSION_CHARS} characters, got {len(session)}.",
            param=_SESSION_HEADER,
            code="invalid_value",
        )
    return sticky_key(body.user, body.safety_identifier, session, body.prompt_cache_key)


def _head(body: Body, resolution: Resolution) -> ResponseHead:
    is_chat = isinstance(body, ChatRequest)
    adapter = resolution.adapter
    parts = (_VERSION, resolution.base.digest, "" if adapter is None else adapter.digest)
    fingerprint = hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]
    return ResponseHead(
        "chat" if is_chat else "completion",
        ("chatcmpl-" if is_chat else "cmpl-") + (body.request_id or uuid.uuid4().hex),
        body.model,
        int(time.time()),
        f"fp_{fingerprint}",
    )
