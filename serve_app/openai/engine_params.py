"""Turns a checked body into tokenized prompts and engine requests.

`read_prompts` tokenizes; the event loop calls it for short bodies only. Limits are the engine's;
token ids are checked against the vocabulary here, before anything reaches a device.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.admission import EngineLimits
from engine.errors import ContextLengthError, InvalidRequestError
from engine.types import Grammar, Request, SamplingParams, adapter_key
from registry.entities import WeightedVersion
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.openai.tool_grammars import NO_THINKING, Thinking, answer_grammar
from serve_app.text.base_text import BaseText
from serve_app.text.generation_defaults import NO_DEFAULTS, GenerationDefaults
from serve_app.text.regions import RegionParser
from serve_app.text.response_template import ResponseTemplate
from serve_app.text.template import ChatMessage

N = TypeVar("N", int, float)
GenerationRequest = ChatRequest | CompletionRequest

MAX_LOGPROB_ENTRIES = 1 << 21  # per whole response: 47,000 tokens with 20 alternatives and n = 1
MAX_PROMPT_TOKENS = 1 << 20  # in all prompts of a request: 40 MB as Python integers


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    text: str | None  # as the client wrote it if it is echoed; None for token ids
    turn_start: str = ""  # of a chat with regions: the part of the answer that the prompt begins
    grammar: Grammar | None = None  # of a chat's answer


def read_prompts(
    body: GenerationRequest, text: BaseText, limits: EngineLimits
) -> tuple[Prompt, ...]:
    if isinstance(body, ChatRequest):
        return (_chat_prompt(body, text, limits),)
    return completion_prompts(body, text, limits)


def engine_requests(
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    adapters: Sequence[WeightedVersion],
    limits: EngineLimits,
    arrival_s: float = 0.0,
    *,
    defaults: GenerationDefaults = NO_DEFAULTS,
    own_eos_token_ids: tuple[int, ...] = (),
    cache_salt: str,
    max_tokens: int | None = None,
) -> tuple[Request, ...]:
    """Returns one engine request per prompt, all for one submit call. `cache_salt` separates the
    prefix caches of tenants and clients, see `Tenants`; `own_eos_token_ids` are the text side's, of
    which the engine has no list; `max_tokens` cuts each answer.

    Raises InvalidRequestError, or its subclass ContextLengthError, if a limit is exceeded.
    """
    _check_prompt_logprobs(body, sum(len(prompt.token_ids) for prompt in prompts))
    key = adapter_key(adapters)
    rank = sum(one.version.rank for one in adapters)
    return tuple(
        Request(
            uuid.uuid4().hex,
            prompt.token_ids,
            sampling_params(
                body, prompt, limits, defaults, len(prompts), own_eos_token_ids, max_tokens
            ),
            key,
            cache_salt,
            arrival_s,
            rank,
        )
        for prompt in prompts
    )


def completion_prompts(
    request: CompletionRequest, text: BaseText, limits: EngineLimits
) -> tuple[Prompt, ...]:
    add_special_tokens = request.add_special_tokens is not False
    prompts: list[Prompt] = []
    num_tokens = 0
    for prompt in request.prompt:
        if isinstance(prompt, str):
            ids = _encode(prompt, add_special_tokens, text, limits, "prompt")
            prompts.append(Prompt(ids, prompt if request.echo else None))
        else:
            _check_vocabulary(prompt, limits.vocab_size, "prompt")
            prompts.append(Prompt(prompt, None))
        if not prompts[-1].token_ids:
            raise InvalidRequestError("prompt: must have at least one token.", "prompt")
        num_tokens += len(prompts[-1].token_ids)
        if num_tokens > max(MAX_PROMPT_TOKENS, limits.max_request_tokens):
            raise InvalidRequestError(
                f"prompt: the first {len(prompts)} of {len(request.prompt)} prompts have "
                f"{num_tokens} tokens; at most {MAX_PROMPT_TOKENS} are allowed per request.",
                "prompt",
            )
    return tuple(prompts)


def tokenize_request(
    request: TokenizeRequest, text: BaseText, limits: EngineLimits
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the token ids for /tokenize, and their texts if the body requests them; the context
    length is the limit, as for a prompt."""
    if request.messages is not None:
        rendered = _render_chat(request, request.messages, text)
        ids = _encode(rendered, bool(request.add_special_tokens), text, limits, "messages")
    else:
        assert request.prompt is not None
        adds_special = request.add_special_tokens is not False
        ids = _encode(request.prompt, adds_special, text, limits, "prompt")
    return ids, tuple(map(text.tokenizer.token_text, ids)) if request.return_token_strs else ()


def detokenize_request(request: DetokenizeRequest, text: BaseText, limits: EngineLimits) -> str:
    """Returns the text for /detokenize; the context length is the limit, as for a prompt."""
    _check_vocabulary(request.tokens, text.tokenizer.vocab_size, "tokens")
    if len(request.tokens) > limits.max_request_tokens:
        raise ContextLengthError(
            f"tokens: at most {limits.max_request_tokens}, this model's maximum context length, "
            f"got {len(request.tokens)}.",
            "tokens",
        )
    return text.tokenizer.decode(request.tokens, skip_special_tokens=False)


def sampling_params(
    request: GenerationRequest,
    prompt: Prompt,
    limits: EngineLimits,
    defaults: GenerationDefaults = NO_DEFAULTS,
    num_prompts: int = 1,
    own_eos_token_ids: tuple[int, ...] = (),
    most_tokens: int | None = None,
) -> SamplingParams:
    """Returns the parameters of a prompt, whose length bounds the output. `defaults` are the
    model's, for fields that the request leaves out; `num_prompts` is the request's number;
    `most_tokens` cuts the answer."""
    own_eos = () if request.ignore_eos else own_eos_token_ids
    max_tokens = _max_tokens(request, len(prompt.token_ids), limits, defaults)
    if most_tokens is not None:
        max_tokens = min(max_tokens, most_tokens)
    _check_vocabulary([i for i, _ in request.logit_bias], limits.vocab_size, "logit_bias")
    _check_vocabulary(request.stop_token_ids, limits.vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=_bounded_by_logprobs(request, max_tokens, num_prompts),
        min_tokens=request.min_tokens or 0,
        temperature=_given(request.temperature, defaults.temperature, 1.0),
        top_k=max(0, _given(request.top_k, defaults.top_k, 0)),  # vLLM's -1 means off, as 0 does
        top_p=_given(request.top_p, defaults.top_p, 1.0),
        min_p=_given(request.min_p, defaults.min_p, 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=request.logit_bias,
        seed=None if request.seed is None else request.seed % 2**64,
        n=request.num_choices,
        stop_token_ids=request.stop_token_ids + own_eos,
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.output_logprobs,
        prompt_logprobs=max(_prompt_lists(request), default=None),
        grammar=prompt.grammar if isinstance(request, ChatRequest) else request.grammar,
        speculation=request.speculation,
    )


def _given(value: N | None, default: N | None, otherwise: N) -> N:
    if value is not None:
        return value
    return otherwise if default is None else default


def _prompt_lists(request: GenerationRequest) -> list[int]:
    """Returns the number of alternatives of each list of the prompt's log-probabilities."""
    echoed = isinstance(request, CompletionRequest) and bool(request.echo)
    lists = [request.prompt_logprobs, request.output_logprobs if echoed else None]
    return [num_top for num_top in lists if num_top is not None]


def _check_prompt_logprobs(request: GenerationRequest, num_tokens: int) -> None:
    """Checks the number of prompt log-probabilities, which all exist at once: in one engine output
    per prompt, and in the response, where every choice of a completion repeats them. `num_tokens`
    counts all prompts."""
    each = sum(num_top + 1 for num_top in _prompt_lists(request))
    copies = 1 if isinstance(request, ChatRequest) else request.num_choices
    if num_tokens * copies * each <= MAX_LOGPROB_ENTRIES:
        return
    param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
    field = "logprobs with echo" if request.prompt_logprobs is None else param
    raise InvalidRequestError(
        f"{field}: {num_tokens} prompt tokens, {each} log-probabilities per token and {copies} "
        f"copies in the response make {num_tokens * copies * each} entries; at most "
        f"{MAX_LOGPROB_ENTRIES} are allowed per request.",
        param,
    )


def _bounded_by_logprobs(request: GenerationRequest, max_tokens: int, num_prompts: int) -> int:
    """Returns `max_tokens`, reduced to the number whose log-probabilities fit into a whole response
    if the client leaves the length open. A whole response keeps each of them until its end, in
    about 150 bytes. Raises InvalidRequestError if the length that the client asks for does not fit.
    """
    if request.stream or request.output_logprobs is None:
        return max_tokens
    each = num_prompts * request.num_choices * (request.output_logprobs + 1)
    if max_tokens * each <= MAX_LOGPROB_ENTRIES:
        return max_tokens
    fitting = MAX_LOGPROB_ENTRIES // each
    if request.requested_tokens is None and (request.min_tokens or 0) <= fitting:
        return fitting
    raise InvalidRequestError(
        f"logprobs: {max_tokens} tokens, {num_prompts * request.num_choices} sequences and "
        f"{request.output_logprobs} alternatives per token make {max_tokens * each} entries in one "
        f"response; at most {MAX_LOGPROB_ENTRIES} are allowed unless stream is true.",
        "logprobs",
    )


def _max_tokens(
    request: GenerationRequest,
    num_prompt_tokens: int,
    limits: EngineLimits,
    defaults: GenerationDefaults,
) -> int:
    num_left = limits.max_request_tokens - num_prompt_tokens
    requested = request.requested_tokens
    if requested is not None and num_left >= 1 and request.cuts_max_tokens:
        requested = min(requested, num_left)
    if num_left < 1 or (requested or 0) > num_left:
        output = f" and {requested} for the output" if requested else ""
        raise ContextLengthError(
            f"This model's maximum context length is {limits.max_request_tokens} tokens, but the "
            f"request has {num_prompt_tokens} in the prompt{output}.",
            "messages" if isinstance(request, ChatRequest) else "prompt",
        )
    if requested is None:
        return min(num_left, max(defaults.max_new_tokens or num_left, request.min_tokens or 0))
    # 0 is echo alone: the engine generates one token, and the response leaves it out.
    return max(1, requested)


def template_of_regions(request: ChatRequest, text: BaseText) -> ResponseTemplate | None:
    """Returns the template if the answer may have reasoning or tool calls beside its content."""
    template = text.response_template
    if template is None or template.thinks or (template.reads_calls and request.shows_tools):
        return template
    return None


def _chat_prompt(request: ChatRequest, text: BaseText, limits: EngineLimits) -> Prompt:
    rendered = _render_chat(request, request.messages, text)
    # The template writes the special tokens itself, so the tokenizer must not add its own.
    ids = _encode(rendered, bool(request.add_special_tokens), text, limits, "messages")
    template = template_of_regions(request, text)
    turn_start = "" if template is None else template.turn_start(rendered)
    return Prompt(ids, None, turn_start, _answer_grammar(request, text, rendered, turn_start))


def _answer_grammar(
    request: ChatRequest, text: BaseText, rendered: str, turn_start: str
) -> Grammar | None:
    tools, template = request.template_tools, text.response_template
    if not tools and (request.grammar is None or template is None or not template.thinks):
        return request.grammar
    thinking = NO_THINKING
    if template is not None:
        start = turn_start or template.turn_start(rendered)
        is_open = RegionParser(template, start).is_reasoning
        end = template.reasoning.close if template.reasoning is not None else None
        end_id = text.tokenizer.token_id(end.literal or "") if is_open and end else None
        wants = request.template_variables.get("enable_thinking") is not False
        thinking = Thinking(is_open, end_id, template.thinks and wants and not start)
    return answer_grammar(
        request.tool_choice,
        tools,
        template,
        text.tokenizer.special_ids(),
        content=request.grammar,
        is_parallel=request.parallel_tool_calls is not False,
        thinking=thinking,
    )


def _render_chat(
    request: ChatRequest | TokenizeRequest, messages: Sequence[ChatMessage], text: BaseText
) -> str:
    return text.render_chat(
        messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        variables=request.template_variables,
        tools=request.template_tools,
        documents=request.documents,
    )


def _encode(
    value: str, add_special_tokens: bool, text: BaseText, limits: EngineLimits, param: str
) -> tuple[int, ...]:
    max_tokens = limits.max_request_tokens
    min_tokens = text.tokenizer.min_tokens(value)
    if min_tokens <= max_tokens:
        min_tokens = text.tokenizer.min_tokens_by_prefixes(value, max_tokens)
    if min_tokens > max_tokens:
        raise ContextLengthError(
            f"This model's maximum context length is {max_tokens} tokens, but the prompt of "
            f"{len(value)} characters has at least {min_tokens}.",
            param,
        )
    return tuple(text.encode(value, add_special_tokens=add_special_tokens))


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequestError(
            f"{param}: token id {max(token_ids)} is outside the vocabulary of {vocab_size}.", param
        )
