"""/v1/chat/completions and /v1/completions: a body in, an answer out, streamed or whole; and
/v1/responses and Anthropic's /v1/messages, chats in other shapes, which are served as chats.

`complete` parses the body, resolves the model (whose base may have to be woken), tokenizes, waits
for an engine with capacity, submits and reads the side stream into a `ResponseBuilder`. It awaits
the first token before the response begins, so that every refusal has a status. A client that
disconnects ends its requests in the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from engine.errors import InvalidRequestError
from engine.types import EngineLoad, Request, adapter_key
from registry.catalog import Resolution
from serve_app.admission.queue import AdmissionQueue
from serve_app.api import accounting
from serve_app.api.admin_auth import caller_of
from serve_app.api.explain import explain_headers
from serve_app.api.model_access import (
    check_body,
    check_model,
    check_route,
    find_route,
    name_adapters,
    name_digests,
)
from serve_app.api.state import IngressState, state_of
from serve_app.canary.split import sticky_key
from serve_app.dialects import messages, responses
from serve_app.dialects.messages import CountTokensRequest, MessagesRequest
from serve_app.dialects.responses import ResponsesRequest
from serve_app.disconnects import RequestScope
from serve_app.dispatch.base_handle import BaseHandle, Route
from serve_app.dispatch.completion import Completion, OnFirstToken, PreparedRequest
from serve_app.errors import ApiError, ClientGoneError, shown, to_api_error
from serve_app.http.asgi import (
    SseResponse,
    error_response,
    json_response,
    read_body,
    request_id_of,
)
from serve_app.messages import RoutingRequest
from serve_app.observe.record import RequestRecord
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.dialect import DialectRequest
from serve_app.openai.engine_params import (
    GenerationRequest,
    Prompt,
    engine_requests,
    read_prompts,
)
from serve_app.openai.fields import MAX_SESSION_CHARS
from serve_app.openai.responses import ResponseHead
from serve_app.routing.request import make_routing_request
from serve_app.tenancy.caller import Caller, KeyPolicy

logger = logging.getLogger(__name__)
router = APIRouter()
CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT_PATH, COMPLETIONS_PATH, responses.PATH, messages.PATH, messages.COUNT_PATH)

_SESSION_HEADER = "x-session-id"
# The second decides which tokens a grammar allows at a place.
_VERSION = f"{version('loraplex')} {version('llguidance')}"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A checked request of a client, before its prompts are read."""

    body: GenerationRequest
    tenant: str
    session: str | None  # see `session_key`
    arrival_s: float = 0.0  # time.time()
    max_tokens: int | None = None  # of each answer, by the client's key
    lowest_priority: int | None = None  # by the client's key
    request_id: str | None = None  # in the headers

    @property
    def priority(self) -> int:
        """The client's, otherwise 0, or the nearest priority to it that the key allows."""
        if self.body.priority is not None:
            return self.body.priority
        return max(0, self.lowest_priority or 0)


@router.post(CHAT_PATH)
async def chat_completions(request: HttpRequest) -> Response:
    return await complete(request, ChatRequest)


@router.post(COMPLETIONS_PATH)
async def completions(request: HttpRequest) -> Response:
    return await complete(request, CompletionRequest)


@router.post(responses.PATH)
async def create_response(request: HttpRequest) -> Response:
    return await complete(request, ResponsesRequest)


@router.post(messages.PATH)
async def create_message(request: HttpRequest) -> Response:
    return await complete(request, MessagesRequest)


@router.post(messages.COUNT_PATH)
async def count_tokens(request: HttpRequest) -> Response:
    """Returns the number of tokens in the prompt that /v1/messages makes of the same body."""
    state, caller = state_of(request), caller_of(request)
    body: CountTokensRequest | None = None
    try:
        accounting.check(state, caller)
        raw = await read_body(request, state.args.max_body_bytes)
        body = await state.texts.parse(CountTokensRequest, raw)
        handle = (await find_route(state, caller, body.full_model, request.receive)).handle
        prompts = await state.texts.run(read_prompts, body, raw, handle.text, handle.description)
        return json_response({"input_tokens": sum(len(one.token_ids) for one in prompts)})
    except Exception as error:
        return error_response(named(error, body), request.scope)


@router.get("/v1/responses/{response_id}", include_in_schema=False)
async def get_response(response_id: str) -> Response:
    """Answers 404: responses are not stored."""
    raise ApiError(
        404,
        f"The response {shown(response_id)} is not stored: this server answers with store: false.",
        param="response_id",
        code="not_found",
    )


async def complete(http: HttpRequest, kind: type[GenerationRequest]) -> Response:
    """Answers a request; `kind` is the class of its body, which may be a dialect's."""
    arrival_s = time.time()
    state = state_of(http)
    headers: dict[str, str] = {}
    response: Response
    body: GenerationRequest | None = None
    caller = caller_of(http)
    record = state.observer.begin(http.url.path, http.headers, arrival_s, caller)
    try:
        accounting.check(state, caller)
        tenant = state.queues.tenants.read(http.headers, caller)
        record.tenant = record.tenant or tenant
        raw = await read_body(http, state.args.max_body_bytes)
        body = await state.texts.parse(kind, raw)
        record.set_body(body.full_model, is_stream=bool(body.stream))
        check_model(state.gateway, caller, body.full_model)
        check_body(caller, body)
        session = session_key(http, body)
        with RequestScope() as scope:
            scope.push(lambda _kind, error, _traceback: state.observer.end(record, error))
            route, leave = await state.cold_starts.admit(body.full_model, http.receive, session)
            scope.callback(leave)
            caller = check_route(state, caller, body.full_model, route)
            check_body(caller, body)  # by the key's present policy
            policy = KeyPolicy() if caller is None else caller.policy
            client = ClientRequest(
                *(body, tenant, session, arrival_s, policy.max_tokens, policy.lowest_priority),
                request_id_of(http.scope),
            )
            headers = route.headers
            record.resolution, record.arm = route.resolution, route.arm_name
            _queue_of(state, route.handle).check(_routing_request(state, route, client, ()))
            prepared = await _read_and_prepare(state, route, client, raw)
            copied = await _prepare_copy(state, route, client, raw, prepared)
            del raw  # a thousand requests may wait for an engine
            completion = await _begin(state, http, scope, caller, route, prepared, copied, record)
            content = await (completion.read() if body.stream else completion.whole())
            times = arrival_s, record.queue_s, completion.first_token_s
            headers |= explain_headers(http, prepared, *times)
            if body.stream:  # the answer takes the scope over and releases it at its own end
                response = SseResponse(content, completion.rest(), scope.pop_all().close)
            else:
                response = Response(content, media_type="application/json")
    except asyncio.CancelledError as error:
        state.observer.end(record, error)
        raise
    except Exception as error:
        state.observer.end(record, error)
        error = name_digests(error, record.resolution)
        error = name_adapters(state.gateway, caller, body, error)
        response = error_response(named(error, body), http.scope)
    response.headers.update(headers | accounting.headers(state, caller, http.url.path))
    return response


async def _begin(
    state: IngressState,
    http: HttpRequest,
    scope: RequestScope,
    caller: Caller | None,
    route: Route,
    prepared: PreparedRequest,
    copied: PreparedRequest | None,
    record: RequestRecord,
) -> Completion:
    """Waits until the limits of the client's key and the queue of the base let the request pass.
    Returns its completion. `scope` releases all that the request then holds. Raises
    RequestQuarantinedError."""
    handle, gateway = route.handle, state.gateway
    queue = _queue_of(state, handle)
    max_tokens = sum(one.params.max_tokens * one.params.n for one in prepared.requests)
    account = await accounting.admit(state, caller, route, queue, prepared, max_tokens)
    if account is not None:
        scope.callback(account.close)
    queued = await queue.add_request(prepared.routing, max_tokens, http.receive)
    scope.callback(queue.close, queued)
    record.queue_s = queued.waited_s
    record.response_id, record.num_choices = prepared.head.id, prepared.body.num_choices
    record.call = handle.app_name, prepared.routing.call_id
    builder = prepared.response_builder()
    generation = prepared.generation(gateway.migrations)
    on_first_token: OnFirstToken | None = None
    if (shadow := route.shadow) is not None and copied is not None:

        def on_first_token(load: EngineLoad | None) -> None:
            # A copy never waits in the queue: while other requests do, none is made.
            is_queueing = queue.num_waiting > 0
            state.shadows.offer(copied, shadow, None if is_queueing else load)

    on_tokens = partial(queue.set_generated, queued)
    render = partial(state.texts.logprobs, description=handle.description)
    arm_request = None if route.arm is None else gateway.arms.begin(route.arm)
    completion = Completion(
        generation, builder, arm_request, on_first_token, on_tokens, render, record
    )
    scope.callback(completion.close)
    if account is not None:
        account.completion = completion
    scope.watch_client(http.receive, completion.client_left)
    return completion


def _queue_of(state: IngressState, base: BaseHandle) -> AdmissionQueue:
    return state.queues.of(base.app_name, base.base.name, base.max_waiting)


def named(error: Exception, body: GenerationRequest | None) -> Exception:
    """Returns the error with the names that the fields have in the body's dialect. `body`: None
    until it is parsed, with errors that have these names."""
    if isinstance(body, DialectRequest) and not isinstance(error, ClientGoneError):
        api_error = to_api_error(error)
        return error if api_error.status == 500 else body.renamed(api_error)
    return error


def prepare(
    state: IngressState, route: Route, client: ClientRequest, prompts: tuple[Prompt, ...]
) -> PreparedRequest:
    """Returns the request as it goes to the engines of its base."""
    handle, adapters, body = route.handle, route.resolution.adapters, client.body
    requests = engine_requests(
        body,
        prompts,
        adapters,
        handle.description.limits,
        client.arrival_s,
        defaults=handle.defaults,
        own_eos_token_ids=handle.text.own_eos_token_ids,
        cache_salt=state.gateway.cache_salt(client.tenant, body.cache_salt),
        max_tokens=client.max_tokens,
    )
    return PreparedRequest(
        handle,
        body,
        _head(client, route.resolution),
        prompts,
        requests,
        adapters,
        _routing_request(state, route, client, requests),
    )


async def _prepare_copy(
    state: IngressState, route: Route, client: ClientRequest, raw: bytes, prepared: PreparedRequest
) -> PreparedRequest | None:
    """Returns the request for the route's shadow, whose text side may read it in another way. None:
    there is no shadow, or it cannot read the request now; the client does not wait for it."""
    if (shadow := route.shadow) is None:
        return None
    if not shadow.text and not route.brings_text:
        return prepared
    sides = state.cold_starts.text_sides
    try:
        base, resolution = state.gateway.resolve(f"{shadow.name}@{shadow.version}")
        handle = sides.find(base, shadow)
        if handle is None:
            sides.begin(base, shadow)
        else:
            return await _read_and_prepare(state, Route(handle, resolution), client, raw)
    except Exception as error:  # of the shadow alone
        logger.info("no shadow of %s@%d: %s", shadow.name, shadow.version, error)
    state.shadows.num_dropped += 1
    return None


async def _read_and_prepare(
    state: IngressState, route: Route, client: ClientRequest, raw: bytes
) -> PreparedRequest:
    """Returns the request as the text side of the route reads it, with a checked grammar. Raises
    InvalidRequestError, with the field of the body that the grammar comes from."""
    text, description = route.handle.text, route.handle.description
    prompts = await state.texts.run(read_prompts, client.body, raw, text, description)
    prepared = prepare(state, route, client, prompts)
    if (grammar := prepared.grammar) is None:
        return prepared
    checked = await state.grammars.check(grammar, prepared.body.grammar_field or "tools")
    return prepared if checked is grammar else prepared.with_grammar(checked)


def _routing_request(
    state: IngressState, route: Route, client: ClientRequest, requests: tuple[Request, ...]
) -> RoutingRequest:
    """`requests`: () while the prompts are not known."""
    account, priority = state.queues.tenants.account(client.tenant, client.priority)
    adapters, limits = route.resolution.adapters, route.handle.description.limits
    return make_routing_request(
        requests, adapters, limits, client.session, tenant=account, priority=priority
    )


def session_key(http: HttpRequest, body: GenerationRequest) -> str | None:
    """Returns the key by which requests stick to an arm and a replica: that of a person if the
    request has it, otherwise that of a conversation, otherwise a key that clients may share."""
    session = http.headers.get(_SESSION_HEADER)
    if session is not None and len(session) > MAX_SESSION_CHARS:
        raise InvalidRequestError(
            f"{_SESSION_HEADER}: at most {MAX_SESSION_CHARS} characters, got {len(session)}.",
            _SESSION_HEADER,
        )
    return sticky_key(body.user, body.safety_identifier, session, body.prompt_cache_key)


def _head(client: ClientRequest, resolution: Resolution) -> ResponseHead:
    body = client.body
    is_chat = isinstance(body, ChatRequest)
    key = adapter_key(resolution.adapters) or ""
    parts = (_VERSION, resolution.base.digest, key)
    fingerprint = hashlib.sha256("/".join(parts).encode()).hexdigest()[:16]
    return ResponseHead(
        "chat" if is_chat else "completion",
        body.id_prefix + (body.request_id or uuid.uuid4().hex),
        body.full_model,
        int(time.time()),
        f"fp_{fingerprint}",
        client.request_id,
    )
