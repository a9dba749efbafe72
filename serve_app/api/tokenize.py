"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shape, for evaluation harnesses.

A text or a list of ids may be as long as a prompt; beyond the model's context it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from engine.errors import InvalidRequestError
from registry.errors import NotFoundError
from registry.names import join_weighted
from serve_app.api import accounting
from serve_app.api.admin_auth import caller_of
from serve_app.api.model_access import find_route, name_adapters
from serve_app.api.state import state_of
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.errors import ApiError
from serve_app.http.asgi import json_response, read_body
from serve_app.openai.engine_params import detokenize_request, tokenize_request
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest

router = APIRouter()
PATHS = ("/tokenize", "/detokenize")
B = TypeVar("B", TokenizeRequest, DetokenizeRequest)

# Below ingress.max_body_bytes, but enough for a text of any context length, and for its ids.
MAX_TOKENIZE_BYTES = 4 * 1024**2
MAX_DETOKENIZE_BYTES = 1024**2


@router.post(PATHS[0])
async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body, raw, base = await _read(request, TokenizeRequest, MAX_TOKENIZE_BYTES)
    ids, texts = await state.texts.run(tokenize_request, body, raw, base.text, base.description)
    return json_response(
        {
            "count": len(ids),
            "max_model_len": base.description.limits.max_request_tokens,
            "tokens": ids,
            "token_strs": texts if body.return_token_strs else None,
        }
    )


@router.post(PATHS[1])
async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body, raw, base = await _read(request, DetokenizeRequest, MAX_DETOKENIZE_BYTES)
    text = await state.texts.run(detokenize_request, body, raw, base.text, base.description)
    return json_response({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    base = await _find_base(request, model)
    files = {**base.description.files, **base.description.own}
    info: dict[str, object] = json.loads(files.get("tokenizer_config.json", b"{}"))
    if base.text.source is not None:
        info["chat_template"] = base.text.source
    if base.text.response_spec is not None:
        info["response_template"] = base.text.response_spec
    return json_response(info | base.text.special_tokens)


async def _read(request: Request, kind: type[B], max_bytes: int) -> tuple[B, bytes, BaseHandle]:
    """Returns the body, without its text if it is long, its bytes, and the base of its model."""
    state, caller = state_of(request), caller_of(request)
    accounting.check(state, caller)
    raw = await read_body(request, state.args.max_body_bytes)
    if len(raw) > max_bytes:
        raise ApiError(
            413,
            f"The body is longer than {max_bytes} bytes, the limit of {request.url.path}; the "
            f"server's ingress.max_body_bytes is {state.args.max_body_bytes}.",
            code="body_too_large",
        )
    body = await state.texts.parse(kind, raw)
    try:
        return body, raw, await _find_base(request, body.model, body.adapters)
    except Exception as error:
        found = name_adapters(state.gateway, caller, body, error)
        if found is error:
            raise
        raise found from error


async def _find_base(
    request: Request, model: str | None, adapters: Sequence[tuple[str, float]] = ()
) -> BaseHandle:
    """Returns the handle of the model's base; the name may be left out if there is one base."""
    state, caller = state_of(request), caller_of(request)
    named = state.gateway.only_model() if model is None else model
    if adapters:
        named = f"{named}:{join_weighted(adapters)}"
    try:
        route = await find_route(state, caller, named, request.receive)
    except NotFoundError:
        if model is None and caller is not None:  # the error would name the base
            raise InvalidRequestError("model: required with this API key.", "model") from None
        raise
    return route.handle
