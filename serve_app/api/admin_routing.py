"""/admin/route shows where a request would go and why, without sending it; /admin/decisions shows
where the newest requests went, and their times."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from fastapi import APIRouter, Request, Response

from engine.types import key_digests
from serve_app.admin_api import ExpectedMs, RouteAnswer, RouteLine
from serve_app.api.admin_auth import ADMIN_DEPENDENCIES
from serve_app.api.completions import ClientRequest, prepare, session_key
from serve_app.api.state import state_of
from serve_app.dispatch.base_handle import Route
from serve_app.http.asgi import json_response, read_body
from serve_app.messages import RoutingRequest
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import read_prompts
from serve_app.openai.json_body import parse_body
from serve_app.routing.policy import Ranked
from serve_app.routing.state import routing_state

router = APIRouter(
    prefix="/admin",
    dependencies=ADMIN_DEPENDENCIES,
    include_in_schema=False,
)


@router.post("/route")
async def route(request: Request) -> Response:
    """Returns the replicas in the policy's order for the body of a chat or a completion."""
    state = state_of(request)
    raw = await read_body(request, state.args.max_body_bytes)
    is_chat = b'"messages"' in raw  # inside a string its quotes would be escaped
    body = parse_body(ChatRequest, raw) if is_chat else parse_body(CompletionRequest, raw)
    tenant = state.queues.tenants.read(request.headers)
    there = await state.cold_starts.text_sides.with_text(
        Route(*state.gateway.resolve(body.full_model))
    )
    handle = there.handle
    prompts = read_prompts(body, handle.text, handle.description.limits)
    prepared = prepare(
        state, there, ClientRequest(body, tenant, session_key(request, body)), prompts
    )
    routing = replace(prepared.routing, dry_run=True)
    app = routing_state(handle.app_name)
    ranked = app.rank(routing) if app.views.replicas else []
    return json_response(
        RouteAnswer(
            f"{handle.base.name}@{handle.base.version}",
            app.policy_name,
            routing.num_tokens,
            routing.adapter,
            [_line(routing, replica) for replica in ranked],
        )
    )


@router.get("/decisions")
async def decisions(request: Request) -> Response:
    """Returns the decisions of this ingress, for each base the newest first."""
    lines = [
        {"application": app_name, "age_s": time.time() - each.chosen_s, **asdict(each)}
        for app_name, base in state_of(request).gateway.connections.bases.items()
        for each in reversed(base.state.decisions.newest)
    ]
    return json_response({"decisions": lines})


def _line(routing: RoutingRequest, ranked: Ranked) -> RouteLine:
    view, terms = ranked.replica, ranked.terms
    parts_s = (terms.queue_s, terms.adapter_s, terms.prefill_s, terms.way_s, terms.total_s)
    return RouteLine(
        view.replica_id,
        ranked.reason,
        ExpectedMs(*(round(1000 * seconds, 2) for seconds in parts_s)),
        _tier(routing, ranked),
        cached_tokens=view.num_cached_tokens(routing.prefixes),
        queued_tokens=view.queued_tokens,
        sequences=view.num_sequences,
        kv_usage=round(view.load.kv_usage, 4),
        is_connected=view.is_connected,
    )


def _tier(routing: RoutingRequest, ranked: Ranked) -> str:
    view, adapter = ranked.replica, routing.adapter
    if adapter is None:
        return ""
    wanted = set(key_digests(adapter))
    tiers = (("device", view.on_device), ("host", view.on_host), ("disk", view.on_disk))
    for name, digests in tiers:
        wanted -= digests
        if not wanted:
            return name
    return "registry"
