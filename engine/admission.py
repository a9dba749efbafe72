"""Refuses requests that can never be served, before they cost anything, and reports the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from engine.errors import ContextLengthError, InvalidRequestError
from engine.stopping import ending
from engine.types import Request, ResumedChoice, SamplingParams, Sequence

MAX_CHOICES = 128
MIN_REPETITION_PENALTY = 0.01
# Samplers compute in float32, up to 3.4e38: a logit stays finite whatever a request adds to it, in
# each of a million positions, or divides it by. Otherwise one request would look like a broken
# model.
MAX_LOGIT_CHANGE = 1e30
MAX_TOP_K = 2**31 - 1  # samplers hold it in an int32


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits that a front end needs to refuse a request before sending it."""

    max_model_len: int
    vocab_size: int
    max_kv_tokens: int  # of all sequences together
    # For a router's estimates:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_chunk: int = 32  # tokens of one prefix digest
    adapter_pool_bytes: int = 0  # device memory for adapters
    adapter_page_bytes: int = 0  # of an adapter of rank 16 at all sites but the optional
    # Of one sequence that has all KV blocks: with windows, many short ones may hold more together.
    # None: as many as all together.
    max_sequence_tokens: int | None = None

    @property
    def max_request_tokens(self) -> int:
        """The maximum number of tokens of one request, prompt and output together."""
        most = self.max_sequence_tokens
        return min(self.max_model_len, self.max_kv_tokens if most is None else most)


def check_request(
    request: Request, limits: EngineLimits, eos_token_ids: Collection[int] = ()
) -> None:
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequestError("the prompt is empty", "prompt")
    _check_ids(prompt, limits.vocab_size, "the prompt", "prompt")
    for is_ok, param, rule in _rules(request.params, limits.vocab_size, eos_token_ids):
        if not is_ok:
            value = str(getattr(request.params, param))[:100]
            raise InvalidRequestError(f"{param} is {value}, but must be {rule}", param)
    _check_length(len(prompt), request.params.max_tokens, limits)
    if len(set(request.choices)) < len(request.choices):
        raise InvalidRequestError(f"choices {request.choices} are resumed, some twice", "resumed")
    for one in request.resumed:
        _check_resumed(one, request, limits, eos_token_ids)


def _check_resumed(
    one: ResumedChoice, request: Request, limits: EngineLimits, eos_token_ids: Collection[int]
) -> None:
    if not 0 <= one.choice < request.params.n:
        words = f"choice {one.choice} is resumed, but n is {request.params.n}"
        raise InvalidRequestError(words, "resumed")
    _check_ids(one.token_ids, limits.vocab_size, f"the output of choice {one.choice}", "resumed")
    if not one.token_ids:
        return  # only its prompt may have been computed
    sequence = Sequence(request, one.choice, 0, [*request.prompt_token_ids, *one.token_ids])
    end = ending(sequence, eos_token_ids, limits.max_model_len)
    if end is not None:
        count, last = len(one.token_ids), one.token_ids[-1]
        why = f"it has {count} of {request.params.max_tokens} tokens"
        if end.reason == "stop":
            why = f"its last token {last} ends it"
        raise InvalidRequestError(
            f"choice {one.choice} is resumed, but it is complete: {why}", "resumed"
        )


def _check_ids(token_ids: tuple[int, ...], vocab_size: int, where: str, param: str) -> None:
    if not all(0 <= token < vocab_size for token in token_ids):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"token id {wrong} in {where} is outside the vocabulary of {vocab_size}", param
        )


def _check_length(num_prompt: int, max_tokens: int, limits: EngineLimits) -> None:
    limit = limits.max_request_tokens
    words = f"the model's limit is {limit} tokens (max_model_len)"
    if limit < limits.max_model_len:
        words = f"all KV blocks together hold {limit} tokens"
    if num_prompt > limit:
        raise ContextLengthError(f"prompt has {num_prompt} tokens, but {words}", "prompt")
    if num_prompt + max_tokens > limit:
        raise InvalidRequestError(
            f"prompt of {num_prompt} tokens and max_tokens {max_tokens} make "
            f"{num_prompt + max_tokens} tokens, but {words}",
            "max_tokens",
        )


def _rules(
    p: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]
) -> Iterator[tuple[bool, str, str]]:
    """Yields (is it valid, the field's name, the rule). NaN is never valid."""
    yield 1 <= p.n <= MAX_CHOICES, "n", f"between 1 and {MAX_CHOICES}"
    yield p.max_tokens >= 0, "max_tokens", "0 or more"
    yield (
        0 <= p.min_tokens <= p.max_tokens,
        "min_tokens",
        f"between 0 and max_tokens {p.max_tokens}",
    )
    change, finite = MAX_LOGIT_CHANGE, f"between -{MAX_LOGIT_CHANGE:g} and {MAX_LOGIT_CHANGE:g}"
    yield 0 <= p.temperature <= change, "temperature", f"between 0 and {change:g}"
    yield 0 <= p.top_k <= MAX_TOP_K, "top_k", f"between 0 (off) and {MAX_TOP_K}"
    yield 0 < p.top_p <= 1, "top_p", "above 0 and at most 1"
    yield 0 <= p.min_p <= 1, "min_p", "between 0 and 1"
    yield abs(p.presence_penalty) <= change, "presence_penalty", finite
    yield abs(p.frequency_penalty) <= change, "frequency_penalty", finite
    yield (
        MIN_REPETITION_PENALTY <= p.repetition_penalty <= change,
        "repetition_penalty",
        f"between {MIN_REPETITION_PENALTY} and {change:g}",
    )
    if p.grammar is not None:
        # An answer that is complete could not end: no token would be left.
        yield not p.ignore_eos, "ignore_eos", "False with a grammar"
        yield p.min_tokens == 0, "min_tokens", "0 with a grammar"
        after = p.grammar.starts_after
        yield after is None or 0 <= after < vocab_size, "grammar", "with starts_after in the ids"
    for name, count in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        yield count is None or 0 <= count <= vocab_size, name, f"between 0 and {vocab_size}"
    ids = range(vocab_size)
    yield all(t in ids for t in p.stop_token_ids), "stop_token_ids", f"ids below {vocab_size}"
    if p.min_tokens:  # none of these ids can be drawn earlier
        ends = {*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids)}
        yield len(ends) < vocab_size, "stop_token_ids", "fewer than all ids, with min_tokens"
    bias_is_right = all(token in ids and abs(bias) <= change for token, bias in p.logit_bias)
    yield bias_is_right, "logit_bias", f"values {finite} of ids below {vocab_size}"
