"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PlainValidator, model_validator

from serve_app.openai.fields import MAX_LOGPROBS, MAX_TOKENS, GenerationFields, check_token_ids
from serve_app.openai.json_body import FieldError, refuse

MAX_PROMPTS = 128
MAX_SEQUENCES = 256
DEFAULT_MAX_TOKENS = 16

PromptInput = str | tuple[int, ...]


def _check_prompts(value: object) -> tuple[PromptInput, ...]:
    """Returns a tuple of prompts for a string, for token ids, and for a list of either kind."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        refuse("prompt", "must be a string, token ids, or a list of either", value)
    if type(value[0]) is not str and not isinstance(value[0], list):
        return (tuple(check_token_ids(value, "prompt")),)
    if len(value) > MAX_PROMPTS:
        refuse("prompt", f"at most {MAX_PROMPTS} prompts are allowed", len(value))
    if isinstance(value[0], list):
        return tuple(_check_id_prompt(ids) for ids in value)
    for text in value:
        if not isinstance(text, str):
            refuse("prompt", "a list of strings must hold only strings", text)
    return tuple(value)


def _check_id_prompt(value: object) -> tuple[int, ...]:
    ids = tuple(check_token_ids(value, "prompt"))
    if not ids:
        raise FieldError("prompt: a list of token ids must not be empty.")
    return ids


class CompletionRequest(GenerationFields):
    id_prefix: ClassVar[str] = "cmpl-"

    prompt: Annotated[
        tuple[PromptInput, ...],
        PlainValidator(
            _check_prompts,
            json_schema_input_type=str | list[str] | list[int] | list[list[int]],
        ),
    ]
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_completion_combinations(self) -> CompletionRequest:
        num_sequences = len(self.prompt) * self.num_choices
        if num_sequences > MAX_SEQUENCES:
            raise FieldError(
                f"n: {len(self.prompt)} prompts times n {self.num_choices} make {num_sequences} "
                f"sequences; at most {MAX_SEQUENCES} are allowed per request.",
                "n",
            )
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens: 0 is allowed only if echo is true.", "max_tokens")
        return self

    @property
    def requested_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def output_logprobs(self) -> int | None:
        return self.logprobs
