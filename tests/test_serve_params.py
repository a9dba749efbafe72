"""Checked bodies -> prompts and sampling parameters; exceptions -> error responses."""

import json
import pickle
from pathlib import Path
from typing import TypeVar, cast

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

from engine.admission import EngineLimits, check_request
from engine.errors import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    UnknownAdapterError,
)
from engine.types import Request as EngineRequest
from engine.types import SamplingParams
from registry.catalog import Catalog
from registry.entities import BaseVersion
from registry.errors import NotFoundError, RegistryUnavailableError
from serve_app.api.completions import session_key
from serve_app.api.ingress import build_asgi
from serve_app.config import ModelArgs
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.errors import (
    ApiError,
    EngineFailureError,
    OverloadedError,
    ServiceUnavailableError,
    to_api_error,
)
from serve_app.messages import BaseDescription
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import (
    Prompt,
    completion_prompts,
    detokenize_request,
    engine_requests,
    read_prompts,
    sampling_params,
    tokenize_request,
)
from serve_app.openai.json_body import parse_body
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.platform_view import PlatformView, ServedBase
from serve_app.text.base_text import BaseText
from serve_app.text.generation_defaults import NO_DEFAULTS, read_generation_defaults
from tests.ingress_app import make_state
from tests.text_factory import LLAMA3, base_text

LIMITS = EngineLimits(max_model_len=512, vocab_size=1000, max_kv_tokens=4096)
SMALL_CACHE = EngineLimits(max_model_len=131_072, vocab_size=1000, max_kv_tokens=400)
USER = [{"role": "user", "content": "hello"}]
T = TypeVar("T", bound=BaseModel)
PROMPT = Prompt((5, 6, 7), None)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> BaseText:
    return base_text(tmp_path_factory.mktemp("model"), LLAMA3)


def parsed(model: type[T], **fields: object) -> T:
    return parse_body(model, json.dumps({"model": "m", **fields}).encode())


def chat(**fields: object) -> ChatRequest:
    return parsed(ChatRequest, messages=USER, **fields)


def completion(**fields: object) -> CompletionRequest:
    return parsed(CompletionRequest, **{"prompt": "hello", **fields})


def test_defaults_are_those_of_the_openai_api() -> None:
    assert sampling_params(completion(), PROMPT, LIMITS) == SamplingParams(max_tokens=16)
    # A chat response may fill the context.
    assert sampling_params(chat(), PROMPT, LIMITS) == SamplingParams(max_tokens=509)


def test_every_field_reaches_the_engine() -> None:
    request = completion(
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"7": -3},
        seed=-1,
        n=3,
        stop_token_ids=[4, 4],
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        speculation="auto",
    )
    assert sampling_params(request, PROMPT, LIMITS) == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias=((7, -3.0),),
        seed=2**64 - 1,
        n=3,
        stop_token_ids=(4,),
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        speculation="auto",
    )


def test_the_models_generation_config_sets_what_a_request_leaves_out() -> None:
    file = (
        b'{"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "max_new_tokens": 40,'
        b' "repetition_penalty": 1.1, "do_sample": true, "eos_token_id": [1]}'
    )
    defaults = read_generation_defaults({"generation_config.json": file}, "m")
    expected = SamplingParams(
        max_tokens=40, temperature=0.6, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.1
    )
    assert sampling_params(chat(), PROMPT, LIMITS, defaults) == expected
    # As in vLLM a completion has 16 tokens, and a request's own number overrides the file's.
    assert sampling_params(completion(), PROMPT, LIMITS, defaults).max_tokens == 16
    asked = chat(temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1, max_tokens=99)
    plain = SamplingParams(max_tokens=99, temperature=0)
    assert sampling_params(asked, PROMPT, LIMITS, defaults) == plain
    assert sampling_params(chat(min_tokens=41), PROMPT, LIMITS, defaults).max_tokens == 41
    assert read_generation_defaults({}, "m") == NO_DEFAULTS


@pytest.mark.parametrize(
    "value",
    ['"hot"', "NaN", "1e400", "-1e400", "-1", "true", "[1]", "{}", "9" * 400, "3", "null"],
)
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "top_k", "max_new_tokens"]
)
def test_a_wrong_value_in_the_models_file_breaks_no_request(field: str, value: str) -> None:
    file = f'{{"{field}": {value}, "eos_token_id": 1}}'.encode()
    defaults = read_generation_defaults({"generation_config.json": file}, "m")
    for request in (chat(), completion()):
        params = sampling_params(request, PROMPT, LIMITS, defaults)
        check_request(EngineRequest("id", PROMPT.token_ids, params), LIMITS)
    broken = {"generation_config.json": file[:-1]}
    assert read_generation_defaults(broken, "m") == NO_DEFAULTS


def test_log_probabilities_of_a_whole_answer_are_bounded() -> None:
    limits = EngineLimits(max_model_len=131_072, vocab_size=1000, max_kv_tokens=131_072)
    honest = chat(logprobs=True, top_logprobs=20, max_tokens=8000)
    assert sampling_params(honest, PROMPT, limits).max_tokens == 8000
    # If the client sets no limit, the response has as many tokens as fit.
    open_end = chat(logprobs=True, top_logprobs=20, n=16)
    assert sampling_params(open_end, PROMPT, limits).max_tokens == 2**21 // (16 * 21)
    least = chat(logprobs=True, top_logprobs=20, n=16, min_tokens=100_000)
    with pytest.raises(InvalidRequestError, match="16 sequences"):
        sampling_params(least, PROMPT, limits)
    dear = {"logprobs": 20, "n": 16, "max_tokens": 100_000}
    with pytest.raises(InvalidRequestError, match="100000 tokens, 16 sequences") as caught:
        sampling_params(completion(**dear), PROMPT, limits)
    assert caught.value.param == "logprobs"
    streamed = completion(**dear, stream=True)
    assert sampling_params(streamed, PROMPT, limits).max_tokens == 100_000


def test_log_probabilities_of_the_prompts_of_a_request_are_bounded_together() -> None:
    limits = EngineLimits(max_model_len=8192, vocab_size=1000, max_kv_tokens=131_072)
    prompts = (Prompt((7,) * 8000, None),) * 12  # 12 * 8000 * 21 entries fit
    honest = completion(prompt_logprobs=20, max_tokens=1)
    assert len(engine_requests(honest, prompts, (), limits, cache_salt="")) == 12
    evaluation = completion(echo=True, logprobs=1, max_tokens=0)
    assert len(engine_requests(evaluation, prompts * 10, (), limits, cache_salt="")) == 120
    cases = (
        ({"prompt_logprobs": 20}, "prompt_logprobs", 13 * 8000 * 21),
        ({"prompt_logprobs": 20, "n": 2}, "prompt_logprobs", 13 * 8000 * 21 * 2),
        ({"echo": True, "logprobs": 20}, "logprobs", 13 * 8000 * 21),
        ({"echo": True, "logprobs": 20, "stream": True}, "logprobs", 13 * 8000 * 21),
        (
            {"echo": True, "logprobs": 9, "prompt_logprobs": 10},
            "prompt_logprobs",
            13 * 8000 * 21,
        ),
    )
    many = (Prompt((7,) * 8000, None),) * 13
    for fields, param, num_entries in cases:
        words = f"{param}.*104000 prompt tokens.*make {num_entries} entries; at most {2**21}"
        with pytest.raises(InvalidRequestError, match=words) as caught:
            engine_requests(completion(**fields, max_tokens=1), many, (), limits, cache_salt="")
        assert caught.value.param == param
    engine_requests(
        chat(prompt_logprobs=20, n=16, max_tokens=1), prompts, (), limits, cache_salt=""
    )


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    params = sampling_params(completion(echo=True, logprobs=1), PROMPT, LIMITS)
    assert params.prompt_logprobs == 1
    assert sampling_params(completion(echo=True), PROMPT, LIMITS).prompt_logprobs is None
    assert sampling_params(completion(logprobs=1), PROMPT, LIMITS).prompt_logprobs is None


def test_context_error_names_both_numbers() -> None:
    with pytest.raises(ContextLengthError, match=r"512 tokens.* 3 in the prompt and 510"):
        sampling_params(completion(max_tokens=510), PROMPT, LIMITS)
    with pytest.raises(ContextLengthError, match=r"512 tokens.* 512 in the prompt"):
        sampling_params(chat(), Prompt((1,) * 512, None), LIMITS)
    assert sampling_params(completion(max_tokens=509), PROMPT, LIMITS).max_tokens == 509


def test_a_chat_without_a_length_fits_a_kv_cache_that_is_smaller_than_the_context() -> None:
    prompt = Prompt((7,) * 30, None)
    (request,) = engine_requests(chat(), (prompt,), (), SMALL_CACHE, cache_salt="")
    assert request.params.max_tokens == 370
    check_request(request, SMALL_CACHE)
    with pytest.raises(
        ContextLengthError, match=r"400 tokens.* 30 in the prompt and 371"
    ) as caught:
        engine_requests(chat(max_tokens=371), (prompt,), (), SMALL_CACHE, cache_salt="")
    assert caught.value.param == "messages"


def test_a_text_beyond_a_small_kv_cache_is_refused_wherever_it_is_read(text: BaseText) -> None:
    words = "x" * (400 * text.tokenizer.max_token_chars + 1)
    with pytest.raises(ContextLengthError, match=r"400 tokens.*at least 401"):
        completion_prompts(completion(prompt=words), text, SMALL_CACHE)
    with pytest.raises(ContextLengthError, match=r"400 tokens.*at least 401"):
        tokenize_request(parsed(TokenizeRequest, prompt=words), text, SMALL_CACHE)
    with pytest.raises(ContextLengthError, match=r"at most 400.*got 401"):
        detokenize_request(parsed(DetokenizeRequest, tokens=[1] * 401), text, SMALL_CACHE)


async def test_clients_are_told_the_length_that_a_request_may_have(text: BaseText) -> None:
    base = BaseVersion("base", 1, "d" * 64, "source")
    state = make_state()
    state.gateway.view = PlatformView(
        "1",
        Catalog((base,), ()),
        (ServedBase(base, "app", "running", ModelArgs(name="base")),),
        (),
        True,
        None,
    )
    handle = cast("DeploymentHandle[object]", None)
    description = BaseDescription({}, SMALL_CACHE)
    state.gateway._handles[base.digest] = BaseHandle(base, "app", handle, description, text, 0.0)
    client = TestClient(build_asgi(state))
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 400
    assert client.get("/v1/models/base").json()["max_model_len"] == 400
    answer = client.post("/tokenize", json={"model": "base", "prompt": "hello"})
    assert answer.json()["max_model_len"] == 400


def test_far_too_long_text_is_refused_without_tokenizing(text: BaseText) -> None:
    request = completion(prompt="x" * (512 * text.tokenizer.max_token_chars + 1))
    with pytest.raises(ContextLengthError, match="at least 513"):
        completion_prompts(request, text, LIMITS)


def test_a_text_far_beyond_the_context_is_not_tokenized_whole(text: BaseText) -> None:
    value = "a word " * 3000
    exact = len(text.encode(value, add_special_tokens=False))
    bound = text.tokenizer.min_tokens_by_prefixes(value, 1000)
    assert 1000 < bound < exact  # only a prefix of it was tokenized
    limits = EngineLimits(max_model_len=1000, vocab_size=1000, max_kv_tokens=4096)
    with pytest.raises(ContextLengthError, match="at least"):
        completion_prompts(completion(prompt=value), text, limits)
    assert text.tokenizer.min_tokens_by_prefixes(value, exact) == 0


def test_all_prompts_of_a_request_have_a_bounded_number_of_tokens(text: BaseText) -> None:
    limits = EngineLimits(max_model_len=2**18, vocab_size=1000, max_kv_tokens=2**18)
    ids = [[1] * (2**17 + 1)] * 8
    with pytest.raises(
        InvalidRequestError, match="first 8 of 8 prompts have 1048584 tokens"
    ) as caught:
        completion_prompts(completion(prompt=ids), text, limits)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("header", ["x" * 257, "x" * 8_000_000])
def test_a_session_header_that_is_too_long_is_refused(header: str) -> None:
    scope = {"type": "http", "headers": [(b"x-session-id", header.encode())]}
    with pytest.raises(
        InvalidRequestError, match=f"x-session-id: at most 256 characters, got {len(header)}"
    ):
        session_key(Request(scope), completion())
    scope["headers"] = [(b"x-session-id", b"x" * 256)]
    assert session_key(Request(scope), completion()) == "x" * 256


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_token_id_outside_the_vocabulary_is_refused(field: str) -> None:
    value: object = {"1000": 1} if field == "logit_bias" else [1000]
    with pytest.raises(InvalidRequestError, match="1000") as caught:
        sampling_params(completion(**{field: value}), PROMPT, LIMITS)
    assert caught.value.param == field


def test_prompts_of_ids_are_taken_as_they_are(text: BaseText) -> None:
    prompts = completion_prompts(completion(prompt=[[9, 8], [999]]), text, LIMITS)
    assert prompts == (Prompt((9, 8), None), Prompt((999,), None))
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        completion_prompts(completion(prompt=[1000]), text, LIMITS)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        detokenize_request(DetokenizeRequest(tokens=[text.tokenizer.vocab_size]), text, LIMITS)


def test_prompt_without_tokens_is_refused(text: BaseText) -> None:
    with pytest.raises(InvalidRequestError, match="at least one token"):
        completion_prompts(completion(prompt="", add_special_tokens=False), text, LIMITS)
    assert completion_prompts(completion(prompt=""), text, LIMITS)[0].token_ids == (0,)


def test_chat_has_one_beginning_of_text(text: BaseText) -> None:
    ids = read_prompts(chat(), text, LIMITS)[0].token_ids
    assert ids.count(0) == 1
    assert ids[0] == 0


def test_completion_has_special_tokens_unless_switched_off(text: BaseText) -> None:
    assert completion_prompts(completion(), text, LIMITS)[0].token_ids[0] == 0
    bare = completion_prompts(completion(add_special_tokens=False), text, LIMITS)
    assert 0 not in bare[0].token_ids


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidRequestError("bad", "stop"), 400, "invalid_value", "stop"),
        (ContextLengthError("long", "prompt"), 400, "context_length_exceeded", "prompt"),
        (NotFoundError("The model `x` does not exist."), 404, "model_not_found", "model"),
        (RegistryUnavailableError("sqlite://secret"), 503, "registry_unavailable", None),
        (EngineDeadError("at 0x7f"), 503, "engine_unavailable", None),
        (UnknownAdapterError("ab12"), 503, "adapter_not_loaded", None),
        (OverloadedError("busy", 3), 429, "overloaded", None),
        (ServiceUnavailableError("no", 2), 503, "unavailable", None),
        (EngineFailureError("File x.py"), 500, "internal", None),
        (KeyError("/tmp/secret"), 500, "internal", None),
    ],
)
def test_error_table(error: Exception, status: int, code: str, param: str | None) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.code, answer.param) == (status, code, param)
    body = json.loads(answer.body())
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    if status in (429, 503):
        assert int(answer.headers()["Retry-After"]) >= 1
    if status >= 500:
        assert "secret" not in body["error"]["message"]
    assert to_api_error(answer) is answer


def test_errors_travel_between_processes() -> None:
    for error in (ApiError(400, "m", param="p"), OverloadedError("m", 3)):
        copy = pickle.loads(pickle.dumps(error))
        assert vars(copy) == vars(error)


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"tokenizer\.json is missing"):
        BaseText.from_folder(tmp_path)
