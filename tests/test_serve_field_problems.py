"""The words of refused values: ours, with the field and the value, and no library's."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from serve_app.api.lora import LoadBody
from serve_app.errors import ApiError
from serve_app.field_problems import decoding_problem
from serve_app.openai.chat import ChatRequest
from serve_app.openai.json_body import parse_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
OF_LIBRARIES = re.compile(r"Input|should|valid |permitted|Expected|Object|\\`|unable")


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (ChatRequest, {"temperature": "hot"}, "temperature: must be a number, got 'hot'."),
        (ChatRequest, {"temperature": 3}, "temperature: must be at most 2, got 3."),
        (ChatRequest, {"top_p": 0}, "top_p: must be greater than 0, got 0."),
        (ChatRequest, {"n": 1.5}, "n: must be an integer, got 1.5."),
        (ChatRequest, {"stream": "yes"}, "stream: must be true or false, got 'yes'."),
        (ChatRequest, {"stream_options": 5}, "stream_options: must be an object, got 5."),
        (ChatRequest, {"model": 5}, "model: must be a string, got 5."),
        (ChatRequest, {"user": "x" * 300}, "user: must have at most 256 characters, got 'x"),
        (ChatRequest, {"request_id": "a b"}, "request_id: must match the pattern '^[A-Za-z0"),
        (ChatRequest, {"speculation": "x"}, "speculation: must be 'off', 'suffix' or 'auto', got"),
        (LoadBody, {"lora_name": 5}, "lora_name: must be a string, got 5."),
    ],
)
def test_a_wrong_value_of_a_body_is_refused_in_our_words(
    kind: Any, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(kind, json.dumps((CHAT if kind is ChatRequest else {}) | fields).encode())
    assert refused.value.message.startswith(message)
    assert not OF_LIBRARIES.search(refused.value.message)
    assert refused.value.param == message.partition(":")[0]


class _Document(msgspec.Struct):
    size: int | None
    names: list[str]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (b"{", "it is not valid JSON"),
        (b"\xff", "it is not valid JSON"),
        (b"[]", "the document: must be an object, got an array"),
        (b'{"size": "x"}', "size: must be an integer or null, got a string"),
        (b'{"size": 1}', "names: is required"),
        (b'{"size": 1, "names": [5]}', "names[0]: must be a string, got an integer"),
    ],
)
def test_a_document_that_cannot_be_decoded_is_described_in_our_words(
    document: bytes, words: str
) -> None:
    with pytest.raises(msgspec.DecodeError) as refused:
        msgspec.json.decode(document, type=_Document)
    assert decoding_problem(refused.value) == words
