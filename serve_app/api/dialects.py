"""/v1/responses and Anthropic's /v1/messages: chats in other shapes, served as chats."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from serve_app.api.admin_auth import caller_of
from serve_app.api.completions import complete, named
from serve_app.api.model_access import check_model, check_route
from serve_app.api.state import state_of
from serve_app.dialects import messages, responses
from serve_app.dialects.messages import CountTokensRequest, MessagesRequest
from serve_app.dialects.responses import ResponsesRequest
from serve_app.errors import ApiError, shown
from serve_app.http.asgi import error_response, json_response, read_body
from serve_app.openai.engine_params import read_prompts

router = APIRouter()
PATHS = (responses.PATH, messages.PATH, messages.COUNT_PATH)


@router.post(PATHS[0])
async def create_response(request: Request) -> Response:
    return await complete(request, ResponsesRequest)


@router.post(PATHS[1])
async def create_message(request: Request) -> Response:
    return await complete(request, MessagesRequest)


@router.post(PATHS[2])
async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens in the prompt that /v1/messages makes of the same body."""
    state = state_of(request)
    body: CountTokensRequest | None = None
    try:
        raw = await read_body(request, state.args.max_body_bytes)
        body = await state.texts.parse(CountTokensRequest, raw)
        check_model(state.gateway, caller_of(request), body.model)
        route, leave = await state.cold_starts.admit(body.model, request.receive)
        leave()
        check_route(state, caller_of(request), body.model, route)
        handle = route.handle
        prompts = await state.texts.run(read_prompts, body, raw, handle.text, handle.description)
        return json_response({"input_tokens": sum(len(one.token_ids) for one in prompts)})
    except Exception as error:
        return error_response(named(error, body), request.url.path)


@router.get("/v1/responses/{response_id}", include_in_schema=False)
async def get_response(response_id: str) -> Response:
    """Answers 404: responses are not stored."""
    raise ApiError(
        404,
        f"The response {shown(response_id)} is not stored: this server answers with store: false.",
        param="response_id",
        code="not_found",
    )
