"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shape, for evaluation harnesses.

A text or a list of ids may be as long as a prompt; beyond the model's context it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from serve_app.api.completions import INLINE_BODY_BYTES
from serve_app.api.state import IngressState, state_of
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.errors import ApiError
from serve_app.http.asgi import json_response, read_body
from serve_app.openai.engine_params import detokenize_request, tokenize_request
from serve_app.openai.json_body import parse_body
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.text.template_guard import TemplateBudgetError

router = APIRouter()
PATHS = ("/tokenize", "/detokenize")
B = TypeVar("B", TokenizeRequest, DetokenizeRequest)

# Below ingress.max_body_bytes, but enough for a text of any context length, and for its ids.
MAX_TOKENIZE_BYTES = 4 * 1024**2
MAX_DETOKENIZE_BYTES = 1024**2


@router.post(PATHS[0])
async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body, raw = await _read(request, state, TokenizeRequest, MAX_TOKENIZE_BYTES)
    base = await _find_base(request, body.model)
    ids, texts = await _tokenized(state, base, body, raw)
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
    body, raw = await _read(request, state, DetokenizeRequest, MAX_DETOKENIZE_BYTES)
    base = await _find_base(request, body.model)
    limits, files = base.description.limits, base.description.files
    if len(raw) <= INLINE_BODY_BYTES:
        text = detokenize_request(body, base.text, limits)
    else:
        digest = base.base.digest
        text = await state.texts.detokenize(DetokenizeRequest, raw, digest, files, limits)
    return json_response({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    base = await _find_base(request, model)
    files = base.description.files
    info: dict[str, object] = json.loads(files.get("tokenizer_config.json", b"{}"))
    if "chat_template.jinja" in files:
        info["chat_template"] = files["chat_template.jinja"].decode()
    return json_response(info | base.text.special_tokens)


async def _read(
    request: Request, state: IngressState, kind: type[B], max_bytes: int
) -> tuple[B, bytes]:
    """Returns the body, without its text if it is long, and its bytes."""
    limit = min(max_bytes, state.args.max_body_bytes)
    try:
        raw = await read_body(request, limit)
    except ApiError as error:
        if error.status != 413:
            raise
        raise ApiError(
            413,
            f"The body is longer than {limit} bytes, the limit of {request.url.path}; the server's "
            f"ingress.max_body_bytes is {state.args.max_body_bytes}.",
            code=error.code,
        ) from None
    if len(raw) <= INLINE_BODY_BYTES:
        return parse_body(kind, raw), raw
    return await state.texts.parse(kind, raw), raw


async def _tokenized(
    state: IngressState, base: BaseHandle, body: TokenizeRequest, raw: bytes
) -> tuple[Sequence[int], Sequence[str | None]]:
    """Returns token ids, and their texts if the body requests them."""
    limits, files = base.description.limits, base.description.files
    if len(raw) <= INLINE_BODY_BYTES:
        try:
            ids = tokenize_request(body, base.text, limits)
        except TemplateBudgetError:
            pass  # a worker may spend more time on it
        else:
            token_text = base.text.tokenizer.token_text
            return ids, [token_text(i) for i in ids] if body.return_token_strs else ()
    return await state.texts.tokenize(TokenizeRequest, raw, base.base.digest, files, limits)


async def _find_base(request: Request, model: str | None) -> BaseHandle:
    """Returns the handle of the model's base; the name may be left out if there is one base."""
    state = state_of(request)
    named = state.gateway.only_model() if model is None else model
    route, visit = await state.cold_starts.admit(named, request.receive)
    visit.leave()
    return route.handle
