"""/tokenize, /detokenize and /tokenizer_info, in vLLM's shape: evaluation harnesses ask them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from engine.errors import InvalidRequestError
from serve_app.asgi import json_response, read_body
from serve_app.gateway import Front
from serve_app.protocol import parse_body
from serve_app.protocol_tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.state import IngressState, state_of
from serve_app.text import BaseText

router = APIRouter()
T = TypeVar("T")


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body = parse_body(TokenizeRequest, await read_body(request, state.args.max_body_bytes))
    front = await _front(request, body.model)
    ids = await _in_pool(state, lambda: _encode(front.text, body))
    token_text = front.text.tokenizer.token_text
    return json_response(
        {
            "count": len(ids),
            "max_model_len": front.description.limits.max_model_len,
            "tokens": ids,
            "token_strs": [token_text(i) for i in ids] if body.return_token_strs else None,
        }
    )


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = parse_body(DetokenizeRequest, await read_body(request, state.args.max_body_bytes))
    tokenizer = (await _front(request, body.model)).text.tokenizer
    for token_id in body.tokens:
        if token_id >= tokenizer.vocab_size:
            raise InvalidRequestError(
                f"tokens: {token_id} is not in the vocabulary of {tokenizer.vocab_size}.", "tokens"
            )
    decode = tokenizer.decode
    return json_response(
        {
            "prompt": await _in_pool(
                state, lambda: decode(list(body.tokens), skip_special_tokens=False)
            )
        }
    )


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    front = await _front(request, model)
    files = front.description.files
    info: dict[str, object] = json.loads(files.get("tokenizer_config.json", b"{}"))
    if "chat_template.jinja" in files:
        info["chat_template"] = files["chat_template.jinja"].decode()
    return json_response(info | front.text.special_tokens)


async def _front(request: Request, model: str | None) -> Front:
    """Harnesses that know one model only do not name it."""
    state = state_of(request)
    named = state.gateway.only_model() if model is None else model
    admission = await state.cold_starts.admit(named, request.receive)
    admission.visit.leave()
    return admission.route.front


def _encode(text: BaseText, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None
        return text.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    rendered = text.render_chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
    )
    return text.encode(rendered, add_special_tokens=bool(body.add_special_tokens))


async def _in_pool(state: IngressState, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(state.tokenizer_pool, work)
