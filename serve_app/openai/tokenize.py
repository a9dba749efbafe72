"""The bodies of POST /tokenize and /detokenize, in vLLM's shape, which lm-eval uses."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from registry.names import MAX_MODEL_LENGTH
from serve_app.openai.chat import ChatTemplateFields, check_messages
from serve_app.openai.fields import Adapters, check_base_alone, check_token_ids
from serve_app.openai.json_body import FieldError, nullable
from serve_app.text.template import ChatMessage


def _check_tokens(value: object) -> tuple[int, ...]:
    return tuple(check_token_ids(value, "tokens"))


class _ModelFields(BaseModel):
    """The model whose text side reads the body."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(None, min_length=1, max_length=MAX_MODEL_LENGTH)
    adapters: Adapters = ()  # of the base that `model` names

    @model_validator(mode="after")
    def _adapters_are_named_once(self) -> Self:
        check_base_alone(self.model or "", self.adapters)
        return self


class TokenizeRequest(_ModelFields, ChatTemplateFields):
    """Holds either `prompt` or `messages`. `model` may be left out if the server has one base."""

    prompt: str | None = None
    messages: Annotated[
        tuple[ChatMessage, ...] | None, nullable(check_messages, list[dict[str, object]], None)
    ] = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt: send either prompt or messages.", "prompt")
        return self


class DetokenizeRequest(_ModelFields):
    tokens: Annotated[
        tuple[int, ...], PlainValidator(_check_tokens, json_schema_input_type=list[int])
    ]
