"""The fields that both generation endpoints share, with their bounds, and the refused fields.

Every optional field accepts null. Unknown fields are ignored, except unsupported fields that would
change the output: ignoring such a field would answer a different request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.admission import MIN_REPETITION_PENALTY
from engine.types import Grammar, SpeculationMode
from registry.errors import InvalidNameError
from registry.names import (
    MAX_ADAPTERS,
    MAX_MODEL_LENGTH,
    check_weight,
    join_weighted,
    parse_reference,
)
from serve_app.errors import shown
from serve_app.openai.json_body import FieldError, is_one_of, nullable, refuse
from serve_app.openai.structured import check_response_format, check_structured_outputs, guided

logger = logging.getLogger(__name__)

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_PRIORITY = 2**31 - 1
MAX_SESSION_CHARS = 256  # of a field that names a user or a conversation
MAX_UNKNOWN_NAMES = 64
_ADAPTERS_SHAPE = '[{"name": "sql", "weight": 0.5}, ...]'
CONSTRAINT_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def check_base_alone(model: str, adapters: object) -> None:
    """Raises FieldError if the model names adapters beside those of the field."""
    if adapters and (found := next((c for c in ":+*" if c in model), None)):
        raise FieldError(
            f"adapters: model must name a base alone then, got {shown(model)} with {found!r}.",
            "adapters",
        )


def _check_adapters(value: object) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        refuse("adapters", f"must be a list such as {_ADAPTERS_SHAPE}", value)
    if len(value) > MAX_ADAPTERS:
        refuse("adapters", f"at most {MAX_ADAPTERS} are allowed", len(value))
    found = [_check_adapter(one, f"adapters.{number}") for number, one in enumerate(value)]
    for number, (name, _) in enumerate(found):
        if name in [earlier for earlier, _ in found[:number]]:
            raise FieldError(f"adapters.{number}.name: {shown(name)} is there twice.")
    return tuple(found)


def _check_adapter(value: dict[str, object], where: str) -> tuple[str, float]:
    for field in value:
        if field not in ("name", "weight"):
            refuse(where, "must have name and weight only", field)
    name, weight = value.get("name"), value.get("weight")
    if not isinstance(name, str):
        refuse(f"{where}.name", "must be a string", name)
    if weight is None:
        weight = 1.0
    if type(weight) not in (int, float):
        refuse(f"{where}.weight", "must be a number", weight)
    try:
        parse_reference(name)
    except InvalidNameError as error:
        raise FieldError(f"{where}.name: {error}.") from None
    try:
        return name, check_weight(float(weight))  # type: ignore[arg-type]
    except (InvalidNameError, OverflowError) as error:
        raise FieldError(f"{where}.weight: {error}.") from None


Adapters = Annotated[
    tuple[tuple[str, float], ...], nullable(_check_adapters, list[dict[str, str | float]])
]


def check_token_ids(value: object, name: str) -> list[int]:
    """Returns `value` if it is a list of token ids. Two passes in C, so cheap for long lists."""
    if not isinstance(value, list):
        refuse(name, "must be a list of token ids", value)
    if not set(map(type, value)) <= {int}:
        wrong = next(item for item in value if type(item) is not int)
        refuse(name, "must hold integers only", wrong)
    if value and not (min(value) >= 0 and max(value) <= MAX_TOKEN_ID):
        wrong = next(item for item in value if not 0 <= item <= MAX_TOKEN_ID)
        raise FieldError(f"{name}: {shown(wrong)} is not a token id.")
    return value


def _check_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        refuse("stop", "must be a string or a list of strings", value)
    if len(stops) > MAX_STOPS:
        refuse("stop", f"at most {MAX_STOPS} strings are allowed", len(stops))
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            refuse("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters", stop)
    return tuple(dict.fromkeys(stops))


def _check_stop_token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) > MAX_STOP_TOKEN_IDS:
        refuse("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} are allowed", len(value))
    return tuple(dict.fromkeys(check_token_ids(value, "stop_token_ids")))


def _check_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        refuse("logit_bias", "must map token ids to numbers", value)
    if len(value) > MAX_LOGIT_BIAS:
        refuse("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens are allowed", len(value))
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
            raise FieldError(f"logit_bias: {shown(key)} is not a token id.")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            refuse("logit_bias", "must be between -100 and 100", bias)
        biases[int(key)] = float(bias)
    return tuple(biases.items())


_EMPTY: tuple[object, ...] = (None, [], {}, "")
# Unsupported field -> the values that are equal to leaving the field out.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            *("tools", "functions", "suffix", "audio", "chat_template", "documents"),
            *("logits_processors", "logit_processors", "bad_words", "allowed_token_ids"),
            *("prompt_embeds", "truncate_prompt_tokens", "reasoning_effort", "web_search_options"),
            *("thinking_token_budget", "logprob_token_ids", "repetition_detection"),
            *("truncation_side", "vllm_xargs", "guided_whitespace_pattern", "structural_tag"),
        ),
        _EMPTY,
    ),
    "tool_choice": (None, "none", "auto"),  # tools are refused, and without any both call no tool
    "function_call": (None, "none"),
    "modalities": (None, ["text"], []),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "verbosity": (None, "medium"),
    "include_reasoning": (None, True),
    "return_prompt_text": (None, False),
    "spaces_between_special_tokens": (None, True),
    "watermarking": (None, False),
}
# Other servers select the adapter by a separate field: SGLang, LoRAX and TGI, llama.cpp.
_OTHER_MODEL_FIELDS = frozenset(
    ("lora_path", "adapter_id", "adapter_source", "merged_adapters", "lora")
)


class UnknownFields:
    """Logs the name of each unknown field or part once, so that what is ignored leaves a trace.

    Clients choose the names, so at most MAX_UNKNOWN_NAMES are remembered and logged.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def log(
        self, name: str, words: str = "a request has the unknown field %s, which is ignored"
    ) -> None:
        short = shown(name)
        if short in self._seen or len(self._seen) >= MAX_UNKNOWN_NAMES:
            return
        self._seen.add(short)
        logger.warning(words, short)
        if len(self._seen) == MAX_UNKNOWN_NAMES:
            logger.warning("further unknown fields are not logged")


unknown_fields = UnknownFields()  # of this process


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    refused: ClassVar[frozenset[str]] = frozenset()  # if truthy, at this endpoint only
    cuts_max_tokens: ClassVar[bool] = False  # to the tokens left, instead of a refusal

    model: str = Field(min_length=1, max_length=MAX_MODEL_LENGTH)
    adapters: Adapters = ()  # of the base that `model` names
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=2)
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], nullable(_check_logit_bias, dict[str, float])
    ] = ()
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: Annotated[tuple[str, ...], nullable(_check_stop, str | list[str])] = ()
    stop_token_ids: Annotated[tuple[int, ...], nullable(_check_stop_token_ids, list[int])] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    speculation: SpeculationMode | None = None  # no effect where the base's setting is "off"
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)  # lower goes first
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=MAX_SESSION_CHARS)
    safety_identifier: str | None = Field(None, max_length=MAX_SESSION_CHARS)
    prompt_cache_key: str | None = Field(None, max_length=MAX_SESSION_CHARS)
    metadata: dict[str, object] | None = None
    response_format: Annotated[
        Grammar | None, nullable(check_response_format, dict[str, object], None)
    ] = None
    structured_outputs: Annotated[
        Grammar | None, nullable(check_structured_outputs, dict[str, object], None)
    ] = None
    guided_json: Annotated[Grammar | None, guided("json", dict[str, object] | str)] = None
    guided_regex: Annotated[Grammar | None, guided("regex", str)] = None
    guided_choice: Annotated[Grammar | None, guided("choice", list[str])] = None
    guided_grammar: Annotated[Grammar | None, guided("grammar", str)] = None
    # The response id is derived from it; it need not be unique.
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: object) -> object:
        if isinstance(body, dict):
            known = cls.model_fields
            for name, value in body.items():
                if name not in known:
                    cls._check_other(name, value)
        return body

    @classmethod
    def _check_other(cls, name: str, value: object) -> None:
        """Refuses, accepts or logs a field that is not in this model."""
        neutral = (*_EMPTY, False) if name in cls.refused else UNSUPPORTED.get(name)
        if name in _OTHER_MODEL_FIELDS:
            if not is_one_of(value, _EMPTY):
                raise FieldError(
                    f"{name}: is not supported, got {shown(value)}. Name the adapter in the "
                    'field model: "model": "<base>:<adapter>", or several in adapters.',
                    name,
                )
        elif neutral is None:
            unknown_fields.log(name)
        elif not is_one_of(value, neutral):
            short = shown(name)[1:-1]
            refuse(short, "is not supported", value, short)

    @model_validator(mode="after")
    def _check_combinations(self) -> GenerationFields:
        if self.best_of is not None and self.best_of != self.num_choices:
            refuse("best_of", f"must equal n ({self.num_choices})", self.best_of, "best_of")
        limit = self.requested_tokens
        if limit is not None and (self.min_tokens or 0) > limit:
            raise FieldError(
                f"min_tokens: {self.min_tokens} is more than max_tokens, {limit}.", "min_tokens"
            )
        check_base_alone(self.model, self.adapters)
        self._check_constraints()
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options: is allowed only if stream is true.", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError(
                "prompt_logprobs: is not allowed if stream is true.", "prompt_logprobs"
            )
        return self

    def _check_constraints(self) -> None:
        given = [name for name in CONSTRAINT_FIELDS if getattr(self, name) is not None]
        if not given:
            return
        if len(given) > 1:
            raise FieldError(
                f"{given[1]}: only one field may constrain the answer, and {given[0]} does.",
                given[1],
            )
        # A complete answer could not end: no token would be left to draw.
        for name, value in (("ignore_eos", self.ignore_eos), ("min_tokens", self.min_tokens)):
            if value:
                refuse(name, f"is not supported together with {given[0]}", value, name)

    @property
    def grammar_field(self) -> str | None:
        """The name of the field that constrains the answer."""
        return next((name for name in CONSTRAINT_FIELDS if getattr(self, name) is not None), None)

    @property
    def grammar(self) -> Grammar | None:
        """The language of the answer; None for free text."""
        name = self.grammar_field
        found: Grammar | None = None if name is None else getattr(self, name)
        return found

    @property
    def full_model(self) -> str:
        """The model with the adapters, as one string."""
        return f"{self.model}:{join_weighted(self.adapters)}" if self.adapters else self.model

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def requested_tokens(self) -> int | None:
        """The client's limit of output tokens; None for as many as fit."""
        raise NotImplementedError

    @property
    def output_logprobs(self) -> int | None:
        """The number of alternatives to report per token; None for no log-probabilities."""
        raise NotImplementedError
