"""/v1/chat/completions and /v1/completions: one body in, one answer out, streamed or whole.

Parse, resolve the model (its base may have to be woken), tokenize, wait for an engine with room,
submit, read the side stream into a `ResponseBuilder`. The first token is awaited before the
response begins, so that every refusal has a status. A client that goes away ends its requests in
the engine.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from starlette.types import Receive

from engine.types import EngineLoad, Request
from registry.catalog import Resolution
from registry.entities import AdapterVersion
from serve_app.admission.queue import Ticket
from serve_app.admission.waiting_room import Applicant
from serve_app.api.explain import explain_headers, is_wanted
from serve_app.api.state import IngressState, state_of
from serve_app.canary.split import sticky_key
from serve_app.disconnects import call_when_gone
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.cold_start import Admission
from serve_app.dispatch.completion import Completion, OnFirstToken
from serve_app.dispatch.generation import Generation
from serve_app.dispatch.shadow import Submitted
from serve_app.errors import ApiError, ClientGoneError
from serve_app.http.asgi import SseResponse, error_response, read_body
from serve_app.messages import RoutingRequest
from serve_app.openai.answer import ResponseBuilder
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import Prompt, engine_requests, read_prompts
from serve_app.openai.fields import MAX_SESSION_CHARS
from serve_app.openai.json_body import parse_body
from serve_app.openai.responses import ResponseHead
from serve_app.routing.request import make_routing_request
from serve_app.tasks import spawn
from serve_app.text.template_guard import TemplateBudgetError

router = APIRouter()
PATHS = ("/v1/chat/completions", "/v1/completions")
Body = ChatRequest | CompletionRequest

# Up to here the work takes 20 ms at most, and mostly less than the hand-over to a worker (0.5 ms).
INLINE_BODY_BYTES = 16 * 1024
_SESSION_HEADER = "x-session-id"
_VERSION = version("loraplex")


@dataclass(slots=True)
class _Asked:
    """A request as it came."""

    body: Body  # of a long one without its texts
    raw: bytes  # until its prompts are read: a thousand requests may wait for an engine
    tenant: str
    session: str | None  # who asks, for stickiness
    arrival_s: float


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
    session = who_asks(http, body)
    try:
        admission = await state.cold_starts.admit(body.model, http.receive, session)
    except ClientGoneError as error:
        return error_response(error)
    try:
        asked = _Asked(body, raw, tenant, session, arrival_s)
        del raw
        completion = await _begin(state, asked, admission, http.receive)
        response = await _respond(http, bool(body.stream), completion)
    except ClientGoneError as error:  # while it waited for an engine
        admission.visit.leave()
        return error_response(error)
    except BaseException as error:
        admission.visit.leave()
        if not isinstance(error, Exception):
            raise
        response = error_response(error)
        response.headers.update(admission.route.headers)
        return response
    response.headers.update(admission.route.headers)
    if is_wanted(http):
        front = admission.route.front
        response.headers.update(explain_headers(http, front, completion, arrival_s))
    return response


async def _read(
    http: HttpRequest, state: IngressState, kind: type[ChatRequest] | type[CompletionRequest]
) -> tuple[Body, bytes]:
    """The body and its bytes."""
    raw = await read_body(http, state.args.max_body_bytes)
    if len(raw) <= INLINE_BODY_BYTES:
        return parse_body(kind, raw), raw
    return await state.texts.parse(kind, raw), raw


async def _prompts(state: IngressState, asked: _Asked, front: BaseHandle) -> tuple[Prompt, ...]:
    """The prompts; a worker reads a long body, and a chat whose template has much to do."""
    raw, asked.raw = asked.raw, b""
    limits, files = front.description.limits, front.description.files
    if len(raw) <= INLINE_BODY_BYTES:
        try:
            return read_prompts(asked.body, front.text, limits)
        except TemplateBudgetError:
            pass
    return await state.texts.prompts(type(asked.body), raw, front.base.digest, files, limits)


async def _begin(
    state: IngressState, asked: _Asked, admission: Admission, receive: Receive
) -> Completion:
    """Ends with a call to an engine that has room."""
    body, route = asked.body, admission.route
    front, adapter = route.front, route.resolution.adapter
    queue = state.queues.of(front)
    who = _applicant(state, asked, adapter)
    queue.check(who)
    limits = front.description.limits
    prompts = await _prompts(state, asked, front)
    salt = state.queues.cache_salt(asked.tenant, body.cache_salt)
    requests = engine_requests(
        body,
        prompts,
        adapter,
        limits,
        asked.arrival_s,
        defaults=front.defaults,
        cache_salt=salt,
    )
    ask = make_routing_request(requests, adapter, limits, asked.session)
    max_tokens = sum(request.params.max_tokens * request.params.n for request in requests)
    ticket = await queue.enter(who, ask, max_tokens, receive)
    try:
        return _call(state, body, admission, prompts, requests, ask, ticket)
    except BaseException:
        ticket.leave()
        raise


def _call(
    state: IngressState,
    body: Body,
    admission: Admission,
    prompts: tuple[Prompt, ...],
    requests: tuple[Request, ...],
    ask: RoutingRequest,
    ticket: Ticket,
) -> Completion:
    route, gateway = admission.route, state.gateway
    front, adapter = route.front, route.resolution.adapter
    head = _head(body, route.resolution)
    lane = gateway.lane(front)
    generation = Generation(gateway.migrations, lane, requests, adapter, ask)
    watch = None if route.arm is None else gateway.arms.watch(route.arm)
    answer = ResponseBuilder(body, prompts, front.text, head)
    on_first_token: OnFirstToken | None = None
    if (shadow := route.shadow) is not None:
        submitted = Submitted(front, lane, body, prompts, requests, head)

        def on_first_token(load: EngineLoad | None) -> None:
            # A copy never waits in the queue: where somebody else does, it is not made.
            is_queueing = state.queues.of(front).num_waiting > 0
            state.shadows.offer(submitted, shadow, None if is_queueing else load)

    render = partial(state.texts.logprobs, base=front.base.digest, files=front.description.files)
    return Completion(
        generation, answer, requests, watch, on_first_token, admission.visit, ticket, render
    )


async def _respond(http: HttpRequest, is_stream: bool, completion: Completion) -> Response:
    watch = spawn(call_when_gone(http.receive, completion.leave), "watch-client")

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
    except ClientGoneError as error:
        close()
        return error_response(error)
    except BaseException:  # CancelledError too: Serve's way to say that the client left
        close()
        raise
    return response


def _applicant(state: IngressState, asked: _Asked, adapter: AdapterVersion | None) -> Applicant:
    name, rank = ("", 0) if adapter is None else (adapter.name, adapter.rank)
    return state.queues.tenants.applicant(asked.tenant, name, rank, asked.body.priority or 0)


def who_asks(http: HttpRequest, body: Body) -> str | None:
    """A person first, then a conversation; last what may be shared by many."""
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
