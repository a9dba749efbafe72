"""Engine outputs and responses for the tests of the wire format."""

import json
from collections.abc import Iterable, Sequence
from typing import TypeVar

from pydantic import BaseModel

from engine.types import FinishReason, TokenLogprobs, TokenOutput
from serve_app.openai.answer import FeedResult, ResponseBuilder
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import Prompt
from serve_app.openai.json_body import parse_body
from serve_app.openai.logprobs import Rendering, render_part
from serve_app.openai.responses import Kind, ResponseHead
from serve_app.text.base_text import BaseText

Model = TypeVar("Model", bound=BaseModel)
Json = dict[str, object]
EOS = 3  # of the tokenizer in text_factory


def head(kind: Kind) -> ResponseHead:
    return ResponseHead(kind, "id-1", 'base:"adapter"', 1_700_000_000, "fp_1")


def chat(text: BaseText, **fields: object) -> ResponseBuilder:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request = parse_body(ChatRequest, json.dumps(body).encode())
    return ResponseBuilder(request, [Prompt((5, 6), None)], text, head("chat"))


def completion(text: BaseText, prompts: Sequence[Prompt], **fields: object) -> ResponseBuilder:
    body = {"model": "m", "prompt": "x", **fields}
    request = parse_body(CompletionRequest, json.dumps(body).encode())
    return ResponseBuilder(request, prompts, text, head("completion"))


def outputs(
    token_ids: Sequence[int],
    finish: FinishReason = "stop",
    choice: int = 0,
    logprobs: Sequence[TokenLogprobs] = (),
    stop_token_id: int | None = None,
) -> list[TokenOutput]:
    last = len(token_ids) - 1
    return [
        TokenOutput(
            "r",
            choice,
            offset,
            (token_id,),
            logprobs=tuple(logprobs[offset : offset + 1]),
            finish_reason=finish if offset == last else None,
            stop_token_id=stop_token_id if offset == last else None,
            num_cached_tokens=1,
        )
        for offset, token_id in enumerate(token_ids)
    ]


def logprobs_of(token_id: int, *top: tuple[int, float], logprob: float = -0.5) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1, top)


def ids_of(text: BaseText, value: str) -> list[int]:
    return text.encode(value, add_special_tokens=False)


def rendered(answer: ResponseBuilder, rendering: Rendering[bytes]) -> bytes:
    """Returns the bytes of a rendering whose parts are all rendered inline."""
    try:
        part = next(rendering)
        while True:
            part = rendering.send(render_part(part, answer.tokenizer))
    except StopIteration as end:
        data: bytes = end.value
        return data


def whole_of(answer: ResponseBuilder) -> bytes:
    return rendered(answer, answer.rendering())


def data_of(answer: ResponseBuilder, fed: FeedResult) -> bytes:
    return fed.data if fed.rendering is None else rendered(answer, fed.rendering)


def stream_of(answer: ResponseBuilder, fed: Iterable[TokenOutput], prompt: int = 0) -> list[Json]:
    data = b"".join(data_of(answer, answer.feed(prompt, output)) for output in fed)
    data += answer.stream_end()
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event[len("data: ") :]) for event in events]


def body_of(answer: ResponseBuilder, fed: Iterable[TokenOutput], prompt: int = 0) -> Json:
    for output in fed:
        assert answer.feed(prompt, output).data == b""
    body: Json = json.loads(whole_of(answer))
    return body


def strictly(model: type[Model], value: Json) -> Model:
    """Validates without coercion; only vLLM's additions may be missing in the client's types."""
    checked = model.model_validate(value, strict=False)
    dumped = json.loads(checked.model_dump_json(exclude_unset=True))
    assert dumped == value
    return checked
