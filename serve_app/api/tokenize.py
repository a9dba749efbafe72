"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shape: evaluation harnesses ask them.

A text or a list of ids may be as long as a prompt; more than the model's context is refused.
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
from serve_app.openai.engine_params import detokenized, tokenized
from serve_app.openai.json_body import parse_body
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.text.template_guard import TemplateBudgetError

router = APIRouter()
PATHS = ("/tokenize", "/detokenize")
B = TypeVar("B", TokenizeRequest, DetokenizeRequest)

# Within ingress.max_body_bytes: a text of any context, and as many ids.
MAX_TOKENIZE_BYTES = 4 * 1024**2
MAX_DETOKENIZE_BYTES = 1024**2


@router.post(PATHS[0])
async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body, raw = await _read(request, state, TokenizeRequest, MAX_TOKENIZE_BYTES)
    front = await _front(request, body.model)
    ids, texts = await _tokenized(state, front, body, raw)
    return json_response(
        {
            "count": len(ids),
            "max_model_len": front.description.limits.max_request_tokens,
            "tokens": ids,
            "token_strs": texts if body.return_token_strs else None,
        }
    )


@router.post(PATHS[1])
async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body, raw = await _read(request, state, DetokenizeRequest, MAX_DETOKENIZE_BYTES)
    front = await _front(request, body.model)
    limits, files = front.description.limits, front.description.files
    if len(raw) <= INLINE_BODY_BYTES:
        text = detokenized(body, front.text, limits)
    else:
        base = front.base.digest
        text = await state.texts.detokenize(DetokenizeRequest, raw, base, files, limits)
    return json_response({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    front = await _front(request, model)
    files = front.description.files
    info: dict[str, object] = json.loads(files.get("tokenizer_config.json", b"{}"))
    if "chat_template.jinja" in files:
        info["chat_template"] = files["chat_template.jinja"].decode()
    return json_response(info | front.text.special_tokens)


async def _read(
    request: Request, state: IngressState, kind: type[B], most_bytes: int
) -> tuple[B, bytes]:
    """The body, of a long one without its text, and its bytes."""
    limit = min(most_bytes, state.args.max_body_bytes)
    try:
        raw = await read_body(request, limit)
    except ApiError as error:
        if error.status != 413:
            raise
        raise ApiError(
            413,
            f"The body is longer than {limit} bytes, the limit of {request.url.path} within the "
            f"server's ingress.max_body_bytes of {state.args.max_body_bytes}.",
            code=error.code,
        ) from None
    if len(raw) <= INLINE_BODY_BYTES:
        return parse_body(kind, raw), raw
    return await state.texts.parse(kind, raw), raw


async def _tokenized(
    state: IngressState, front: BaseHandle, body: TokenizeRequest, raw: bytes
) -> tuple[Sequence[int], Sequence[str | None]]:
    """Ids, and their texts where the body asks for them."""
    limits, files = front.description.limits, front.description.files
    if len(raw) <= INLINE_BODY_BYTES:
        try:
            ids = tokenized(body, front.text, limits)
        except TemplateBudgetError:
            pass  # a worker has the time for it
        else:
            token_text = front.text.tokenizer.token_text
            return ids, [token_text(i) for i in ids] if body.return_token_strs else ()
    return await state.texts.tokenize(TokenizeRequest, raw, front.base.digest, files, limits)


async def _front(request: Request, model: str | None) -> BaseHandle:
    """Harnesses that know one model only do not name it."""
    state = state_of(request)
    named = state.gateway.only_model() if model is None else model
    admission = await state.cold_starts.admit(named, request.receive)
    admission.visit.leave()
    return admission.route.front
